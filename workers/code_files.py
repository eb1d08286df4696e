"""Which files of a folder are a run's code, and may be opened by this process.

Whoever closes a file gives up every POSIX lock that its process holds on it, through whichever
descriptor it was taken. The index may lie in the folder that the code is in: were its files read
by a process that has it open, SQLite would stand there without locks, and other processes would
write over what it is writing. (SQLite, "How To Corrupt An SQLite Database File", section 2.2.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.paths import default_root, holdfast_home

CACHES: Final = frozenset({"__pycache__", "node_modules"})
_DESCRIPTORS: Final = "/proc/self/fd"


def files_under(folder: Path) -> Iterator[str]:
    """Names of the files under `folder`, in order, relative to it.

    Without hidden folders, caches, and the folders where Holdfast keeps its index and its runs.
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
    """True when this process has the file open, so that nobody else in it may close it."""
    facts = os.stat(path)
    wanted = facts.st_dev, facts.st_ino
    for descriptor in os.listdir(_DESCRIPTORS):
        try:
            held = os.fstat(int(descriptor))
        except OSError:
            continue
        if (held.st_dev, held.st_ino) == wanted:
            return True
    return False
