"""A log that a process writes to this node's memory, copied to storage by a thread.

The agent reads torchrun's log many times a second to find failed ranks. On shared storage each read
would be a request to its server, and a server that hangs would stop the agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

COPY_S: Final = 1.0
CHUNK_BYTES: Final = 1 << 20
LAST_COPY_S: Final = 2.0


class LocalLog:
    """Give `handle` to a process as its output, and call `close` when the process has ended."""

    def __init__(self, path: Path) -> None:
        """`path` receives a copy, appended about once a second."""
        self._file = os.fdopen(os.memfd_create(path.name, os.MFD_CLOEXEC), "r+b", buffering=0)
        self._path, self._copied = path, 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._copy_on, name="log-copy", daemon=True)
        self._thread.start()

    @property
    def handle(self) -> int:
        return self._file.fileno()

    def tail(self, size: int) -> str:
        """Return the last `size` bytes as text. Invalid bytes are replaced."""
        start = max(0, os.fstat(self.handle).st_size - size)
        return os.pread(self.handle, size, start).decode(errors="replace")

    def close(self) -> None:
        """Copy what is left, and wait for that at most `LAST_COPY_S` seconds."""
        self._has_ended.set()
        self._thread.join(LAST_COPY_S)

    def _copy_on(self) -> None:
        is_last = False
        with contextlib.suppress(OSError):
            self._path.touch()
        while not is_last:
            is_last = self._has_ended.wait(COPY_S)
            # Storage that is full or away must not stop later copies.
            with contextlib.suppress(OSError):
                self._copy()

    def _copy(self) -> None:
        while content := os.pread(self.handle, CHUNK_BYTES, self._copied):
            with open(self._path, "ab") as log:
                log.write(content)
            self._copied += len(content)
