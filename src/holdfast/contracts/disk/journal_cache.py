"""A cache of journals, so that this process reads only the lines added since its last read.

A server and a supervisor read the same runs again and again, and one command reads a run's journals
several times. Journals are append-only, so cached lines stay valid while the file is the same one
and does not shrink. If any check fails, the file is read from the start.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import Event
from holdfast.contracts.disk.journal_follow import Place, follow

# Bytes of journal files. Their events take about ten times as much memory.
KEPT_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class _Kept:
    """The events of a journal up to a place."""

    place: Place
    events: tuple[Event, ...]


class JournalCache:
    """The events of journals. Drops the least recently read ones first. Thread-safe."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._kept: dict[Path, _Kept] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, path: Path) -> tuple[Event, ...]:
        """Return all events of a journal. Raises like `read_journal`."""
        with self._lock:
            kept = self._kept.get(path)
        before: list[tuple[Event, ...]] = [kept.events] if kept else []
        added: list[Event] = []
        try:
            place = follow(
                path, kept.place if kept else None, begin=before.clear, take=added.append
            )
        except BaseException:
            self.forget(path)
            raise
        events = before[0] if before and not added else (*chain.from_iterable(before), *added)
        self._put(path, _Kept(place, events) if place else None)
        return events

    def forget(self, path: Path) -> None:
        """Drop a journal, so that the next read starts at its beginning."""
        self._put(path, None)

    def _put(self, path: Path, found: _Kept | None) -> None:
        with self._lock:
            former = self._kept.pop(path, None)
            self._bytes -= former.place.offset if former else 0
            if found is None:
                return
            self._kept[path] = found
            self._bytes += found.place.offset
            while self._bytes > self._bytes_max:
                oldest = next(iter(self._kept))
                self._bytes -= self._kept.pop(oldest).place.offset


KEPT: Final = JournalCache()
