"""Bytes that survive a power cut: write, flush, fsync, rename, fsync of the directory."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
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

    Raises `OSError` when the bytes could not be made durable; the old file then still stands.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_bytes(path: Path, content: bytes, *, mode: int = 0o644) -> bool:
    """Create `path` with all of `content`, or return False because it exists already.

    The name appears by `link`, which is exclusive on shared file systems too, and only when
    the bytes are durable: who finds the file finds it whole.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        Path(temporary).unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def to_json(document: Any) -> bytes:
    """`document` as readable JSON, keys in their own order, with a final newline.

    File names and output that are no UTF-8 leave lone surrogates, which become `?`.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors="replace")
