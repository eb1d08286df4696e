"""Writes that survive a power cut: write, flush, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import warnings
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.contracts.disk.reading import held_folder

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A write fails with one of these where storage is full.
STORAGE_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises `OSError` with the directory's name."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents, and fsync the parent of each."""
    missing = []
    current = directory
    while not current.exists():
        missing.append(current)
        current = current.parent
    # From the top down, because a name is durable only if the names above it are.
    for path in reversed(missing):
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError as error:
            text = "a file, or a link to a folder that does not exist"
            raise FileExistsError(error.errno, text, str(path)) from error
        # Also for a folder that another process created: it may not have called fsync yet.
        fsync_directory(path.parent)


def write_bytes(
    path: Path, content: bytes, *, mode: int = 0o666, below: Path | None = None
) -> None:
    """Replace `path` with `content` atomically: readers see the old or the new bytes, never a part.

    The process's umask applies to `mode`. With `below`, a folder above `path`, a link under that
    folder raises `ForeignFileError`. Raises `OSError` if the bytes could not be made durable. The
    file is complete even then: it is the old one, or the new one if only the fsync of the directory
    failed.
    """
    if below is not None:
        with held_folder(path.parent, below=below) as folder:
            write_bytes(folder / path.name, content, mode=mode)
        return
    handle, temporary = _create_beside(path, mode)
    try:
        # The bytes are durable before the name moves. In the other order, a power cut could leave
        # the new name without its bytes.
        _fill(handle, content, path)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise
    # Until this returns, a power cut can bring the old file back.
    fsync_directory(path.parent)


def create_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> bool:
    """Create `path` with `content`. Return False if it already exists.

    The process's umask applies to `mode`. `link`, which is exclusive on shared file systems too,
    creates the name once the bytes are durable, so readers always find the whole file. Raises
    `OSError` if storage fails. If the fsync of the directory fails, the file is removed.
    """
    handle, temporary = _create_beside(path, mode)
    try:
        _fill(handle, content, path)
        try:
            # A rename would replace the file of a process that was faster.
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        _remove_name(temporary)
    try:
        fsync_directory(path.parent)
    # A power cut may still remove the name, so no process may take the file for created. Fault
    # tests found a manifest that stayed after this fsync had failed, see decision 14.
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def _remove_name(temporary: str) -> None:
    """Remove a temporary name of a file, or warn that it stays.

    A name that stays is harmless: no process reads it, and the file itself is complete.
    """
    try:
        Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{temporary}: cannot be removed: {error.strerror}; delete it to free its space",
            stacklevel=3,
        )


def _create_beside(path: Path, mode: int) -> tuple[int, str]:
    """Create a file in the folder of `path`. Return its descriptor for writing and its name."""
    while True:
        name = f"{path.parent}/.{path.name}.{secrets.token_hex(6)}"
        with contextlib.suppress(FileExistsError):
            return os.open(name, _NEW, mode), name


def _fill(handle: int, content: bytes, path: Path) -> None:
    """Write `content` durably to the open file `handle` and close it. Errors name `path`."""
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            # Close alone leaves the bytes in the page cache, where a power cut loses them.
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def to_json(
    document: Any, *, surrogates: Literal["replace", "backslashreplace"] = "replace"
) -> bytes:
    """Return `document` as indented JSON with keys in their own order and a final newline.

    Lone surrogates, from file names and output that are not UTF-8, become `?`, because many readers
    refuse them. With "backslashreplace", they stay as escapes, which `json.loads` restores.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors=surrogates)
