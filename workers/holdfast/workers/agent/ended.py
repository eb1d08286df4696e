"""How a launch ended, from node 0's view."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.records.attempt import LaunchRecord
from holdfast.workers.agent.node import CrashReport, NodeReport

# The phases of a rank that only saves, or has left.
_PAST_TRAINING: Final = frozenset({"SAVE", "STOP", "DONE"})


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one launch ended: completed, stopped, crashed, hung or killed.

    `saved` are the steps that a program without a session recorded, see `steps_saved`.
    """

    ending: str
    exit_code: int | None
    reports: tuple[NodeReport, ...]
    crash_report: CrashReport
    hang: tuple[str, ...] = ()
    saved: tuple[int, int] = (NOWHERE, NOWHERE)

    @property
    def completed(self) -> int:
        """The last step that any rank is known to have finished, or `NOWHERE`."""
        return max(self.saved[1], *(r.completed for r in self.reports), NOWHERE)

    @property
    def resumed(self) -> int:
        """The step after which this launch started, or `NOWHERE`."""
        return max(self.saved[0], *(r.resumed for r in self.reports), NOWHERE)

    @property
    def gained(self) -> bool:
        """True if this launch finished a step that was not finished before."""
        return self.completed > self.resumed

    @property
    def unsaved(self) -> str:
        """The recorded error that decides why this launch crashed, or ''.

        It is that of a save after which nothing was trained, if the ranks had ended training or
        left no error of their own.
        """
        phases = [phase for report in self.reports for phase in report.phases]
        is_past_training = bool(phases) and _PAST_TRAINING.issuperset(phases)
        crash = self.crash_report
        if any(failure.text for failure in crash.failures) and not is_past_training:
            return ""
        last = [save for save in crash.failed_saves if save.step >= self.completed]
        return str(last[0]) if last else crash.unwritten

    def record(self, number: int, started_at: float) -> LaunchRecord:
        """Return the record of this launch, which has just ended, for the attempt's outcome."""
        return LaunchRecord(
            number=number,
            started_at=started_at,
            ended_at=time.time(),
            exit_code=self.exit_code,
            first_step=self.resumed + 1 if self.resumed > NOWHERE else None,
            last_step=self.completed if self.gained else None,
            ending=self.ending,
        )


def steps_saved(
    events: Iterable[Event], attempt: int, launch: int, reports: Iterable[NodeReport]
) -> tuple[int, int]:
    """Return the step a launch resumed from and its newest saved one, each `NOWHERE` if unknown.

    `events` are rank 0's. Both are `NOWHERE` for a program with a session, whose ranks report.
    """
    resumed = saved = NOWHERE
    if any(report.registered for report in reports):
        return resumed, saved
    for event in events:
        step = event.data.get("step")
        if (event.data.get("attempt"), event.data.get("launch")) != (attempt, launch):
            continue
        if event.kind is EventKind.RESUMED and isinstance(step, int):
            resumed = step
        elif event.kind is EventKind.COMMITTED and isinstance(step, int):
            saved = max(saved, step)
    return resumed, saved
