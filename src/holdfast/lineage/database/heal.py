"""Replacement of a damaged SQLite index: the file is moved, so that a new one can be created.

The index contains nothing that is not on disk, so no data is lost. A process must never apply the
write-ahead log of the old file to the new one, because that would damage both. Therefore the
header of the old file is overwritten first, so that no process can open it. Then its log is
moved, and the file itself last. See section 2 of SQLite's "How To Corrupt An SQLite Database
File".
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.errors import LineageError

DAMAGED: Final = ".damaged"
LOCK: Final = ".index.lock"
LOCK_TIMEOUT_S: Final = 8.0
# Longer than a process takes between finding the name of the log and opening it.
GRACE_S: Final = 0.1
CHECK_TIMEOUT_S: Final = 8.0
HEADER_BYTES: Final = 100
MAGIC: Final = b"SQLite format 3\0"
_CODES: Final = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))
_PRIMARY_CODE: Final = 0xFF


def says_damage(error: BaseException | None) -> bool:
    """Return True if a driver error means that the file is damaged or is not a database."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & _PRIMARY_CODE in _CODES


def was_database(path: Path) -> bool:
    """Return True if the file has SQLite's header, or the zeros that `quarantine` writes there."""
    try:
        with open(path, "rb") as stream:
            header = stream.read(HEADER_BYTES)
    except OSError:
        return False
    return header.startswith(MAGIC) or not any(header)


def quarantine(path: Path) -> Path | None:
    """Move a damaged SQLite file to `<name>.damaged` and return the new path.

    Returns None if the file is sound or missing. An older `.damaged` file is replaced. Several
    processes may call this at once; one of them moves the file. The time is that of SQLite's
    integrity check. Raises `LineageError` if the file can be neither checked nor moved.
    """
    try:
        with _locked(path.parent):
            if _is_sound(path):
                return None
            return _move(path)
    except OSError as error:
        raise LineageError(
            f"{path}: the index is damaged and cannot be moved away ({error.strerror}); all its "
            "data can be rebuilt from disk: move the file, and its -wal and -shm files, yourself"
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
    """Return the result of SQLite's integrity check. A missing file counts as sound."""
    if not path.exists():
        return True
    try:
        with contextlib.closing(
            sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=CHECK_TIMEOUT_S
            )
        ) as connection:
            (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            return bool(result == "ok")
    except sqlite3.Error as error:
        if says_damage(error):
            return False
        raise LineageError(f"{path}: the integrity check failed to run: {error}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that only one process moves the file."""
    path = folder / LOCK
    with locked(path, LOCK_TIMEOUT_S) as is_locked:
        if not is_locked:
            raise LineageError(
                f"{path}: locked for {LOCK_TIMEOUT_S:.0f} s by another process that is replacing "
                f"a damaged index; `fuser {path}` shows the process"
            )
        yield
