"""A cache of journals, so that this process reads only the lines added since its last read.

A server and a supervisor read the same runs again and again, and one command reads a run's journals
several times. Journals are append-only, so cached lines stay valid while the file is the same one
and does not shrink. If any check fails, the file is read from the start.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.contracts.filesystems import fetch_attributes
from holdfast.contracts.journal import Event, open_journal, read_lines

# Bytes of journal files. Their events take about ten times as much memory.
KEPT_BYTES_MAX: Final = 8 * 1024 * 1024
# The last bytes that were read, compared with the file. Each line has its own time and number.
SAMPLE_BYTES: Final = 1024


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A journal as it was when it was last read, up to byte `offset`."""

    file: tuple[int, int]
    size: int
    changed_ns: int
    offset: int
    sample: bytes
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
        if kept is not None and _is_unchanged(path, kept):
            self._put(path, kept)
            return kept.events
        try:
            with open_journal(path) as stream:
                found = None if stream is None else _read(stream, path, kept)
        except BaseException:
            self.forget(path)
            raise
        self._put(path, found)
        return found.events if found else ()

    def forget(self, path: Path) -> None:
        """Drop a journal, so that the next read starts at its beginning."""
        self._put(path, None)

    def _put(self, path: Path, found: _Kept | None) -> None:
        with self._lock:
            former = self._kept.pop(path, None)
            self._bytes -= former.offset if former else 0
            if found is None:
                return
            self._kept[path] = found
            self._bytes += found.offset
            while self._bytes > self._bytes_max:
                oldest = next(iter(self._kept))
                self._bytes -= self._kept.pop(oldest).offset


def _is_unchanged(path: Path, kept: _Kept) -> bool:
    """Return True if the file has not changed since it was read. It need not be opened then."""
    fetch_attributes(path)
    try:
        facts = path.lstat()
    except OSError:
        return False
    is_same = (facts.st_dev, facts.st_ino) == kept.file
    return is_same and (facts.st_size, facts.st_mtime_ns) == (kept.size, kept.changed_ns)


def _read(stream: BinaryIO, path: Path, kept: _Kept | None) -> _Kept:
    facts = os.fstat(stream.fileno())
    file, now = (facts.st_dev, facts.st_ino), (facts.st_size, facts.st_mtime_ns)
    if kept and kept.file == file and (kept.size, kept.changed_ns) == now:
        return kept
    is_longer = kept is not None and kept.file == file and facts.st_size > kept.size
    if kept is None or not is_longer or _sample(stream, kept.offset) != kept.sample:
        events, offset = read_lines(stream, path, 0)
    else:
        added, offset = read_lines(stream, path, kept.offset)
        events = [*kept.events, *added]
    return _Kept(
        file=file,
        size=facts.st_size,
        changed_ns=facts.st_mtime_ns,
        offset=offset,
        sample=_sample(stream, offset),
        events=tuple(events),
    )


def _sample(stream: BinaryIO, offset: int) -> bytes:
    """Return the last bytes before `offset`."""
    begin = max(0, offset - SAMPLE_BYTES)
    return os.pread(stream.fileno(), offset - begin, begin)


KEPT: Final = JournalCache()
