"""Checks whether a run has a supervisor, by the lock that the supervisor holds."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.file_locks import wait_for_lock
from holdfast.contracts.reading import open_regular


def is_supervised(path: Path) -> bool:
    """Return True if a live supervisor holds the lock at `path`; False if it cannot be read.

    The check takes a shared lock for a moment, so two checks do not take each other for a
    supervisor.
    """
    try:
        with open(open_regular(path), "rb") as lock:
            return not wait_for_lock(lock.fileno(), shared=True)
    except (OSError, ForeignFileError):
        return False


def lost_supervisor(path: Path) -> bool:
    """Return True if a supervisor once took the lock at `path` and none holds it now.

    This is the view of the present host. A new run has no lock file until its first supervisor
    starts, and the result is then False.
    """
    return os.path.lexists(path) and not is_supervised(path)
