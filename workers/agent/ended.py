"""How a launch ended, from node 0's view."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.contracts.attempt import LaunchRecord
from holdfast.contracts.rank_status import NOWHERE
from holdfast.workers.agent.node import CrashReport, NodeReport


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one launch ended: completed, stopped, crashed, hung or killed."""

    ending: str
    exit_code: int | None
    reports: tuple[NodeReport, ...]
    crash_report: CrashReport
    hang: tuple[str, ...] = ()

    @property
    def completed(self) -> int:
        """The last step that any rank finished, or `NOWHERE`."""
        return max((r.completed for r in self.reports), default=NOWHERE)

    @property
    def resumed(self) -> int:
        """The step after which this launch started, or `NOWHERE`."""
        return max((r.resumed for r in self.reports), default=NOWHERE)

    @property
    def gained(self) -> bool:
        """True if this launch finished a step that was not finished before."""
        return self.completed > self.resumed

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
