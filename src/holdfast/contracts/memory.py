"""Memory that is there before it is needed: pages taken and mapped ahead of the first copy.

A page that is touched for the first time costs a trap, and a fresh one must be cleared: many times
the copy itself. The system calls here do that ahead, in pieces, without the interpreter's lock, so
that a background thread can do it while training runs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Final

# In pieces: the kernel holds the address space while it works, and training also maps memory.
PIECE_BYTES: Final = 16 * 1024 * 1024
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; mmap does not name it

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def populate(mapping: mmap.mmap, start: int, stop: int) -> Iterator[int]:
    """Make bytes `start` to `stop` of a writable mapping present, without changing them.

    Yields the offset that is reached, after each piece. Huge pages are asked for, and small ones
    taken where the kernel gives none. Ends early, yielding no more, when the kernel declines:
    memory ran out, the file was cut short, or the call is not known; nothing is lost then.
    """
    held = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(held)
    try:
        first = start - start % mmap.PAGESIZE
        _libc.madvise(address + first, stop - first, mmap.MADV_HUGEPAGE)
        for at in range(first, stop, PIECE_BYTES):
            size = min(PIECE_BYTES, stop - at)
            if _libc.madvise(address + at, size, MADV_POPULATE_WRITE) != 0:
                return
            yield at + size
    finally:
        # Until then the mapping cannot be closed under our feet.
        del held
