"""Bringing the index up to date beside the supervision: a slow database delays no decision."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.paths import RunPaths
from holdfast.lineage.index import Index

FINISH_S_MAX: Final = 120.0


class Ingestion:
    """Ingests one run in a thread of its own, which lives while there is something to do.

    `failed` is called in that thread with the error of an ingest that failed, `succeeded` after
    one that did not.
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
        """Have the run ingested as it is from now on; returns at once."""
        with self._lock:
            self._is_wanted = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-ingest", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        """Ingest the run's last state and wait for it, `FINISH_S_MAX` seconds at most."""
        self.ask()
        thread = self._thread
        if thread is not None:
            thread.join(FINISH_S_MAX)

    def _work(self) -> None:
        while self._take():
            try:
                self._index.update(self._paths)
            # The index follows what is on disk; whatever it cannot do now it can do later.
            except (HoldfastError, OSError) as error:
                self._failed(error)
            else:
                self._succeeded()

    def _take(self) -> bool:
        """True when an ingest is wanted; else this thread has ended its work."""
        with self._lock:
            if not self._is_wanted:
                self._thread = None
                return False
            self._is_wanted = False
            return True
