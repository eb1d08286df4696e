"""Hints of the agents that another node's flusher has written its part, or has committed a step.

Flushers of different nodes meet in the run's folder only. With agents, a flusher that has written
its part reports that to its agent, and node 0's agent wakes the flusher that waits. So flushers
need not look into the folder again and again. A lost hint costs `LOOK_S` and never a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Final

from holdfast.contracts.node.reporting import report

# The flusher's log, which is its standard error.


def log(text: str) -> None:
    """Write a line to the log."""
    report(f"holdfast flusher: {text}", is_error=True)


# How often a flusher looks into the folder without a hint.
LOOK_S: Final = 10.0
# While an agent waits for all steps, because a stop's deadline may be near.
HURRY_S: Final = 0.25
# Without an agent that passes hints on.
QUICK_S: Final = 1.0
POLL_S: Final = 0.002
POLL_SLOW_S: Final = 0.05


class Hints:
    """Wakes the writer thread. Any thread or process with the descriptor may give a hint."""

    def __init__(self, handle: int | None = None) -> None:
        """`handle` is an eventfd that the agent writes to; None without an agent."""
        self._handle, self._is_passed_on = handle, handle is not None
        self._is_hurried = False

    def give(self) -> None:
        """Wake the writer thread now, or at its next wait."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._handle, 1)

    def hurry(self, is_hurried: bool) -> None:
        """Set whether to look often, as while an agent waits for all steps."""
        self._is_hurried = is_hurried
        self.give()

    def end(self) -> None:
        """Stop relying on hints, because the agent that passed them on is gone."""
        self._is_passed_on = False
        self.give()

    def wait(self, waited_s: float) -> None:
        """Wait for a hint, for a time that grows with the `waited_s` seconds so far."""
        if self._handle is None or not self._is_passed_on:
            # Without an agent, only the folder shows what other nodes have done, so look often.
            time.sleep(POLL_S if waited_s < QUICK_S else POLL_SLOW_S)
            return
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if poll.poll(1000 * (HURRY_S if self._is_hurried else LOOK_S)):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._handle)
