"""How an incarnation ended, as node 0 saw it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.contracts.attempt import IncarnationRecord
from holdfast.contracts.board import NOWHERE
from holdfast.workers.agent.runtime import NodeReport, Wreck


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one incarnation ended: completed, stopped, crashed, hung or killed."""

    ending: str
    exit_code: int | None
    reports: tuple[NodeReport, ...]
    wreck: Wreck
    hang: tuple[str, ...] = ()

    @property
    def completed(self) -> int:
        """The last step that any rank finished, or `NOWHERE`."""
        return max((r.completed for r in self.reports), default=NOWHERE)

    @property
    def resumed(self) -> int:
        """The step after which this incarnation began, or `NOWHERE`."""
        return max((r.resumed for r in self.reports), default=NOWHERE)

    @property
    def gained(self) -> bool:
        """True when a step was finished that this incarnation did not begin with."""
        return self.completed > self.resumed

    def record(self, number: int, started_at: float) -> IncarnationRecord:
        """What an attempt's outcome keeps of it: it has ended now."""
        return IncarnationRecord(
            number=number,
            started_at=started_at,
            ended_at=time.time(),
            exit_code=self.exit_code,
            first_step=self.resumed + 1 if self.resumed > NOWHERE else None,
            last_step=self.completed if self.gained else None,
            ending=self.ending,
        )
