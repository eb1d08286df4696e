"""How commands give a run to their user's supervisor service.

The service and the commands meet in a folder in the root. While the service runs, it holds the lock
there, and a command that would start a supervisor leaves a file with the run's name instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.reading import open_beneath, read_bounded
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.records.supervision import is_supervised

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
        os.close(open_beneath(folder / WANTED / paths.name, flags, below=folder))
        where = read_bounded(folder / LOCK, NAME_BYTES_MAX, below=folder).decode(errors="replace")
        # If it has just ended, its successor finds the file, but nobody may start one.
        return where if is_supervised(folder / LOCK) else ""
    except (OSError, ForeignFileError):
        return ""
