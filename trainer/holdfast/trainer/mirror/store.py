"""The interface of a mirror's store, and what all stores share.

Keys are relative to the URL that the store was opened with, with forward slashes. Each store makes
sure that an object is either complete or absent. A manifest can therefore act as the commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from holdfast.contracts.disk.digests import DIGEST_HEX, Content, new_checksum
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError

# The size of a file part: one read, one check, one request. S3 allows 10,000 parts per file.
PART_BYTES: Final = 16 * 1024 * 1024
PARTS_MAX: Final = 10_000
PARTS_AT_ONCE: Final = 4
CALL_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class FormerFile:
    """An object that the mirror has, and the starts of the parts in which a new file equals it."""

    key: str
    parts: frozenset[int]


class MirrorStore(Protocol):
    """One location in a mirror. Every call is bounded in time and raises `MirrorError`."""

    def put_file(
        self, key: str, path: Path, entry: FileEntry, former: FormerFile | None = None
    ) -> int:
        """Copy a file in parts and accept it only if its bytes match `entry`.

        The store may copy parts of `former` itself if it can show that they have the same bytes.
        Returns the number of these bytes, which were not sent. Raises `DamagedCheckpointError` if
        the file at `path` differs. Nothing is then stored.
        """

    def put_new(self, key: str, content: bytes) -> bool:
        """Create an object exclusively. Return False if the name already exists."""

    def put(self, key: str, content: bytes) -> None:
        """Create or replace a small object."""

    def read(self, key: str) -> bytes | None:
        """Return a small object's bytes, or None if there is none."""

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of an object of that size, in order."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each object under `prefix/`, by key."""

    def folders(self, prefix: str) -> list[str]:
        """Return the names directly under `prefix/` that have objects under them."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. Absent ones are ignored."""

    def abort_uploads(self, prefix: str) -> int:
        """Abort unfinished uploads under `prefix` and return their number."""


def part_bytes_for(size_bytes: int) -> int:
    """Return the part size of a file: `PART_BYTES`, doubled until `PARTS_MAX` parts suffice."""
    part = PART_BYTES
    while size_bytes > part * PARTS_MAX:
        part *= 2
    return part


def equal_parts(entry: FileEntry, former: FileEntry) -> frozenset[int]:
    """Return the starts of the full parts of a file that have the digests of `former`'s blocks."""
    part, block = part_bytes_for(entry.bytes), entry.block_bytes
    if not block or block != former.block_bytes:
        return frozenset()

    def digests(one: FileEntry, start: int) -> str:
        # A part may begin or end within a block.
        first, last = start // block, -(-(start + part) // block)
        return one.blocks[first * DIGEST_HEX : last * DIGEST_HEX]

    ends_max = min(entry.bytes, former.bytes)
    starts = range(0, ends_max - part + 1, part)
    return frozenset(at for at in starts if digests(entry, at) == digests(former, at))


class EntryCheck:
    """Compares a stream of bytes with what a manifest records of a file."""

    def __init__(self, entry: FileEntry) -> None:
        self._entry = entry
        self._spans = iter(entry.spans())
        self._running = new_checksum()
        self._seen = 0
        self._next()

    def update(self, piece: Content) -> None:
        """Check the next bytes. Raises `DamagedCheckpointError` at the first wrong block."""
        with memoryview(piece).cast("B") as view:
            at = 0
            while at < len(view):
                if not self._left:
                    raise self._damaged(f"more than {self._entry.bytes} bytes")
                count = min(self._left, len(view) - at)
                self._running.update(view[at : at + count])
                at += count
                self._left -= count
                self._seen += count
                if not self._left:
                    self._end_span()

    def finish(self) -> None:
        """Check that the file is complete. Raises `DamagedCheckpointError` if bytes are missing."""
        if self._seen != self._entry.bytes:
            raise self._damaged(f"{self._seen} bytes, expected {self._entry.bytes}")
        if not self._entry.bytes:
            self._end_span()

    def _next(self) -> None:
        self._start, self._left, self._expected = next(self._spans, (0, 0, ""))

    def _end_span(self) -> None:
        found = self._running.hexdigest()
        if found != self._expected:
            raise self._damaged(self._entry.describe(self._start, found))
        self._running.reset()
        self._next()

    def _damaged(self, problem: str) -> DamagedCheckpointError:
        line = f"{self._entry.path}: {problem}"
        return DamagedCheckpointError(
            f"{line}; this copy differs from the committed file and is not used", damaged=[line]
        )


def checked_parts(path: Path, entry: FileEntry) -> Iterator[bytes]:
    """Yield the file at `path` in parts, at least one. The last part follows a check of all bytes.

    Raises `DamagedCheckpointError` if they differ from `entry`, `OSError` if it cannot be read.
    """
    check, part_bytes = EntryCheck(entry), part_bytes_for(entry.bytes)
    with open(path, "rb") as stream:
        part = stream.read(part_bytes)
        while True:
            check.update(part)
            following = stream.read(part_bytes)
            if not following:
                check.finish()
                yield part
                return
            yield part
            part = following


@contextmanager
def wrap_errors(
    url: str, doing: str, *errors: type[BaseException], is_passing: bool = True
) -> Iterator[None]:
    """Turn a library's errors into a `MirrorError` with the URL and the operation."""
    try:
        yield
    except errors as error:
        raise MirrorError(
            f"{url}: {doing}: {type(error).__name__}: {error}", is_passing=is_passing
        ) from error
