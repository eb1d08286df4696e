"""Images of staging slots that are files on a disk of the node.

Such a file never has a name, so nothing is left after a kill and another user can neither plant it
nor open it. Its blocks are reserved at once, so a full disk is an error here and not while bytes
are copied. Bytes are written by system calls: a mapping would first read each page that the system
has dropped. What was written is sent to the disk early, so only a few of its pages are dirty, and
the system can drop the others when memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import threading
from pathlib import Path
from typing import Final

# How many bytes are written before the disk begins with them. At most twice as many are dirty.
WINDOW_BYTES: Final = 16 * 1024 * 1024
PIECE_BYTES: Final = 8 * 1024 * 1024
# As for checkpoints: journals, logs and manifests may need space on the same disk.
MARGIN_BYTES_MAX: Final = 64 * 1024 * 1024
MODE: Final = 0o600
# Without a file system's support for files without names.
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
_WAIT_BEFORE: Final = 1
_WRITE: Final = 2
_WAIT_AFTER: Final = 4

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
_libc.pwrite.restype = ctypes.c_ssize_t
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint]
_libc.sync_file_range.restype = ctypes.c_int


def create_file(directory: Path, size: int) -> int:
    """Return the descriptor of a new file without a name, with `size` bytes on the disk.

    Raises `OSError`, with ENOSPC if the disk has not enough free space.
    """
    facts = os.statvfs(directory)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    margin = min(MARGIN_BYTES_MAX, total // 100)
    if size + margin > free:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: an image needs {size} bytes and a reserve of {margin} "
            f"bytes, but {free} bytes are free",
        )
    handle = _create_nameless(directory)
    try:
        os.posix_fallocate(handle, 0, size)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _create_nameless(directory: Path) -> int:
    flags = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(directory, os.O_TMPFILE | flags, MODE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f".holdfast-slot-{secrets.token_hex(16)}"
        handle = os.open(name, os.O_CREAT | os.O_NOFOLLOW | flags, MODE, dir_fd=folder)
        # The file system may have removed it, but it is ours.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return handle
    finally:
        os.close(folder)


class ImageFile:
    """The file of an image. Several threads may write."""

    def __init__(self, handle: int, address: int) -> None:
        """`address` is that of the file's mapping. The descriptor is duplicated."""
        self._handle, self._address = os.dup(handle), address
        self._lock = threading.Lock()
        self._written: list[tuple[int, int]] = []
        self._started: list[tuple[int, int]] = []
        self._bytes = 0

    def move(self, to: int, source: int, size: int) -> None:
        """Write `size` bytes at the address `source` to where the address `to` is mapped.

        Raises `OSError`.
        """
        at, end = to - self._address, to - self._address + size
        while at < end:
            done = _libc.pwrite(self._handle, source + size - (end - at), end - at, at)
            if done <= 0:
                self._raise(ctypes.get_errno() if done < 0 else errno.EIO)
            self._note(at, at + done)
            at += max(done, 0)

    def put(self, at: int, content: memoryview) -> None:
        """Write bytes at an offset of the file. Raises `OSError`."""
        done = 0
        while done < len(content):
            piece = content[done : done + PIECE_BYTES]
            count = os.pwrite(self._handle, piece, at + done)
            if not count:
                self._raise(errno.EIO)
            self._note(at + done, at + done + count)
            done += count

    def close(self) -> None:
        """Close the descriptor. The file remains as long as another process has one."""
        os.close(self._handle)

    def _note(self, start: int, stop: int) -> None:
        """Send what was written to the disk, and wait for what was sent before.

        The other threads wait meanwhile, so they cannot write more than the window.
        """
        with self._lock:
            self._written.append((start, stop))
            self._bytes += stop - start
            if self._bytes < WINDOW_BYTES:
                return
            started, self._started = self._started, self._written
            self._written, self._bytes = [], 0
            for first, last in self._started:
                self._sync(first, last, _WRITE)
            for first, last in started:
                self._sync(first, last, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)

    def _sync(self, start: int, stop: int, flags: int) -> None:
        if _libc.sync_file_range(self._handle, start, stop - start, flags) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):
            self._raise(number)
        os.fdatasync(self._handle)

    def _raise(self, number: int) -> None:
        raise OSError(number, f"{os.strerror(number)}: the image on the node's disk")
