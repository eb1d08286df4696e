"""Find the files of a folder that are a run's code and that this process may open.

A process that closes a file releases every POSIX lock that it holds on the file, through whichever
descriptor it took the lock. The index may be in the code's folder. If a process that has the index
open read its files, SQLite would lose its locks and other processes could write over its changes.
(SQLite, "How To Corrupt An SQLite Database File", section 2.2.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import default_root, holdfast_home

CACHES: Final = frozenset({"__pycache__", "node_modules"})
_DESCRIPTORS: Final = "/proc/self/fd"


def files_under(folder: Path) -> Iterator[str]:
    """Return the names of the files under `folder`, in order, relative to it.

    Hidden folders, caches and the folders of Holdfast's index and runs are left out.
    """
    ours = {os.path.realpath(place) for place in (holdfast_home(), default_root())}
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in CACHES
            and os.path.realpath(os.path.join(place, name)) not in ours
        )
        for name in sorted(files):
            yield os.path.relpath(os.path.join(place, name), folder)


def is_open_here(path: Path) -> bool:
    """Return True if this process has the file open, so that other code in it must not close it."""
    facts = os.stat(path)
    # By device and inode, because a file may have several names. See decision 20.
    wanted = facts.st_dev, facts.st_ino
    for descriptor in os.listdir(_DESCRIPTORS):
        try:
            held = os.fstat(int(descriptor))
        except OSError:
            continue
        if (held.st_dev, held.st_ino) == wanted:
            return True
    return False
