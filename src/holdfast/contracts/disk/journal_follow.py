"""Reads of growing journals: a cache for this process, and the lines added since a read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.contracts.disk.filesystems import fetch_attributes
from holdfast.contracts.disk.journal import Event, each_line, open_journal

# A cache of journals, so that this process reads only the lines added since its last read.
#
# A server and a supervisor read the same runs again and again, and one command reads a run's
# journals several times. Journals are append-only, so cached lines stay valid while the file is
# the same one and does not shrink. If any check fails, the file is read from the start.

# Bytes of journal files. Their events take about ten times as much memory.
KEPT_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class _Kept:
    """The events of a journal up to a place."""

    place: JournalPlace
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


# Reads the lines that were added to a journal since its last read.
#
# Journals are append-only, so a reader can continue where it stopped while the file is the same
# one and does not shrink. If any check fails, the file is read from its start.

# The last bytes that were read are compared with the file.
SAMPLE_BYTES: Final = 1024


@dataclass(frozen=True, kw_only=True)
class JournalPlace:
    """Where a reader stopped in a journal, and the file as it was then."""

    file: tuple[int, int]
    size: int
    changed_ns: int
    offset: int
    # The hash of the last bytes before the offset. Each line has its own time and number.
    sample: int


def follow(
    path: Path,
    place: JournalPlace | None,
    *,
    begin: Callable[[], None],
    take: Callable[[Event], None],
) -> JournalPlace | None:
    """Call `take` with each line after `place`; return the new place, or None without a file.

    If the file must be read from its start, `begin` is called first. Only one line at a time is in
    memory. Raises like `read_journal`.
    """
    if place is not None and is_unchanged(path, place):
        return place
    with open_journal(path) as stream:
        if stream is None:
            begin()
            return None
        # Lines that are added from now on change the size again.
        facts = facts_of(stream)
        if place is not None and facts == (place.file, place.size, place.changed_ns):
            return place
        offset = start_of(stream, place)
        if not offset:
            begin()
        for events, end in each_line(stream, path, offset):
            for event in events:
                take(event)
            offset = end
        return place_at(stream, offset, facts)


Facts = tuple[tuple[int, int], int, int]


def facts_of(stream: BinaryIO) -> Facts:
    """Return what identifies an open file, its size and its time."""
    facts = os.fstat(stream.fileno())
    return (facts.st_dev, facts.st_ino), facts.st_size, facts.st_mtime_ns


def start_of(stream: BinaryIO, place: JournalPlace | None) -> int:
    """Return the offset after the lines before `place`; 0 if the file is not the same one."""
    if place is None:
        return 0
    file, size, _ = facts_of(stream)
    # Equal size with another time means that the file was rewritten in place, so read it again.
    is_longer = file == place.file and size > place.size
    # Inode numbers are reused, so the last bytes before the offset must be the same too.
    return place.offset if is_longer and _sample(stream, place.offset) == place.sample else 0


def has_same_end(stream: BinaryIO, place: JournalPlace) -> bool:
    """Return whether the last bytes before `place` are those that were read."""
    return stream.seek(0, os.SEEK_END) >= place.offset and (
        _sample(stream, place.offset) == place.sample
    )


def place_at(stream: BinaryIO, offset: int, facts: Facts) -> JournalPlace:
    """Return the place at `offset` of a file whose facts were taken before it was read."""
    (file, size, changed_ns), sample = facts, _sample(stream, offset)
    return JournalPlace(file=file, size=size, changed_ns=changed_ns, offset=offset, sample=sample)


def is_unchanged(path: Path, place: JournalPlace) -> bool:
    """Return True if the file has not changed since it was read. It need not be opened then."""
    # A cached size would hide the lines that another host has just added, see decision 48.
    fetch_attributes(path)
    try:
        facts = path.lstat()
    except OSError:
        return False
    is_same = (facts.st_dev, facts.st_ino) == place.file
    return is_same and (facts.st_size, facts.st_mtime_ns) == (place.size, place.changed_ns)


def _sample(stream: BinaryIO, offset: int) -> int:
    """Return a hash of the last bytes before `offset`, for this process only."""
    begin = max(0, offset - SAMPLE_BYTES)
    return hash(os.pread(stream.fileno(), offset - begin, begin))
