"""Retries of reads that failed with an error that may be temporary."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

READ_WAITS_S: Final = (0.05, 0.5)
"""Seconds before the second and the third attempt."""

# Causes: a server that restarts, a path that fails over, a file handle that a rename made stale.
_MAY_PASS: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def read_again(read: Callable[[], T]) -> T:
    """Return the result of `read()`, retried after temporary errors. Raises the last error."""
    for wait_s in READ_WAITS_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise
            time.sleep(wait_s)
    return read()
