"""Index updates in a thread, so that a slow database does not delay supervision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.states import RunState
from holdfast.lineage.index import Index

FINISH_S_MAX: Final = 120.0
QUIET_S: Final = 30.0
# An ingest of a run with tens of thousands of checkpoints takes long, so it is done less often:
# after so many times the processor time that it took beyond `FREE_S`.
REST: Final = 50.0
FREE_S: Final = 0.25


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
        # What the last request was about, and when it was made.
        self._asked: tuple[int, RunState] | None = None
        self._asked_at = 0.0
        self._rests_until = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, history: RunHistory | None = None) -> None:
        """Request an ingest of the run's current state. Returns at once.

        A `history` without anything new is ingested every `QUIET_S` seconds only, for logged
        metrics. An ingest looks at every file of the run. After a long one, requests are ignored
        for a while. The supervisor makes them again in each turn.
        """
        now = time.monotonic()
        state = None if history is None else (history.tally.lines, history.state)
        with self._lock:
            if state is not None and now < self._rests_until:
                return
            if state is not None and state == self._asked and now - self._asked_at < QUIET_S:
                return
            self._asked, self._asked_at = state, now
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
            spent_s = -time.thread_time()
            try:
                self._index.update(self._paths)
            # Disk is the truth, so a failed update can be repeated later.
            except (HoldfastError, OSError) as error:
                self._asked = None
                self._failed(error)
            else:
                self._succeeded()
            spent_s += time.thread_time()
            self._rests_until = time.monotonic() + REST * max(0.0, spent_s - FREE_S)

    def _take(self) -> bool:
        """Return whether an ingest is wanted. If not, mark this thread as ended."""
        with self._lock:
            if not self._is_wanted:
                self._thread = None
                return False
            self._is_wanted = False
            return True
