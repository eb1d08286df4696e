"""File locks with a timeout."""

from __future__ import annotations

import fcntl
import time
from typing import Final

POLL_S: Final = 0.05


def wait_for_lock(handle: int, timeout_s: float = 0.0, *, shared: bool = False) -> bool:
    """Take the `flock` of an open file. Return False if that fails for `timeout_s`.

    The lock is exclusive unless it is `shared`. It is held until the descriptor is closed.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(POLL_S)
        else:
            return True
