"""Raw file system operations, with which saves and loads are compared."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.durable import fsync_directory

IO_BYTES: Final = 16 * 1024 * 1024
FILES_AT_ONCE: Final = 4
SMALL_BYTES: Final = 4096
SMALL_FILES: Final = 3
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def sizes_of(directory: Path) -> dict[str, int]:
    """Return the bytes of every file in a checkpoint, by path relative to it."""
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def share_out(sizes: dict[str, int], ranks: int) -> list[dict[str, int]]:
    """Distribute the files so that each rank writes or reads about as many bytes."""
    shares: list[dict[str, int]] = [{} for _ in range(ranks)]
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        min(shares, key=lambda share: sum(share.values()))[path] = size
    return shares


def write_files(directory: Path, sizes: dict[str, int], image: memoryview) -> None:
    """Create each file from the bytes of `image`, in large writes, with one fsync.

    Several files are written at once, so that a small file does not wait for a large one. The
    names in the directories are made durable last. `image` has the bytes of all files.
    """
    for parent in {(directory / name).parent for name in sizes}:
        parent.mkdir(parents=True, exist_ok=True)
    _for_each(sizes, image, lambda name, piece: write_file(directory / name, piece))
    for parent in sorted({(directory / name).parent for name in sizes}):
        fsync_directory(parent)


def read_files(directory: Path, sizes: dict[str, int], image: memoryview) -> None:
    """Read each file into `image` in large reads. Raises `OSError` if a file is too short."""
    _for_each(sizes, image, lambda name, piece: read_file(directory / name, piece))


def write_file(path: Path, content: memoryview) -> None:
    """Create `path` with `content` and fsync it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while content:
            content = content[os.write(handle, content[:IO_BYTES]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def read_file(path: Path, into: memoryview) -> None:
    """Fill `into` from the beginning of `path`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while into:
            count = os.readv(handle, [into[:IO_BYTES]])
            if count == 0:
                raise OSError(f"{path} ended {len(into)} bytes early")
            into = into[count:]
    finally:
        os.close(handle)


def _for_each(
    sizes: dict[str, int], image: memoryview, act: Callable[[str, memoryview], None]
) -> None:
    """Call `act` for every file with its own piece of `image`, `FILES_AT_ONCE` at a time."""
    ends = list(itertools.accumulate(sizes.values()))
    pieces = [image[end - size : end] for end, size in zip(ends, sizes.values(), strict=True)]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        # `list` raises the errors of the lazy result.
        list(pool.map(act, sizes, pieces))


def create_small(directory: Path, numbers: Iterable[int]) -> None:
    """Create and fsync three small files, which is the least cost of any commit record."""
    for number in itertools.islice(numbers, SMALL_FILES):
        handle = os.open(directory / f"small-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(handle, bytes(SMALL_BYTES))
            os.fsync(handle)
        finally:
            os.close(handle)


def ready_pages(size: int) -> None:
    """Touch `size` bytes of memory and free them, so that the next operation finds free pages.

    A virtual machine may return free pages to the host after a second or two. Without this call,
    the first operation after a pause would have to wait for pages.
    """
    with mmap.mmap(-1, max(size, mmap.PAGESIZE)) as memory:
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def drop_cache(paths: Sequence[Path]) -> float:
    """Flush files and drop them from the page cache. Return the share that stayed in memory.

    A file system without a disk keeps all pages.
    """
    resident = total = 0
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = resident_pages(handle)
        finally:
            os.close(handle)
        resident, total = resident + sum(pages), total + len(pages)
    return resident / max(total, 1)


def resident_pages(handle: int) -> bytes:
    """Return one byte for each page of an open file: 1 if it is in memory, else 0."""
    size = os.fstat(handle).st_size
    if size == 0:
        return b""
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    # A private mapping, because ctypes needs writable memory for an address. No page is touched,
    # so the mapping reads no page into memory.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE, prot=access) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = _LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector
        )
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore cannot report the pages in memory")
    return bytes(page & 1 for page in vector)


def remove(directory: Path) -> None:
    """Delete a directory and fsync, so that the next operation does not pay for it."""
    shutil.rmtree(directory, ignore_errors=True)
    fsync_directory(directory.parent)
