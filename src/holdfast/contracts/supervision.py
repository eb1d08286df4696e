"""Checks whether a run has a supervisor, by the lock that the supervisor holds."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path


def is_supervised(path: Path) -> bool:
    """Return True if a live supervisor holds the lock at `path`; False if it cannot be read.

    The check takes a shared lock for a moment, so two checks do not take each other for a
    supervisor.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return False
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def lost_supervisor(path: Path) -> bool:
    """Return True if a supervisor once took the lock at `path` and none holds it now.

    This is the view of the present host. A new run has no lock file until its first supervisor
    starts, and the result is then False.
    """
    return os.path.lexists(path) and not is_supervised(path)
