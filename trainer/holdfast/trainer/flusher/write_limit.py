"""Limits how fast a node's flusher writes, so that training keeps its share of disk and memory.

What training waits for is written at full speed: see `WriteLimit.lift`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

# The longest delay until a lifted limit lets a writer continue.
LOOK_S: Final = 0.05

Pace = Callable[[int], None]
"""Called after so many bytes were written. It returns when the next ones may follow."""


def at_full_speed(_: int) -> None:
    """Wait for nothing: the pace of what is not limited."""


class WriteLimit:
    """`bytes_per_s` for all writers of a node together, or None without a limit."""

    def __init__(
        self, bytes_per_s: int | None, is_waited_for: Callable[[int], bool] = lambda _: False
    ) -> None:
        """`is_waited_for` is given a launch: True if nothing of it trains on this node."""
        self._bytes_per_s, self._is_waited_for = bytes_per_s, is_waited_for
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._lifted = (0, -1)

    def lift(self, launch: int, step: int) -> None:
        """Write this step and all before it at full speed, because training waits for it.

        A rank asks for it when it waits for a slot or for a commit, and before a save that is the
        last one or that a cloud's notice asks for.
        """
        self._lifted = max(self._lifted, (launch, step))

    def pace_of(self, launch: int, step: int) -> Pace:
        """Return the pace at which a step is written."""
        if self._bytes_per_s is None:
            return at_full_speed
        rate = self._bytes_per_s

        def is_lifted() -> bool:
            return (launch, step) <= self._lifted or self._is_waited_for(launch)

        def pace(count: int) -> None:
            if is_lifted():
                return
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + count / rate
                until = self._free_at
            while (left_s := until - time.monotonic()) > 0 and not is_lifted():
                time.sleep(min(left_s, LOOK_S))

        return pace
