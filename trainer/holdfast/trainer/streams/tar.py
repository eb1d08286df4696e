"""Tar shards: the samples of a tar are its files, grouped by name as WebDataset groups them.

A position is the byte in the tar where the first file of the next sample begins, so a resume seeks.
Python's `tarfile` takes a damaged header for the end of the archive. So the end is checked: a tar
ends with blocks of zeros.
"""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams.source import CHECK_S, Source, open_file, open_shard, size_of

BLOCK: Final = tarfile.BLOCKSIZE
# Bytes after the end of the archive that are checked. Writers fill up to 10 kB with zeros.
REST_BYTES: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_NAME: Final = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
# Files about the whole tar, which belong to no sample.
_OF_ALL: Final = re.compile(r"__[^/]*__($|/)")
# What a tar that cannot be read raises, beside errors of the file system.
_UNREADABLE: Final = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)


class TarMember(NamedTuple):
    """A regular file of a tar: the byte where its header begins, its name, and its content.

    Without a name, it is the end of the tar.
    """

    at: int
    name: str | None
    content: bytes


class TarShards(Source):
    """Tar files, in which files of one name before the first dot are one sample.

    A sample is a dict with `__key__`, the common name, `__url__`, the path of the tar, and the
    bytes of each file by the rest of its name in lower case, such as `jpg`. Decode it in the
    `transform` of the stream. A tar that gzip compressed is read from its start up to a position.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """`paths` are local, or URLs that fsspec can read in part, such as `s3://`."""
        self._paths = [os.fspath(path) for path in paths]

    def shards(self) -> Sequence[str]:
        """Return the paths with the sizes of the files.

        Raises `OSError` if one is missing, and `SpecError` if one is not a tar or was cut off.
        """
        until = time.monotonic() + CHECK_S
        names = []
        for path in self._paths:
            size = size_of(path)
            if time.monotonic() < until:
                _check_ends(path, size)
            names.append(f"{path} ({size} bytes)")
        return names

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over the samples whose first file begins at byte `position` or later."""
        path, _, size = shard.removesuffix(" bytes)").rpartition(" (")
        with open_shard(path, int(size)) as file:
            yield from self._samples(path, members_of(path, file, int(position or 0)))

    def _samples(self, path: str, members: Iterator[TarMember]) -> Iterator[tuple[Any, Any]]:
        """Iterate over samples, and where the next one begins."""
        yield from grouped(path, members, {"__url__": path})


def members_of(path: str, file: IO[bytes], position: int) -> Iterator[TarMember]:
    """Iterate over the regular files of a tar from byte `position` on.

    The last one is the end of the tar. Raises `SpecError` if the tar is damaged or was cut off.
    """
    at = position
    try:
        file.seek(0)
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        plain: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        plain.seek(position)
        tar: Any = tarfile.TarFile(fileobj=plain)
        while (member := tar.next()) is not None:
            at = member.offset
            if member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                yield TarMember(at, member.name, content.read())
            # A long tar would otherwise keep all headers in memory.
            tar.members.clear()
        at = tar.offset
        plain.seek(at)
        end, rest = plain.read(BLOCK), plain.read(REST_BYTES)
    except _UNREADABLE as error:
        raise SpecError(f"the shard {path} cannot be read at byte {at}: {error}") from error
    if len(end) < BLOCK:
        raise SpecError(
            f"the shard {path} ends at byte {at + len(end)} without the blocks of zeros that end a "
            "tar, so it was cut off; copy or write it again"
        )
    if any(end) or any(rest):
        raise SpecError(
            f"the shard {path} is damaged at byte {at}, or a second tar was appended there; write "
            "it again"
        )
    yield TarMember(at, None, b"")


def grouped(
    path: str, members: Iterator[TarMember], first: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Group files of one key that follow each other, and yield where the next sample begins.

    `first` is in every sample. Raises `SpecError` for two files of one name.
    """
    sample: dict[str, Any] | None = None
    for at, name, content in members:
        parts = None if name is None or _OF_ALL.match(name) else _NAME.fullmatch(name)
        if name is not None and parts is None:
            continue
        if sample is not None and (parts is None or sample["__key__"] != parts[1]):
            yield sample, at
            sample = None
        if parts is None:
            return
        key, suffix = parts[1], parts[2].lower()
        sample = {"__key__": key, **first} if sample is None else sample
        if suffix in sample:
            raise SpecError(
                f"the shard {path} has two files {name} at byte {at}; expected each name once"
            )
        sample[suffix] = content


def _check_ends(path: str, size: int) -> None:
    """Raise `SpecError` if the first or the last block show that a file is not a whole tar."""
    with open_file(path) as file:
        first = file.read(BLOCK)
        if first[:2] == _GZIP:
            return
        if not any(first) and len(first) == BLOCK:
            # Without files.
            return
        try:
            tarfile.TarInfo.frombuf(first, tarfile.ENCODING, "surrogateescape")
        except tarfile.TarError as error:
            raise SpecError(
                f"the shard {path} is not a tar ({error}); expected one, which gzip may have "
                "compressed"
            ) from error
        file.seek(max(0, size - BLOCK))
        if size % BLOCK or any(file.read(BLOCK)):
            raise SpecError(
                f"the shard {path} of {size} bytes does not end with the blocks of zeros that end "
                "a tar, so it was cut off; copy or write it again"
            )
