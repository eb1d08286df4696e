"""Clocks that nobody can set, and timeouts that pause while this process is suspended."""

from __future__ import annotations

import time
from typing import Final

# Timeouts that pause while this process is suspended.

# The time between two checks counts as no more than this. Waiting code must check more often.
GAP_S_MAX: Final = 2.0
LOOK_S: Final = 1.0


class Timeout:
    """A timeout that counts only time in which this process could run.

    A batch system may suspend every process of a job for hours and then continue them. The
    monotonic clock does not stop meanwhile. The silence of a peer that was also suspended must not
    count against it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Start the full timeout again."""
        self._left_s, self._looked_at = self.seconds, time.monotonic()

    @property
    def left_s(self) -> float:
        """The remaining seconds, at least 0. Read it at least every `LOOK_S` seconds."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, GAP_S_MAX)
        self._looked_at = now
        return max(0.0, self._left_s)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0


# Unix time that nobody can set while this process runs.
#
# The clock of a machine may be set by hours while a job trains. A deadline that was computed
# before would then be past at once, or hours away. Time during which the machine sleeps counts.

_OFFSET_S: Final = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def now() -> float:
    """Return the Unix time at the start of this process plus the time since then."""
    return _OFFSET_S + time.clock_gettime(time.CLOCK_BOOTTIME)
