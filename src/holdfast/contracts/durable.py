"""Bytes that survive a power cut: write, flush, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.reading import held_folder

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable; raises `OSError` with the directory's name."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents, each made durable in its parent."""
    missing = []
    current = directory
    while not current.exists():
        missing.append(current)
        current = current.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def write_bytes(
    path: Path, content: bytes, *, mode: int = 0o666, below: Path | None = None
) -> None:
    """Replace `path` by `content` so that a reader sees the old bytes or the new, never a part.

    The process's umask takes its bits from `mode`. With `below`, a folder that `path` lies in, no
    link under that folder is followed (`ForeignFileError`). Raises `OSError` when they could not be
    made durable; `path` is then whole as well, the old file or, where the directory alone refused,
    the new one.
    """
    if below is not None:
        with held_folder(path.parent, below=below) as folder:
            write_bytes(folder / path.name, content, mode=mode)
        return
    handle, temporary = _create_beside(path, mode)
    try:
        _fill(handle, content, path)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> bool:
    """Create `path` with all of `content`, or return False because it exists already.

    The process's umask takes its bits from `mode`. The name appears by `link`, which is exclusive
    on shared file systems too, and only when the bytes are durable: who finds the file finds it
    whole. Raises `OSError` when storage refuses; a name that may not outlast a power cut is then
    taken back.
    """
    handle, temporary = _create_beside(path, mode)
    try:
        _fill(handle, content, path)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        _remove_name(temporary)
    try:
        fsync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def _remove_name(temporary: str) -> None:
    """Remove a second name of a file; where that fails a warning says which one stays.

    It is of no consequence otherwise: nobody reads it, and the file under its own name is whole.
    """
    try:
        Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{temporary}: not removed: {error.strerror}; it takes up room and may be deleted",
            stacklevel=3,
        )


def _create_beside(path: Path, mode: int) -> tuple[int, str]:
    """A new file in the folder of `path`, open for writing, and its name."""
    while True:
        name = f"{path.parent}/.{path.name}.{secrets.token_hex(6)}"
        with contextlib.suppress(FileExistsError):
            return os.open(name, _NEW, mode), name


def _fill(handle: int, content: bytes, path: Path) -> None:
    """Write `content` durably into the open file `handle`, which is to be `path`, and close it."""
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def to_json(document: Any) -> bytes:
    """`document` as readable JSON, keys in their own order, with a final newline.

    File names and output that are no UTF-8 leave lone surrogates, which become `?`.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")
