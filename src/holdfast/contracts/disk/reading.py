"""Safe reading of files that another user may have written.

Such a file must not make the reader hang, fill its memory or lead it to another file. So these
functions open files without waiting, without following links, only if they are regular files, and
up to a maximum size. See `docs/security.md` for the threat model.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from holdfast.contracts.errors import ForeignFileError

# Retries of reads that failed with an error that may be temporary.

T = TypeVar("T")

READ_WAITS_S: Final = (0.05, 0.5)
"""Seconds before the second and the third attempt."""

# Causes: a server that restarts, a path that fails over, a file handle that a rename made stale.
_MAY_PASS: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def read_again(read: Callable[[], T]) -> T:
    """Return the result of `read()`, retried after temporary errors. Raises the last error."""
    for wait_s in READ_WAITS_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise
            time.sleep(wait_s)
    return read()


# The largest JSON document of a run: far above any that Holdfast writes.
DOCUMENT_BYTES_MAX: Final = 16 * 1024 * 1024
LINKS_MAX: Final = 40
TRIES_MAX: Final = 16
# Without O_NONBLOCK, opening a named pipe would wait for a writer.
# Of a new file, before the umask.
MODE: Final = 0o666
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Where the kernel shows the folders that this process holds open.
HELD: Final = Path("/proc/self/fd")
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# The number of openat2 is the same on every architecture. libc has no function for it.
_OPENAT2: Final = 437
# Links of `/proc` lead to any open file, wherever it is.
_NO_MAGIC_LINKS: Final = 0x02
_NO_LINKS: Final = 0x04
_BENEATH: Final = 0x08
_IS_LINK: Final = frozenset({errno.ELOOP, errno.EXDEV})


class _How(ctypes.Structure):
    """The kernel's `struct open_how`."""

    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


def open_regular(path: Path | str, *, below: Path | None = None, follow: bool = False) -> int:
    """Return a descriptor for reading the regular file `path`. The caller closes it.

    Without `below`, only the last part of `path` is checked for a link. With `below`, a folder
    above `path`, every part under that folder is checked. With `follow` too, links are followed if
    they stay inside the folder. Opening never waits. Raises `OSError` like `open`, and
    `ForeignFileError` for links, pipes, devices and folders.
    """
    handle = open_beneath(path, _READ, below=below, follow=follow)
    try:
        # The open descriptor is checked, not the path, which its owner can replace in between.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ForeignFileError(path, "not a regular file")
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_bounded(
    path: Path | str,
    bytes_max: int = DOCUMENT_BYTES_MAX,
    *,
    below: Path | None = None,
    follow: bool = False,
) -> bytes:
    """Return the bytes of a regular file of at most `bytes_max` bytes, see `open_regular`.

    Also raises `ForeignFileError` for a larger file.
    """
    with open(open_regular(path, below=below, follow=follow), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > bytes_max:
            raise ForeignFileError(path, f"{size} bytes, expected {bytes_max} or less")
        # Not until the end: the owner may let the file grow while it is read.
        return stream.read(size)


def read_tail(path: Path, bytes_max: int, *, below: Path) -> str:
    """Return the last `bytes_max` bytes of a file as text. Links must stay inside `below`.

    Raises like `open_regular`.
    """
    with open(open_regular(path, below=below, follow=True), "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - bytes_max))
        return stream.read(bytes_max).decode(errors="replace")


def open_beneath(
    path: Path | str,
    flags: int,
    *,
    below: Path | None = None,
    follow: bool = False,
) -> int:
    """Open `path` like `os.open`, without following links under `below`.

    With `follow`, links that stay inside `below` are followed. Without `below`, only the last part
    of `path` is checked. Raises `OSError` like `open`, and `ForeignFileError` for a link.
    """
    flags |= os.O_CLOEXEC
    try:
        if below is None:
            return os.open(path, flags | os.O_NOFOLLOW, MODE)
        relative = Path(path).relative_to(below)
        base = os.open(below, _FOLDER)
        try:
            return _open_inside(base, str(relative), flags, follow)
        finally:
            os.close(base)
    except OSError as error:
        if error.errno in _IS_LINK:
            raise ForeignFileError(path, _link_problem(error.errno, follow)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def held_folder(folder: Path, *, below: Path) -> Iterator[Path]:
    """Yield a path that refers to `folder` even if the folder is replaced during the block.

    No part of `folder` under `below` may be a link. Raises like `open_beneath`.
    """
    handle = open_beneath(folder, _FOLDER, below=below)
    try:
        yield HELD / str(handle)
    finally:
        os.close(handle)


def is_mine(path: Path) -> bool:
    """Return True if `path` belongs to this process's user, or to root, who has full access anyway.

    For a link, the link's own owner counts. Raises `OSError` if `path` does not exist.
    """
    return path.lstat().st_uid in {os.geteuid(), 0}


def _open_inside(base: int, relative: str, flags: int, follow: bool) -> int:
    """Open `relative` under the folder `base` with `openat2`, else with `walk_inside`."""
    for _ in range(TRIES_MAX):
        try:
            return _openat2()(base, relative, flags, follow)
        except OSError as error:
            # A rename on the path happened meanwhile, so the kernel asks for a retry.
            if error.errno == errno.EAGAIN:
                continue
            # ENOSYS: a kernel before 5.6. EPERM: a container's filter of system calls.
            if error.errno not in {errno.ENOSYS, errno.EPERM, errno.EINVAL}:
                raise
            break
    return walk_inside(base, relative, flags, follow)


@functools.cache
def _openat2() -> Callable[[int, str, int, bool], int]:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(base: int, relative: str, flags: int, follow: bool) -> int:
        resolve = _BENEATH | _NO_MAGIC_LINKS | (0 if follow else _NO_LINKS)
        how = _How(flags, MODE if flags & os.O_CREAT else 0, resolve)
        found = libc.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(base),
            ctypes.c_char_p(os.fsencode(relative)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if found < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(found)

    return call


def walk_inside(base: int, relative: str, flags: int, follow: bool) -> int:
    """Open a path part by part, like `openat2`, for kernels and containers without that call."""
    parts, links = deque(Path(relative).parts), 0
    handles = [os.dup(base)]
    try:
        while parts:
            part = parts.popleft()
            if part == "..":
                os.close(handles.pop())
                if not handles:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                continue
            wanted = _FOLDER if parts else flags
            try:
                # Relative to the folder that is already open, so a folder that is replaced
                # meanwhile cannot redirect the walk.
                handles.append(os.open(part, wanted | os.O_NOFOLLOW, MODE, dir_fd=handles[-1]))
            except OSError as error:
                target = _link_target(part, handles[-1])
                if target is None:
                    raise
                links += 1
                if not follow or links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
                if target.startswith("/"):
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV)) from error
                parts.extendleft(reversed(Path(target).parts))
        # The caller closes the result, and `base` stays the caller's own.
        return os.dup(handles[-1]) if len(handles) == 1 else handles.pop()
    finally:
        for handle in handles:
            os.close(handle)


def _link_problem(number: int, follow: bool) -> str:
    """Return the problem with a link on which an open failed with the error `number`."""
    if not follow:
        return "a link, or inside a linked folder"
    if number == errno.ELOOP:
        return "too many links, or a loop of links"
    return "a link that leads outside its folder"


def _link_target(part: str, folder: int) -> str | None:
    """Return the target of a link in an open folder; None if `part` is not a link."""
    try:
        return os.readlink(part, dir_fd=folder)
    except OSError:
        return None
