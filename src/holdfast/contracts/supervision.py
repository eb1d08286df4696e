"""Whether somebody supervises a run, from the lock that its flow holds."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path


def is_supervised(path: Path) -> bool:
    """True when a living flow holds the lock at `path`; False also when it cannot be read.

    The probe takes a shared lock for a moment, so two probes do not mistake each other for a flow.
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
    """True when a flow once took the lock at `path` and none holds it now, as this host sees it.

    A run that was just created has no such file yet: it waits for its first supervisor.
    """
    return os.path.lexists(path) and not is_supervised(path)
