"""The context of a fault: the run and the random numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from holdfast.flows.start import start_here
from holdfast_bench.live_drills.kinds import Recovery
from holdfast_bench.live_drills.target_run import TargetRun


@dataclass
class FaultContext:
    """The run and the source of random numbers.

    A fault sets `recovery` if the expected recovery differs from that of its kind, and `acted_at`
    (Unix seconds) if it acts after a wait.
    """

    # The default limit of silence of a phase, and the time to confirm a hang.
    hang_s_max: ClassVar[float] = 1200.0

    target: TargetRun
    chance: random.Random
    recovery: Recovery | None = None
    acted_at: float = 0.0

    def start_flow(self) -> None:
        """Start another supervisor for the run on this machine."""
        start_here(self.target.paths)

    def reap_flow(self) -> None:
        """Forget the supervisor, which was killed. A live run has it from another process."""
