"""Checks whether a run has a supervisor, by the lock that the supervisor holds."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import file_locks, reading
from holdfast.contracts.errors import ForeignFileError

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def is_supervised(path: Path) -> bool | None:
    """Return True if a live supervisor holds the lock at `path`; None if that is unknown.

    Only the owner of the folder, and root, can read the lock, so for everybody else it is unknown.
    A lock file does not count if others may open it, or if it belongs to another user than its
    folder. The check takes a shared lock for a moment, so two checks do not take each other for a
    supervisor.
    """
    try:
        with open(reading.open_regular(path), "rb") as lock:
            # Anyone can hold the `flock` of a file that they can open. Such a file would show a
            # supervisor where there is none.
            if not _counts(os.fstat(lock.fileno()), path.parent.stat().st_uid):
                return False
            # Shared: an exclusive probe of one process would look like a supervisor to another's.
            return not file_locks.wait_for_lock(lock.fileno(), shared=True)
    except PermissionError:
        return None
    except (OSError, ForeignFileError):
        return False


def lost_supervisor(path: Path) -> bool:
    """Return True if a supervisor once took the lock at `path` and none holds it now.

    This is the view of the present host. A new run has no lock file until its first supervisor
    starts, and the result is then False.
    """
    return os.path.lexists(path) and is_supervised(path) is False


def _counts(lock: os.stat_result, owner: int) -> bool:
    """Return True if only the folder's owner and root can hold the lock."""
    return lock.st_uid in {owner, 0} and not lock.st_mode & _OTHERS
