"""A SQLite index that is damaged is set aside, so that a new one can be made from disk.

The files are an index alone, so nothing is lost with them. What must not happen is that a process
takes up the log of the old file for the new one: both would be ruined. So the old file is made
unreadable in its place first, and opened by nobody from then on; then its log goes, and it goes
last. (SQLite, "How To Corrupt An SQLite Database File", section 2.)
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.errors import LineageError
from holdfast.contracts.file_locks import wait_for_lock

DAMAGED: Final = ".damaged"
LOCK_TIMEOUT_S: Final = 60.0
# Longer than a process may take between seeing the log's name and opening it.
GRACE_S: Final = 0.1
CHECK_TIMEOUT_S: Final = 60.0
HEADER_BYTES: Final = 100
MAGIC: Final = b"SQLite format 3\0"
_CODES: Final = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))
_PRIMARY_CODE: Final = 0xFF


def says_damage(error: BaseException | None) -> bool:
    """True when an error of the driver says that the file is damaged, or is no database."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & _PRIMARY_CODE in _CODES


def was_database(path: Path) -> bool:
    """True when the file begins as SQLite's do, or as one that was about to be set aside."""
    try:
        with open(path, "rb") as stream:
            header = stream.read(HEADER_BYTES)
    except OSError:
        return False
    return header.startswith(MAGIC) or not any(header)


def quarantine(path: Path) -> Path | None:
    """Move a damaged SQLite file to `<name>.damaged`, over an older one; None when it is sound.

    Safe to call from several processes: one of them moves it, the others find it gone. It takes
    as long as SQLite's integrity check does. Raises `LineageError` when the file can be neither
    checked nor moved.
    """
    try:
        with _locked(path.parent):
            if _is_sound(path):
                return None
            return _move(path)
    except OSError as error:
        raise LineageError(
            f"{path}: damaged, and it cannot be set aside ({error.strerror}); it is an index "
            "only: move it away, and its -wal and -shm with it"
        ) from error


def _move(path: Path) -> Path:
    aside, log, shared = (Path(f"{path}{suffix}") for suffix in (DAMAGED, "-wal", "-shm"))
    handle = os.open(path, os.O_RDWR)
    try:
        header = os.pread(handle, HEADER_BYTES, 0)
        os.pwrite(handle, bytes(len(header)), 0)
        for _ in range(2):
            shared.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                log.rename(f"{aside}-wal")
            time.sleep(GRACE_S)
        path.rename(aside)
        os.pwrite(handle, header, 0)
    finally:
        os.close(handle)
    return aside


def _is_sound(path: Path) -> bool:
    """What SQLite itself says of the file; one that is not there is sound."""
    if not path.exists():
        return True
    try:
        with contextlib.closing(
            sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=CHECK_TIMEOUT_S
            )
        ) as connection:
            (word,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            return bool(word == "ok")
    except sqlite3.Error as error:
        if says_damage(error):
            return False
        raise LineageError(f"{path}: cannot be checked: {error}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from setting aside the same file; the folder itself is the lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not wait_for_lock(handle, LOCK_TIMEOUT_S):
            raise LineageError(
                f"{folder}: another process has been setting a damaged index aside for "
                f"{LOCK_TIMEOUT_S:.0f} s; see `fuser {folder}`"
            )
        yield
    finally:
        os.close(handle)
