"""The context of a fault: the run, the testbed and the random numbers."""

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
    """The run, the source of random numbers, and the testbed if there is one.

    A fault sets `recovery` if the expected recovery differs from that of its kind, `is_poisoned` if
    steps have no loss until the recovery, and `acted_at` (Unix seconds) if it acts after a wait.
    """

    target: TargetRun
    chance: random.Random
    testbed: Testbed | None = None
    recovery: Recovery | None = None
    is_poisoned: bool = False
    acted_at: float = 0.0

    def need_testbed(self) -> Testbed:
        """Return the testbed. Raises `ServiceError` for a live run, which has none."""
        if self.testbed is None:
            raise ServiceError("only a temporary run has a disk and a database of its own")
        return self.testbed

    def start_flow(self) -> None:
        """Start another supervisor for the run, in its testbed or on this machine."""
        if self.testbed is not None:
            self.testbed.start_flow(self.target.paths)
        else:
            start_here(self.target.paths)
