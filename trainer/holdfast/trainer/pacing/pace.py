"""The pace of one session: the cost of its steps and saves, and the resulting intervals.

Ranks that meet exchange a few numbers, so that each has the same rhythm of snapshots. Only rank 0
chooses the `auto` interval of checkpoints, because it decides when to save.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from holdfast.contracts.account.save_interval import Failures, IntervalChoice, choose_interval
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import Cause
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.pacing.cadence import Cadence, Interval
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.saving.saver import Saver
from holdfast.trainer.staging.snapshots import OVERHEAD_MAX, SnapshotRhythm

# The rate of failures without a warning, computed from a run's journals.

# These causes come with a warning, so a last checkpoint is saved and nothing is lost.
ANNOUNCED = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.OPERATOR})


def observe_failures(events: Iterable[Event], current: tuple[int, int]) -> Failures:
    """Return the failures in a run's journals. `current`, (attempt, launch), is left out.

    A launch counts as failed when its agent recorded a crash. If the agent recorded nothing, the
    launch did not fail when the program recorded that it left. Otherwise the attempt's cause
    decides.
    """
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    crashed: dict[tuple[int, int], bool] = {}
    announced: dict[int, bool] = {}
    for event in events:
        attempt, launch = event.data.get("attempt"), event.data.get("launch")
        if event.kind is EventKind.ATTEMPT_ENDED and attempt is not None:
            cause = event.data.get("cause")
            announced[attempt] = cause is None or cause in ANNOUNCED
        if attempt is None or launch is None or (attempt, launch) == current:
            continue
        key = (attempt, launch)
        first, last = spans.get(key, (event.time, event.time))
        spans[key] = min(first, event.time), max(last, event.time)
        if event.kind is EventKind.LAUNCH_ENDED:
            crashed[key] = event.data.get("ending") == "crashed"
        elif event.data.get("has_left"):
            crashed.setdefault(key, False)
    failed = [key for key in spans if crashed.get(key, not announced.get(key[0], False))]
    return Failures(len(failed), sum(last - first for first, last in spans.values()))


# The duration of steps, with and without a flush beside them.


class StepMeter:
    """Measures the duration of steps, separately for steps during a flush. Constant memory."""

    def __init__(self, now: float) -> None:
        self._entered_at = now
        self._steps = [0, 0]
        self._seconds = [0.0, 0.0]

    def leave(self, now: float, *, is_flushing: bool) -> None:
        """Record that a step is complete."""
        self._steps[is_flushing] += 1
        self._seconds[is_flushing] += now - self._entered_at
        self._entered_at = now

    def enter(self, now: float) -> None:
        """Record that the next step begins. Work since `leave` belongs to no step."""
        self._entered_at = now

    @property
    def step_s(self) -> float:
        """The mean seconds of a step since the last `restart`, or 0 without steps."""
        steps = sum(self._steps)
        return sum(self._seconds) / steps if steps else 0.0

    @property
    def slowed_s(self) -> float:
        """The seconds that flushes added to steps, or 0 until both kinds were measured."""
        if not all(self._steps):
            return 0.0
        quiet_s = self._seconds[False] / self._steps[False]
        return max(0.0, self._seconds[True] - self._steps[True] * quiet_s)

    def restart(self) -> None:
        """Start to count again, because the pace may have changed."""
        self._steps, self._seconds = [0, 0], [0.0, 0.0]


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
        self._reported: IntervalChoice | None = None
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
