"""Bytes that survive a power cut: write, flush, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


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


def write_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `content` so that a reader sees the old bytes or the new, never a part.

    Raises `OSError` when they could not be made durable; `path` is then whole as well, the old
    file or, where the directory alone refused, the new one.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        _fill(handle, content, mode, path)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> bool:
    """Create `path` with all of `content`, or return False because it exists already.

    The name appears by `link`, which is exclusive on shared file systems too, and only when
    the bytes are durable: who finds the file finds it whole. Raises `OSError` when storage
    refuses; a name that may not outlast a power cut is then taken back.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        _fill(handle, content, mode, path)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        # Of no consequence: a second name, which nobody reads, would only take room.
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
    try:
        fsync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def _fill(handle: int, content: bytes, mode: int, path: Path) -> None:
    """Write `content` durably into the open file `handle`, which is to be `path`, and close it."""
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def to_json(document: Any) -> bytes:
    """`document` as readable JSON, keys in their own order, with a final newline.

    File names and output that are no UTF-8 leave lone surrogates, which become `?`.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")
