"""Index updates in a thread, so that a slow database does not delay supervision."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.paths import RunPaths
from holdfast.lineage.index import Index

FINISH_S_MAX: Final = 120.0


class Ingestion:
    """Ingests one run in a separate thread, which ends when there is nothing to do.

    That thread calls `failed` with the error of a failed ingest, and `succeeded` after a
    successful one.
    """

    def __init__(
        self,
        index: Index,
        paths: RunPaths,
        *,
        failed: Callable[[Exception], None],
        succeeded: Callable[[], None],
    ) -> None:
        self._index, self._paths = index, paths
        self._failed, self._succeeded = failed, succeeded
        self._lock = threading.Lock()
        self._is_wanted = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Request an ingest of the run's current state. Returns at once."""
        with self._lock:
            self._is_wanted = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-ingest", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        """Ingest the run's last state, and wait for it for at most `FINISH_S_MAX` seconds."""
        self.ask()
        thread = self._thread
        if thread is not None:
            thread.join(FINISH_S_MAX)

    def _work(self) -> None:
        while self._take():
            try:
                self._index.update(self._paths)
            # Disk is the truth, so a failed update can be repeated later.
            except (HoldfastError, OSError) as error:
                self._failed(error)
            else:
                self._succeeded()

    def _take(self) -> bool:
        """Return whether an ingest is wanted. If not, mark this thread as ended."""
        with self._lock:
            if not self._is_wanted:
                self._thread = None
                return False
            self._is_wanted = False
            return True
