"""What a fault may reach."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.contracts.errors import ServiceError
from holdfast.flows.drills.kinds import Recovery
from holdfast.flows.drills.target_run import TargetRun
from holdfast.flows.drills.testbed import Testbed
from holdfast.flows.start import start_here


@dataclass
class FaultContext:
    """What a fault may reach: the run, the chance that moves it, and the testbed if there is one.

    `recovery` is set by a fault of which something else comes this time than its kind says,
    `is_poisoned` by one after which steps have no loss until it is recovered from, `acted_at`
    (Unix seconds) by one that has to wait for its moment.
    """

    target: TargetRun
    chance: random.Random
    testbed: Testbed | None = None
    recovery: Recovery | None = None
    is_poisoned: bool = False
    acted_at: float = 0.0

    def need_testbed(self) -> Testbed:
        """The stand. Raises `ServiceError` on a live run, whose servers are not the drill's."""
        if self.testbed is None:
            raise ServiceError("only a throw-away run has a disk and a database to take away")
        return self.testbed

    def start_flow(self) -> None:
        """Start another flow for the run, by the means of where it lives."""
        if self.testbed is not None:
            self.testbed.start_flow(self.target.paths)
        else:
            start_here(self.target.paths)
