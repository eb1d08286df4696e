"""Unix time that nobody can set while this process runs.

The clock of a machine may be set by hours while a job trains. A deadline that was computed before
would then be past at once, or hours away. Time during which the machine sleeps counts.
"""

from __future__ import annotations

import time
from typing import Final

_OFFSET_S: Final = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def now() -> float:
    """Return the Unix time at the start of this process plus the time since then."""
    return _OFFSET_S + time.clock_gettime(time.CLOCK_BOOTTIME)
