"""File locks that only users with write permission can hold.

`flock` needs no more than a readable descriptor. A lock file that others can read is therefore a
lock that others can hold. So a file that is only locked has the permissions of its folder: the
classes of users (user, group, other) that may write to the folder may open it, and nobody else.
Files that others may read, such as journals, are not locked themselves. They have a lock file
beside them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.reading import open_beneath
from holdfast.contracts.errors import ForeignFileError

POLL_S: Final = 0.05
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY
_OPEN: Final = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW: Final = _OPEN | os.O_CREAT | os.O_EXCL
_NO_LOCK: Final = "not a regular file, so it cannot be a lock; delete it"
# Another process may delete the file between two calls.
_TRIES_MAX: Final = 16


def open_lock(path: Path, *, below: Path | None = None, owner_only: bool = False) -> int:
    """Return a descriptor of the lock file `path`. Create the file if needed. The caller closes it.

    Users who may write to the folder of `path` can open the file. With `owner_only`, only the
    folder's owner can. An own file with more permissions loses them. No part of `path` under the
    folder `below` may be a link; `below` is the file's folder if it is not given. Raises `OSError`
    like `open`, and `ForeignFileError` for a link, for a file that is not regular, and for the
    file of a user whose lock does not count.
    """
    below = path.parent if below is None else below
    try:
        folder = open_beneath(path.parent, _FOLDER, below=below)
    except NotADirectoryError as error:
        raise ForeignFileError(path.parent, "not a folder") from error
    try:
        return _open_in(folder, path, owner_only=owner_only)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(
    path: Path, timeout_s: float, *, below: Path | None = None, owner_only: bool = False
) -> Iterator[bool]:
    """Hold the lock `path` during the block. Yields False if another process keeps it locked.

    Raises like `open_lock`.
    """
    handle = open_lock(path, below=below, owner_only=owner_only)
    try:
        yield wait_for_lock(handle, timeout_s)
    finally:
        os.close(handle)


def wait_for_lock(handle: int, timeout_s: float = 0.0, *, shared: bool = False) -> bool:
    """Take the `flock` of an open file. Return False if that fails for `timeout_s`.

    The lock is exclusive unless it is `shared`. It is held until the descriptor is closed.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            # A blocking `flock` has no time limit, so the lock is polled.
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(POLL_S)
        else:
            return True


def release(handle: int) -> None:
    """Release the lock of an open file and keep the file open."""
    fcntl.flock(handle, fcntl.LOCK_UN)


def _open_in(folder: int, path: Path, *, owner_only: bool) -> int:
    """Open the lock `path`, whose folder is open."""
    place = os.fstat(folder)
    for _ in range(_TRIES_MAX):
        try:
            handle, is_new = _open_or_create(folder, path.name)
        except FileExistsError:
            continue
        except OSError as error:
            raise _explain(error, path, folder) from error
        try:
            # Before any change, because the file may be another user's, or no regular file.
            if not is_new:
                _check(handle, path, place, owner_only=owner_only)
            if is_new or _needs_change(handle, place, owner_only=owner_only):
                _give_to_folder(handle, place, owner_only=owner_only)
        except BaseException:
            os.close(handle)
            raise
        return handle
    raise FileExistsError(f"{path}: other processes keep creating and deleting this file")


def _open_or_create(folder: int, name: str) -> tuple[int, bool]:
    """Return a descriptor of the file and whether it is new."""
    try:
        return os.open(name, _OPEN, dir_fd=folder), False
    except FileNotFoundError:
        # Exclusive, so exactly one process gives a new file its owner and mode. Until then, mode
        # 0600 keeps everyone out who must not hold the lock.
        return os.open(name, _NEW, 0o600, dir_fd=folder), True


def _check(handle: int, path: Path, place: os.stat_result, *, owner_only: bool) -> None:
    """Raise `ForeignFileError` for a file that is not a lock, or whose owner's does not count."""
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        raise ForeignFileError(path, _NO_LOCK)
    if owner_only and facts.st_uid not in {place.st_uid, os.geteuid(), 0}:
        raise ForeignFileError(
            path, f"belongs to user {facts.st_uid}, whose lock does not count; delete it"
        )


def _needs_change(handle: int, place: os.stat_result, *, owner_only: bool) -> bool:
    """Return True for an own file in an own folder that has not the folder's permissions."""
    facts = os.fstat(handle)
    is_own = facts.st_uid == place.st_uid == os.geteuid()
    # A second name could be that of an unrelated file.
    if not is_own or facts.st_nlink != 1:
        return False
    return stat.S_IMODE(facts.st_mode) != _rights(place, place.st_gid, owner_only=owner_only)


def _give_to_folder(handle: int, place: os.stat_result, *, owner_only: bool) -> None:
    """Give a lock file the owner, the group and the permissions of its folder."""
    for owner in (place.st_uid, -1):
        # Only root can give a file away. Other users can give it to one of their groups.
        with contextlib.suppress(PermissionError):
            os.fchown(handle, owner, place.st_gid)
            break
    rights = _rights(place, os.fstat(handle).st_gid, owner_only=owner_only)
    # A file system without permissions has none to change.
    with contextlib.suppress(PermissionError):
        os.fchmod(handle, rights)


def _rights(place: os.stat_result, group: int, *, owner_only: bool) -> int:
    """Return the permissions of a lock file of `group` in the folder `place`."""
    rights = 0o600
    if not owner_only and place.st_mode & stat.S_IWGRP and group == place.st_gid:
        rights |= 0o060
    if not owner_only and place.st_mode & stat.S_IWOTH:
        rights |= 0o006
    return rights


def _explain(error: OSError, path: Path, folder: int) -> Exception:
    """Return the error of an `open` with the file's name, and with its owner if that is why."""
    if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
        return ForeignFileError(path, _NO_LOCK)
    named = OSError(error.errno, error.strerror, str(path))
    if error.errno != errno.EACCES:
        return named
    try:
        owner = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_uid
    except OSError:
        return named
    if owner == os.geteuid():
        return named
    return ForeignFileError(path, f"belongs to user {owner}, and only that user can lock it")
