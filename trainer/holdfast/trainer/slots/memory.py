"""Allocation of memory pages ahead of their first use.

The first access to a page costs a page fault, and the kernel must clear a new page. Both together
take many times as long as the copy itself. The system calls here do this work in advance, in pieces
and without the GIL, so that a background thread can do it during training.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Final

# The kernel locks the address space during each call, and training also maps memory.
PIECE_BYTES: Final = 16 * 1024 * 1024
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; mmap does not name it

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def populate(mapping: mmap.mmap, start: int, stop: int) -> Iterator[int]:
    """Allocate bytes `start` to `stop` of a writable mapping, without changing their contents.

    Yields the offset reached after each piece. Asks for huge pages and accepts small ones. Ends
    early, without an error, if the kernel refuses: memory is short, the file was truncated, or the
    kernel does not support the call.
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
        # While this reference exists, the mapping cannot be closed.
        del held
