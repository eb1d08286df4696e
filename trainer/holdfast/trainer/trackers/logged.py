"""How far a tracker has the metrics of the program, for the next launch.

After a crash, a launch repeats the steps since its checkpoint. Most trackers append, so their
curves would have these steps twice.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.reading import read_bounded

# A fixed width, so that a number always replaces all of the last one.
DIGITS: Final = 20
NONE: Final = -1


class LoggedStep:
    """The newest step whose metrics a tracker of a run got, in a file of the run."""

    def __init__(self, run: RunPaths, tracker: str) -> None:
        """Read what an earlier launch recorded. `newest` is `NONE` without a usable file."""
        self._path = run.deliveries / f"tracker-{tracker}.step"
        self._handle: int | None = None
        self.newest = NONE
        with contextlib.suppress(OSError, ValueError):
            self.newest = int(read_bounded(self._path, DIGITS + 1))

    def record(self, step: int) -> None:
        """Record that the tracker has the metrics of `step`. Raises `OSError`.

        The line outlives this process. It may be lost with the node: the steps then come twice.
        """
        if self._handle is None:
            make_directory(self._path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handle = os.open(self._path, flags, 0o644)
        os.pwrite(self._handle, f"{step:0{DIGITS}d}\n".encode(), 0)

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
