"""The lock of a supervisor, and of other processes of which one may act at a time.

The kernel releases it when the process dies. Only the owner of the lock's folder can hold it.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.contracts.disk.file_locks import open_lock, wait_for_lock


class FlowLock:
    """An exclusive `flock` on a file such as a run's `flow.lock`, taken without waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_held = False
        self._handle: int | None = None

    def __enter__(self) -> FlowLock:
        # Closed on exec, because a job started from here would otherwise keep the lock.
        self._handle = open_lock(self.path, owner_only=True)
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
        """Try to take the lock; return False if another process holds it."""
        assert self._handle is not None, "use the lock in a with statement"
        self.is_held = wait_for_lock(self._handle)
        return self.is_held
