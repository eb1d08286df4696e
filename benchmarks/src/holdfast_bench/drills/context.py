"""The context of a fault on a temporary run: it has a testbed too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast_bench.drills.recorded_run import RecordedRun
from holdfast_bench.drills.testbed import Testbed
from holdfast_bench.live_drills.fault_context import FaultContext


@dataclass(kw_only=True)
class TestbedContext(FaultContext):
    """The run, the source of random numbers and the testbed.

    A fault sets `is_poisoned` if steps have no loss until the recovery.
    """

    # pytest would otherwise take the class for tests.
    __test__: ClassVar = False
    hang_s_max: ClassVar[float] = 180.0

    target: RecordedRun
    testbed: Testbed
    is_poisoned: bool = False

    def start_flow(self) -> None:
        """Start another supervisor for the run in its testbed."""
        self.testbed.start_flow(self.target.paths)

    def reap_flow(self) -> None:
        """Reap the supervisor, which was killed."""
        self.testbed.kill_flow()
