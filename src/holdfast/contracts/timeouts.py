"""Bounds on waits that do not run on while this process is suspended."""

from __future__ import annotations

import time
from typing import Final

# A gap between two looks counts for no more than this. Whoever waits looks more often.
GAP_S_MAX: Final = 2.0
LOOK_S: Final = 1.0


class Timeout:
    """So many seconds of waiting, of the time in which this process could run.

    A batch system may stop every process of a job for hours and continue them all. The monotonic
    clock goes on meanwhile, and the silence of a peer that was stopped as well proves nothing.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Wait the full time again."""
        self._left_s, self._looked_at = self.seconds, time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 at the end; look at least every `LOOK_S` seconds."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, GAP_S_MAX)
        self._looked_at = now
        return max(0.0, self._left_s)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0
