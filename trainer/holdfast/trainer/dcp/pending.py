"""The saves of one rank that are staged and not yet committed, and the futures that wait for them.

A thread reads the results of saves from shared memory while there are any. It uses no process group
and no tree, so it cannot get in the way of the program's own collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata

from holdfast.contracts.errors import SaveError
from holdfast.trainer.dcp.record import SaveRecord
from holdfast.trainer.format.metadata import open_checkpoint
from holdfast.trainer.ranks.collective import attempt
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.staging.in_flight import SaveResult

POLL_S: Final = 0.005


class CommitFuture(Future[Any]):
    """The future of one save. Its result is the metadata, which is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._metadata: Metadata | None = None

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait until the save is committed and return its metadata, as stock DCP's future does.

        Raises `SaveError` if it was not committed.
        """
        super().result(timeout)
        if self._metadata is None:
            self._metadata = open_checkpoint(self._directory).metadata
        return self._metadata


@dataclass(frozen=True)
class _Save:
    directory: Path
    token: str
    future: CommitFuture


class Pending:
    """The saves in flight of one engine. `record` is None except on the group's first rank."""

    def __init__(self, engine: CheckpointEngine, record: SaveRecord | None) -> None:
        self._engine, self._record = engine, record
        self._lock = threading.RLock()
        self._saves: dict[str, _Save] = {}
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def engine(self) -> Iterator[CheckpointEngine]:
        """Return the engine. No other thread uses it in the block."""
        with self._lock:
            yield self._engine

    def tokens_in(self, directory: Path) -> list[str]:
        with self._lock:
            return [one.token for one in self._saves.values() if one.directory == directory]

    def wait_for_slot(self, timeout_s: float) -> bool:
        """Wait until the next save will find a free slot. Return False after `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        while True:
            # The lock is taken for a moment only, so that the thread can take results meanwhile.
            with self.engine() as engine:
                is_free = engine.wait_for_slot(0.0)
            if is_free or time.monotonic() >= give_up:
                return is_free
            time.sleep(POLL_S)

    def add(self, stage: Callable[[], str], directory: Path, token: str) -> CommitFuture:
        """Call `stage`, which stages a save and returns its name. Return the save's future.

        The future fails immediately if `stage` raises.
        """
        future = CommitFuture(directory)
        future.set_running_or_notify_cancel()
        # Under the lock, so that the thread cannot take the result before the save is in `_saves`.
        with self._lock:
            name, error = attempt(stage)
            if name is None:
                future.set_exception(error)
                return future
            self._saves[name] = _Save(directory, token, future)
            if self._thread is None:
                name = "holdfast-dcp"
                self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
                self._thread.start()
        self._wake.set()
        return future

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is in flight, for `timeout_s` seconds at most."""
        give_up = time.monotonic() + timeout_s
        while self._saves and time.monotonic() < give_up:
            self._take()
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the thread. Futures that are still in flight fail."""
        self._take()
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            left, self._saves = list(self._saves.values()), {}
        for one in left:
            text = (
                f"{one.directory}: the process group ended before the save was committed; wait for "
                "the future before you destroy the group"
            )
            one.future.set_exception(SaveError(text))

    def _watch(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            self._take()
            with self._lock:
                if not self._saves and not self._is_closed:
                    self._wake.clear()
            time.sleep(POLL_S)

    def _take(self) -> None:
        """Complete the futures of the saves that the flusher has decided."""
        with self._lock:
            decided = [
                (result, self._saves.pop(result.checkpoint))
                for result in self._engine.poll()
                if result.checkpoint in self._saves
            ]
        # Outside the lock: a callback of a future may start the next save.
        for result, save in decided:
            self._finish(result, save)

    def _finish(self, result: SaveResult, save: _Save) -> None:
        if result.committed:
            if self._record is not None:
                self._record.committed(save.directory, result.step)
            save.future.set_result(None)
            return
        problem = result.error or "the flusher gave no reason"
        if self._record is not None:
            self._record.failed(save.directory, result.step, problem)
        save.future.set_exception(SaveError(f"{save.directory}: not committed: {problem}"))
