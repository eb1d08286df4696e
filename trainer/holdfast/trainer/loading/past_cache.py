"""Direct reads that bypass the page cache for data that is not in it.

Data that is already in memory, for example because another process has just read it, is copied
from there. A direct read pays off only for whole blocks. If a file system refuses direct reads,
the read goes through the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from holdfast.contracts.disk import direct, reading

VECTORS_MAX: Final = 1024
HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mincore.restype = ctypes.c_int


def huge_memory(size: int) -> memoryview:
    """Return private memory for direct reads, in huge pages if possible.

    A disk fills one long stretch three times as fast as hundreds of small pages.
    """
    mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(mapped, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(mapped)[first : first + size]


def go_past_cache(handle: int, start: int, size: int) -> bool:
    """Switch an open file to direct reads if most of these bytes are not in memory.

    Returns whether reads are now direct. If so, each further read must use `fill_aligned`.
    """
    if (
        size < direct.DIRECT_BYTES_MIN
        or start % direct.ALIGNMENT
        or is_in_memory(handle, start, size)
    ):
        return False
    return direct.begin_direct(handle)


def is_in_memory(handle: int, start: int, size: int) -> bool:
    """Return True if at least half of these bytes are in the page cache, or if it is unknown.

    `start` is a multiple of `ALIGNMENT`.
    """
    pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
    try:
        mapped = mmap.mmap(handle, size, access=mmap.ACCESS_READ, offset=start)
    except (OSError, ValueError):
        # The file system cannot map files, or the file is too short. The read reports the problem.
        return True
    with mapped:
        content = np.frombuffer(mapped, np.uint8)
        failed = _libc.mincore(content.ctypes.data, size, pages.ctypes.data)
        # The mapping cannot be closed while this array exists.
        del content
    return bool(failed) or int((pages & 1).sum()) * 2 >= len(pages)


def fill_aligned(handle: int, memory: memoryview, start: int, size: int) -> None:
    """Read `size` bytes from `start`, a multiple of `ALIGNMENT`, into the beginning of `memory`.

    `memory` begins at a page and has space for whole pages. Raises `EOFError` if the file is too
    short.
    """
    room, at = -(-size // direct.ALIGNMENT) * direct.ALIGNMENT, 0
    while at < size:
        try:
            count = reading.read_again(partial(os.preadv, handle, [memory[at:room]], start + at))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct.end_direct(handle)
            fill(handle, [memory[at:size]], start + at)
            return
        if at + count < size:
            # The next read must also begin at a page.
            count -= count % direct.ALIGNMENT
        if count == 0:
            raise EOFError(f"ends before byte {start + size}, expected more")
        at += count


def fill(handle: int, views: Sequence[memoryview], start: int) -> None:
    """Fill all `views` from the file. Raises `EOFError` if the file is too short."""
    waiting, at = list(views), start
    while waiting:
        count = reading.read_again(partial(os.preadv, handle, waiting[:VECTORS_MAX], at))
        if count == 0:
            raise EOFError(f"ends at byte {at}, expected more")
        at += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = waiting[0][count:]
