"""Comparison of a checkpoint's files with its manifest, completely or in shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from holdfast.contracts.disk import digests, reading
from holdfast.contracts.disk.manifest import FileEntry, Manifest, files_folder
from holdfast.contracts.errors import ForeignFileError

READERS_MAX: Final = 4
UNREADABLE: Final = "cannot be read: "
# The problems of each damaged file, by path.
Problems = dict[str, list[str]]
T = TypeVar("T")
_EntrySpan = tuple[FileEntry, tuple[int, int, str]]


def find_damage(
    directory: Path,
    manifest: Manifest,
    *,
    contents: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Return a line for each file that differs from the manifest; empty if there is no damage.

    With `contents`, every byte is read and compared block by block, with `READERS_MAX` threads.
    Otherwise only sizes are compared. `progress` is called with the number of bytes of each block.
    """
    found = find_problems(directory, manifest, contents=contents, progress=progress)
    return describe_problems(manifest, [found])


def find_problems(
    directory: Path,
    manifest: Manifest,
    *,
    contents: bool = True,
    progress: Callable[[int], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> Problems:
    """Return the problems of one share of the checkpoint's bytes, by path; otherwise as above.

    `share` is (number, how many). Shares are equally large, to within one block. A file belongs to
    each share that has one of its blocks, and an empty file to one share.
    """
    every = [(entry, span) for entry in manifest.files for span in entry.spans()]
    # By bytes and not by files, so that ranks can divide one long file, see decision 58.
    own = share_of(every, [size for _, (_, size, _) in every], *share)
    try:
        # The folder is held open, so all files come from the same one even if its name is moved
        # meanwhile.
        with files_folder(directory, manifest) as folder:
            return _problems_in(folder, own, contents=contents, progress=progress)
    except ForeignFileError as error:
        return {entry.path: [error.problem] for entry, _ in own}
    except OSError as error:
        problem = f"{manifest.source}: {error.strerror}"
        return {entry.path: [problem] for entry, _ in own}


def _problems_in(
    directory: Path,
    own: list[_EntrySpan],
    *,
    contents: bool,
    progress: Callable[[int], None] | None,
) -> Problems:
    misfits = {entry.path: _misfit(directory, entry) for entry, _ in own}
    problems = {path: [problem] for path, problem in misfits.items() if problem}
    fitting = [(entry, *span) for entry, span in own if misfits[entry.path] is None]
    return problems | (_differing(directory, fitting, progress) if contents else {})


def describe_problems(manifest: Manifest, shares: Iterable[Problems]) -> list[str]:
    """Return a line for each damaged file, from the problems of all shares in their order."""
    merged: dict[str, list[str]] = {}
    for problems in shares:
        for path, found in problems.items():
            known = merged.setdefault(path, [])
            known.extend(problem for problem in found if problem not in known)
    more = {path: f", and {len(found) - 1} more blocks" for path, found in merged.items()}
    return [
        f"{e.path}: {merged[e.path][0]}" + (more[e.path] if merged[e.path][1:] else "")
        for e in manifest.files
        if e.path in merged
    ]


def word_for(damaged: Iterable[str]) -> str:
    """Return what the lines of `find_damage` say about a checkpoint: `damaged` or `unreadable`.

    Storage that fails says nothing about the bytes.
    """
    # A checkpoint counts as damaged only if its bytes were read and differ, see decision 91.
    lines = list(damaged)
    is_unreadable = bool(lines) and all(f": {UNREADABLE}" in line for line in lines)
    return "unreadable" if is_unreadable else "damaged"


def share_of(items: Sequence[T], sizes: Sequence[int], number: int, count: int) -> list[T]:
    """Return the items of share `number` of `count`: those that begin in its part of all bytes."""
    total = max(1, sum(sizes))
    starts = accumulate(sizes, initial=0)
    return [
        one
        for one, start in zip(items, starts, strict=False)
        if min(start * count // total, count - 1) == number
    ]


def _misfit(directory: Path, entry: FileEntry) -> str | None:
    """Return the problem with a file's existence, type or size, or None."""
    try:
        size = reading.read_again(lambda: _size_of(directory, entry))
    except FileNotFoundError:
        return "missing"
    except ForeignFileError as error:
        return error.problem
    except OSError as error:
        return f"{UNREADABLE}{error.strerror}"
    return None if size == entry.bytes else f"{size} bytes, expected {entry.bytes}"


def _open(directory: Path, entry: FileEntry) -> BinaryIO:
    return open(reading.open_regular(directory / entry.path, below=directory, follow=True), "rb")


def _size_of(directory: Path, entry: FileEntry) -> int:
    with _open(directory, entry) as stream:
        return os.fstat(stream.fileno()).st_size


def _digest_in(directory: Path, entry: FileEntry, start: int, size: int) -> str:
    with _open(directory, entry) as stream:
        return digests.range_digest(stream.fileno(), start, size)


def _differing(
    directory: Path,
    work: list[tuple[FileEntry, int, int, str]],
    progress: Callable[[int], None] | None,
) -> Problems:
    """Return the problems of the parts in `work` that do not match their digests, by path."""

    def read(item: tuple[FileEntry, int, int, str]) -> tuple[FileEntry, int, str | None]:
        entry, start, size, expected = item
        try:
            # Each try opens the file again: a stale NFS handle stays stale.
            digest = reading.read_again(lambda: _digest_in(directory, entry, start, size))
        except ForeignFileError as error:
            return entry, size, error.problem
        except OSError as error:
            return entry, size, f"{UNREADABLE}{error.strerror}"
        return entry, size, None if digest == expected else entry.describe(start, digest)

    problems: Problems = {}
    with ThreadPoolExecutor(READERS_MAX, thread_name_prefix="verify") as pool:
        for entry, size, problem in pool.map(read, work):
            if problem:
                problems.setdefault(entry.path, []).append(problem)
            if progress:
                progress(size)
    return problems
