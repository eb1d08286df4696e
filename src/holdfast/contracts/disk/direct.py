"""Direct reads and writes, which bypass the page cache, on local disks.

Through the cache, every 4 KiB need a page of memory and a copy. A direct call moves the bytes
between the caller's memory and the disk, in a tenth of the CPU time (decision 16). Network file
systems still use their cache, because it reads and writes ahead.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import Final

# Memory address, offset and length must be multiples of this. No disk requires more.
ALIGNMENT: Final = 4096
# For smaller files, the cache costs less than direct writes.
DIRECT_BYTES_MIN: Final = 1024 * 1024
# Direct calls pay off on these. A network file system reads ahead and writes behind in its cache,
# see decisions 16 and 17.
EXT4: Final = 0xEF53
XFS: Final = 0x58465342

_STATFS_BYTES: Final = 256
_libc: Final = ctypes.CDLL(None, use_errno=True)


def begin_direct(handle: int) -> bool:
    """Switch an open file to direct reads and writes. Return False if that is not possible."""
    if _file_system(handle) not in (EXT4, XFS):
        return False
    try:
        _set_direct(handle, is_direct=True)
    except OSError:
        return False
    return True


def end_direct(handle: int) -> None:
    """Switch an open file back to reads and writes through the cache."""
    _set_direct(handle, is_direct=False)


def write_some(handle: int, piece: memoryview) -> int:
    """Write a part of `piece`, which has bytes, and return its length.

    Raises `OSError` like `os.write`, and for a file system that takes no byte without an error.
    """
    count = os.write(handle, piece)
    if not count:
        raise OSError(errno.EIO, f"a write of {len(piece)} bytes wrote nothing")
    return count


class DirectFile:
    """An open file that is written from its start, with direct writes where possible."""

    def __init__(self, handle: int, size: int) -> None:
        """Take an open file. `size` is the number of bytes that will be written."""
        self._handle = handle
        self._is_direct = size >= DIRECT_BYTES_MIN and begin_direct(handle)

    def write(self, piece: memoryview) -> None:
        """Write all of `piece`. Raises `OSError` like `os.write`.

        Bytes after the last full page, such as the end of a file, go through the cache.
        """
        while piece:
            piece = piece[self._write_some(piece) :]

    def _write_some(self, piece: memoryview) -> int:
        # O_DIRECT refuses a partial page. Only the end of a file is one.
        if self._is_direct and len(piece) < ALIGNMENT:
            self._through_cache()
        if not self._is_direct:
            return write_some(self._handle, piece)
        try:
            count = write_some(self._handle, piece[: len(piece) // ALIGNMENT * ALIGNMENT])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The memory or the disk needs another alignment.
            self._through_cache()
            return 0
        # The short write left the file position unaligned, so another direct write would fail.
        if count % ALIGNMENT:
            self._through_cache()
        return count

    def _through_cache(self) -> None:
        end_direct(self._handle)
        self._is_direct = False


def _set_direct(handle: int, *, is_direct: bool) -> None:
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
    fcntl.fcntl(handle, fcntl.F_SETFL, flags)


def _file_system(handle: int) -> int:
    """Return the kernel's number of the file system type of an open file, or 0."""
    facts = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _libc.fstatfs(ctypes.c_int(handle), facts) != 0:
        return 0
    return int(facts[0])
