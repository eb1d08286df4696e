"""Reads and writes past the page cache, where the disk is this machine's own.

Through the cache every 4 KiB take a page of memory and a copy; a direct call moves the bytes
between the caller's memory and the disk, for a tenth of the processor time (docs/decisions/0016).
Network file systems keep their cache, which sends and fetches ahead.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import Final

# What memory, offset and length must be multiples of; no disk asks for more.
ALIGNMENT: Final = 4096
# Below this a cache costs less than what it takes to go past it.
DIRECT_BYTES_MIN: Final = 1024 * 1024
EXT4: Final = 0xEF53
XFS: Final = 0x58465342

_STATFS_BYTES: Final = 256
_libc: Final = ctypes.CDLL(None, use_errno=True)


def begin_direct(handle: int) -> bool:
    """Have all further reads and writes of an open file go past the cache, if they can."""
    if _file_system(handle) not in (EXT4, XFS):
        return False
    try:
        _set_direct(handle, is_direct=True)
    except OSError:
        return False
    return True


def end_direct(handle: int) -> None:
    """Have them go through the cache again."""
    _set_direct(handle, is_direct=False)


class Output:
    """An open file that is written from its beginning on, past the cache as far as that goes."""

    def __init__(self, handle: int, size: int) -> None:
        """`size` is how many bytes are to come."""
        self._handle = handle
        self._is_direct = size >= DIRECT_BYTES_MIN and begin_direct(handle)

    def write(self, piece: memoryview) -> None:
        """Write all of `piece`; raises `OSError` as `os.write` does.

        Bytes that end within a page, as a file's last ones do, go through the cache.
        """
        while piece:
            piece = piece[self._write_some(piece) :]

    def _write_some(self, piece: memoryview) -> int:
        if self._is_direct and len(piece) < ALIGNMENT:
            self._through_cache()
        if not self._is_direct:
            return os.write(self._handle, piece)
        try:
            count = os.write(self._handle, piece[: len(piece) // ALIGNMENT * ALIGNMENT])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Memory or disk are aligned otherwise than we took it.
            self._through_cache()
            return 0
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
    """The kernel's number for the type of the file system that an open file lies on, or 0."""
    facts = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _libc.fstatfs(ctypes.c_int(handle), facts) != 0:
        return 0
    return int(facts[0])
