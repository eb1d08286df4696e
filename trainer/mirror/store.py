"""What a mirror must be able to do, and which kind of store answers to a URL.

Keys are relative to the place that the store was opened at, with forward slashes. An object is
there whole or not at all: that is each store's own duty, and what makes a manifest a commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from holdfast.contracts.digests import Content, new_checksum
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError
from holdfast.contracts.manifest import FileEntry

# A part of a file: what is read, checked and sent at once. S3 takes 10,000 of them a file.
PART_BYTES: Final = 16 * 1024 * 1024
PARTS_MAX: Final = 10_000
PARTS_AT_ONCE: Final = 4
CALL_TIMEOUT_S: Final = 120.0


class Store(Protocol):
    """One place in a mirror. Every call is bounded in time and raises `MirrorError`."""

    def put_file(self, key: str, path: Path, entry: FileEntry) -> None:
        """Copy a file, in parts, believed only when its bytes are those of `entry`.

        Raises `DamagedCheckpointError` when the file at `path` differs: nothing is then there.
        """
        ...

    def put_new(self, key: str, content: bytes) -> bool:
        """Create an object exclusively; False when there is one of that name already."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Create or replace a small object."""
        ...

    def read(self, key: str) -> bytes | None:
        """A small object's bytes, or None when there is none."""
        ...

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """The bytes of an object of that size, in order."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object under `prefix/`, by key."""
        ...

    def folders(self, prefix: str) -> list[str]:
        """The names directly under `prefix/` that have objects under them."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; harmless for those that are not there."""
        ...

    def abort_uploads(self, prefix: str) -> int:
        """Forget uploads under `prefix` that were begun and not completed; returns how many."""
        ...


def open_store(url: str) -> Store:
    """The store at `url`, by its scheme: a directory, S3, or whatever else fsspec knows.

    Libraries are imported here, when a mirror is used. Raises `MirrorError` when one is missing.
    """
    scheme = urlsplit(url).scheme
    if scheme == "file":
        from holdfast.trainer.mirror.directory import DirectoryStore

        return DirectoryStore(url)
    if scheme in {"s3", "s3a"}:
        from holdfast.trainer.mirror.s3 import S3Store

        return S3Store(url)
    from holdfast.trainer.mirror.any_filesystem import FsspecStore

    return FsspecStore(url)


def part_bytes_for(size_bytes: int) -> int:
    """How large the parts of a file are: `PART_BYTES`, doubled until `PARTS_MAX` hold it."""
    part = PART_BYTES
    while size_bytes > part * PARTS_MAX:
        part *= 2
    return part


class EntryCheck:
    """Compares bytes with what a manifest says of a file, while they go by in order."""

    def __init__(self, entry: FileEntry) -> None:
        self._entry = entry
        self._spans = iter(entry.spans())
        self._running = new_checksum()
        self._seen = 0
        self._next()

    def update(self, piece: Content) -> None:
        """Take the next bytes. Raises `DamagedCheckpointError` at the first block that differs."""
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
        """Say that no more bytes come. Raises `DamagedCheckpointError` when some are missing."""
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
            f"{line}; this copy is not the file that was committed and is not used",
            damaged=[line],
        )


def checked_parts(path: Path, entry: FileEntry) -> Iterator[bytes]:
    """The file at `path` in parts, at least one. The last comes only when all were `entry`'s.

    Raises `DamagedCheckpointError` when they are not, `OSError` when it cannot be read.
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
def telling(
    url: str, doing: str, *errors: type[BaseException], is_passing: bool = True
) -> Iterator[None]:
    """Turn a library's errors into a `MirrorError` that says where and what was tried."""
    try:
        yield
    except errors as error:
        raise MirrorError(
            f"{url}: {doing}: {type(error).__name__}: {error}", is_passing=is_passing
        ) from error
