"""Reading past the page cache what is not in it.

What is in memory already, as when others read it a moment ago, is copied from there. Only whole
blocks are worth a direct read, and where a file system declines, it goes through the cache.
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

from holdfast.contracts.direct import ALIGNMENT, DIRECT_BYTES_MIN, begin_direct, end_direct
from holdfast.contracts.retries import read_again

VECTORS_MAX: Final = 1024
HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mincore.restype = ctypes.c_int


def huge_memory(size: int) -> memoryview:
    """Memory of this process alone for direct reads, in huge pages where there are any.

    A disk fills one long stretch faster than hundreds of small pages, here three times as fast.
    """
    mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(mapped, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(mapped)[first : first + size]


def go_past_cache(handle: int, start: int, size: int) -> bool:
    """Have further reads of an open file be direct, if most of these bytes are not in memory.

    Returns whether they are: each must then be one of `fill_aligned`.
    """
    if size < DIRECT_BYTES_MIN or start % ALIGNMENT or is_in_memory(handle, start, size):
        return False
    return begin_direct(handle)


def is_in_memory(handle: int, start: int, size: int) -> bool:
    """True when half of these bytes of a file or more are in the page cache, or nobody says.

    `start` is a multiple of `ALIGNMENT`.
    """
    pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
    try:
        mapped = mmap.mmap(handle, size, access=mmap.ACCESS_READ, offset=start)
    except (OSError, ValueError):
        # A file system that maps nothing, or a file cut short: reading says what is wrong.
        return True
    with mapped:
        content = np.frombuffer(mapped, np.uint8)
        failed = _libc.mincore(content.ctypes.data, size, pages.ctypes.data)
        # Until then the mapping cannot be closed.
        del content
    return bool(failed) or int((pages & 1).sum()) * 2 >= len(pages)


def fill_aligned(handle: int, memory: memoryview, start: int, size: int) -> None:
    """Read `size` bytes from `start` on, a multiple of `ALIGNMENT`, into the beginning of `memory`.

    `memory` begins with a page, and has room for whole pages. Raises `EOFError` when the file
    ends before.
    """
    room, at = -(-size // ALIGNMENT) * ALIGNMENT, 0
    while at < size:
        try:
            count = read_again(partial(os.preadv, handle, [memory[at:room]], start + at))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            end_direct(handle)
            fill(handle, [memory[at:size]], start + at)
            return
        if at + count < size:
            # The next read must begin with a page again.
            count -= count % ALIGNMENT
        if count == 0:
            raise EOFError(f"ends before byte {start + size}, expected more")
        at += count


def fill(handle: int, views: Sequence[memoryview], start: int) -> None:
    """Fill all `views` from the file; raises `EOFError` when it ends before them."""
    waiting, at = list(views), start
    while waiting:
        count = read_again(partial(os.preadv, handle, waiting[:VECTORS_MAX], at))
        if count == 0:
            raise EOFError(f"ends at byte {at}, expected more")
        at += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = waiting[0][count:]
