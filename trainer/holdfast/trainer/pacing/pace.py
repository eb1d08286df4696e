"""The pace of one session: the cost of its steps and saves, and the resulting intervals.

Ranks that meet exchange a few numbers, so that each has the same rhythm of snapshots. Only rank 0
chooses the `auto` interval of checkpoints, because it decides when to save.
"""

from __future__ import annotations

import time

from holdfast.contracts.account.save_interval import Choice, Failures, choose_interval
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import load_events
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.pacing.cadence import Cadence, Interval
from holdfast.trainer.pacing.failures import observe_failures
from holdfast.trainer.pacing.step_meter import StepMeter
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.saving.saver import Saver
from holdfast.trainer.staging.snapshots import OVERHEAD_MAX, SnapshotRhythm


class Pace:
    """Measures one rank's steps. On rank 0 it also chooses the interval and journals the reason."""

    def __init__(
        self,
        interval: Interval,
        rhythm: SnapshotRhythm,
        *,
        step: int,
        context: RankContext,
        saver: Saver,
        recorder: Recorder,
        looks_first: bool = False,
    ) -> None:
        """`step` is the last complete one."""
        self.cadence = Cadence(
            interval,
            step=step,
            now=(now := time.monotonic()),
            looks_early=rhythm.is_auto,
            looks_first=looks_first,
        )
        self.rhythm = rhythm
        self.meter = StepMeter(now)
        self._is_root = context.identity.rank == 0
        self._chooses = self._is_root and interval.is_auto
        self._context, self._saver, self._recorder = context, saver, recorder
        self._saves = 0
        self._slowed_s = 0.0
        self._reported: Choice | None = None
        self._failures = Failures(0, 0.0)
        if self._chooses:
            current = (context.identity.attempt, context.identity.launch)
            self._failures = observe_failures(load_events(context.run), current)

    def figures(self) -> tuple[int, int]:
        """Return this rank's microseconds per copy and, on rank 0 only, per step."""
        step_us = int(self.meter.step_s * 1e6) if self._is_root else 0
        return int(self._saver.copy_s * 1e6), step_us

    def update(self, copy_us: int, step_us: int, *, saved: bool) -> None:
        """Update after the meeting with the largest figures of all ranks, equal on every rank."""
        if self.rhythm.update(copy_us, step_us):
            self._report_rhythm(copy_us, step_us)
        self._saves += saved
        if self._saves and self.meter.slowed_s:
            self._slowed_s = self.meter.slowed_s / self._saves
            self._saves = 0
        self.meter.restart()
        if self._chooses:
            self._choose(copy_us)

    def _choose(self, copy_us: int) -> None:
        """On rank 0, choose the interval from the measurements, once a save was measured."""
        if self._saver.flush_s is None:
            return
        choice = choose_interval(
            self._failures,
            self._context.identity.nodes,
            cost_s=copy_us / 1e6 + self._slowed_s,
            flush_s=self._saver.flush_s,
        )
        self.cadence.adopt(choice.interval_s)
        if choice.differs_from(self._reported):
            self._reported = choice
            self._recorder.event(EventKind.NOTE, interval_s=choice.interval_s, text=str(choice))

    def _report_rhythm(self, copy_us: int, step_us: int) -> None:
        every = self.rhythm.every
        kept = f"every {every} steps" if every > 1 else "every step" if every else "none"
        self._recorder.event(
            EventKind.NOTE,
            snapshots_every=every,
            text=f"snapshots in memory: {kept}; a copy takes {copy_us / 1e6:.4f} s, a step "
            f"{step_us / 1e6:.4f} s, and the budget is {OVERHEAD_MAX:.0%}",
        )
