"""Where a stream's samples come from: shards with names, each of which can be read from a position.

`convert.as_source` turns what a program has into a `Source`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams.seeds import SeededRead

# Shards are checked for this long before the first step. One that was not checked then is checked
# when it is read.
CHECK_S: Final = 1.0


def size_of(path: str) -> int:
    """Return the size of a file. Raises `OSError` if it is missing."""
    if "://" not in path:
        return os.stat(path).st_size
    system, inner = _remote(path)
    size = system.size(inner)
    if size is None:
        raise SpecError(
            f"{path}: its server does not name a size, so it cannot be read in part; expected a "
            "store that can, or a local copy"
        )
    return int(size)


def open_file(path: str) -> IO[bytes]:
    """Open a file that can seek."""
    if "://" not in path:
        return open(path, "rb")
    system, inner = _remote(path)
    file: IO[bytes] = system.open(inner, "rb")
    return file


def open_shard(path: str, size: int) -> IO[bytes]:
    """Open a file that had `size` bytes when the launch began. Raises `SpecError` if it changed."""
    restore = "restore it, and the run continues from its last checkpoint"
    try:
        file = open_file(path)
    except FileNotFoundError as error:
        raise SpecError(
            f"the shard {path} was deleted since the launch began; {restore}"
        ) from error
    found = file.seek(0, os.SEEK_END)
    if found != size:
        file.close()
        raise SpecError(
            f"the shard {path} has {found} bytes, and had {size} when the launch began; {restore}"
        )
    file.seek(0)
    return file


def _remote(path: str) -> tuple[Any, str]:
    # Not at the top, because local shards do not need it.
    from fsspec.core import url_to_fs

    # A worker that was forked gets its own client.
    system, inner = url_to_fs(path)
    return system, inner


# More would make the state of a rank larger than 64 kB.
SHARDS_MAX: Final = 250_000
WHAT_WORKS: Final = (
    "expected an object with shards() and open(shard, position), see Source; or "
    "TextLines(paths) for a file of lines per shard; or a datasets.IterableDataset"
)


class Source(ABC):
    """The samples of numbered shards. Any object with these two methods works as one.

    Loader workers get a copy, so it must be picklable where workers are spawned.
    """

    @abstractmethod
    def shards(self) -> Sequence[str]:
        """Return the name of each shard, the same on all ranks and after each restart.

        A checkpoint records a digest of the names, and of the sizes of those that are files. Put
        what else must not change into a name.
        """

    @abstractmethod
    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over the rest of a shard, as pairs of a sample and the position after it.

        `position` is None at the shard's start, or a position that an earlier iterator returned. It
        is plain data, such as a number of bytes or of samples, or a dict of such. If it is costly
        to compute, return a function that returns it. It is called before the next sample is read,
        or not at all. The order must be the same at each call, so draw it from
        `random.Random(shard)` and not from the global generators.
        """


class TextLines(Source):
    """Files of lines, such as JSON lines. A sample is `parse(line)`, a position is in bytes."""

    def __init__(
        self, paths: Sequence[str | Path], parse: Callable[[bytes], Any] = bytes.rstrip
    ) -> None:
        """`parse` gets each line as bytes, with its line break."""
        self._paths, self._parse = [os.fspath(path) for path in paths], parse

    def shards(self) -> Sequence[str]:
        """Return the paths with the sizes of the files. Raises `OSError` if one is missing."""
        return [f"{path} ({os.stat(path).st_size} bytes)" for path in self._paths]

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over the lines from byte `position` on. Raises `SpecError` for a changed file."""
        path, _, size = shard.removesuffix(" bytes)").rpartition(" (")
        with open_shard(path, int(size)) as file:
            at = int(position or 0)
            file.seek(at)
            for line in file:
                at += len(line)
                yield self._parse(line), at


class Counted(Source):
    """Shards whose readers cannot seek. A position is a number of samples.

    A resume reads each open shard from its start up to its position, so keep shards small.
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], Iterable[Any]]) -> None:
        """`read` gets a shard's name and iterates over its samples, the same at each call.

        It may draw random numbers. If it restores the generators afterwards, as `fork_rng` of torch
        does, it must seed them before it draws.
        """
        self._names, self._read = sized(names), read

    def shards(self) -> Sequence[str]:
        """Return the names, with the sizes of those that are files."""
        return list(self._names)

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over the samples after the first `position`."""
        return _after(position, self._read(self._names[shard]))

    def open_seeded(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Do the same with random numbers in `read` that are the same at each position."""
        read = SeededRead(self._read, lambda: int(position or 0))
        return _after(position, read(self._names[shard]))


def _after(position: Any, samples: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    first = int(position or 0)
    rest = islice(samples, first, None)
    return ((sample, number) for number, sample in enumerate(rest, first + 1))


def sized(names: Sequence[str]) -> dict[str, str]:
    """Return the names by names of shards, which have the size where a name is that of a file.

    Raises `SpecError` for a name that is there twice.
    """
    found = {}
    for name in names:
        is_file = isinstance(name, str) and os.path.isfile(name)
        shard = f"{name} ({os.path.getsize(name)} bytes)" if is_file else name
        if shard in found:
            raise SpecError(f"two shards have the name {shard!r}; expected each name once")
        found[shard] = name
    return found


def names_of(source: Source) -> list[str]:
    """Return the names of a source's shards. Raises `SpecError` if they cannot be used."""
    names = list(source.shards())
    if not names:
        raise SpecError("the source has no shards; expected at least one, such as a file")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise SpecError(f"a shard's name is {wrong[0]!r}; expected text")
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise SpecError(f"two shards have the name {double!r}; expected each name once")
    if len(names) > SHARDS_MAX:
        raise SpecError(f"{len(names)} shards: expected at most {SHARDS_MAX}; join some of them")
    return names
