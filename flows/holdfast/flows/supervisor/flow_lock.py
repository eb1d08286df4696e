"""How commands give a run to their user's supervisor service.

The service and the commands meet in a folder in the root. While the service runs, it holds the lock
there, and a command that would start a supervisor leaves a file with the run's name instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import file_locks, reading
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.records.supervision import is_supervised

# The lock of a supervisor, and of other processes of which one may act at a time.
#
# The kernel releases it when the process dies. Only the owner of the lock's folder can hold it.


class FlowLock:
    """An exclusive `flock` on a file such as a run's `flow.lock`, taken without waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_held = False
        self._handle: int | None = None

    def __enter__(self) -> FlowLock:
        # Closed on exec, because a job started from here would otherwise keep the lock.
        self._handle = file_locks.open_lock(self.path, owner_only=True)
        # Some network file systems show a new file to other hosts only once it is synced.
        os.fsync(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock and close its file. The lock cannot be taken again."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self.is_held = None, False

    def try_take(self) -> bool:
        assert self._handle is not None, "use the lock in a with statement"
        self.is_held = file_locks.wait_for_lock(self._handle)
        return self.is_held


# The lock contains where the service runs.
LOCK: Final = "lock"
WANTED: Final = "wanted"
NAME_BYTES_MAX: Final = 256


def service_folder(root: Path) -> Path:
    """Return the folder in `root` by which this user's service and commands meet."""
    return root / f".holdfast-service-{os.geteuid()}"


def hand_over(paths: RunPaths) -> str:
    """Have the service of the run's root supervise the run; return where the service runs.

    Returns '' if this user has no service for that root.
    """
    folder = service_folder(paths.directory.parent)
    try:
        # Anyone may create the folder in a shared root. Only the folder's owner can hold the lock.
        if folder.lstat().st_uid != os.geteuid() or not is_supervised(folder / LOCK):
            return ""
        flags = os.O_WRONLY | os.O_CREAT
        os.close(reading.open_beneath(folder / WANTED / paths.name, flags, below=folder))
        where = reading.read_bounded(folder / LOCK, NAME_BYTES_MAX, below=folder).decode(
            errors="replace"
        )
        # If it has just ended, its successor finds the file, but nobody may start one.
        return where if is_supervised(folder / LOCK) else ""
    except (OSError, ForeignFileError):
        return ""
