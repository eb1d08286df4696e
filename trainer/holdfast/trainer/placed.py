"""Checkpoints in directories that the program chooses, such as the `checkpoint_id` of `dcp.save`.

A save is written into a new folder inside the directory, `.saving-<token>`. Its manifest
commits it there. Then its files move up into the directory, `.metadata` and the manifest last. The
checkpoint that was there before stays complete until the new one is durable. If a process is killed
while files move up, the next load or save completes the move.

This module does not import torch, because the flusher uses it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, file_locks, reading
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import MANIFEST, METADATA
from holdfast.contracts.errors import DamagedCheckpointError

SAVING: Final = ".saving-"
# The manifest of the checkpoint that a save replaces, while files move up.
FORMER: Final = "former.json"
# Held by the process that moves files up: the flusher, or a load that completes the move.
LOCK: Final = "lock"
LOCK_S: Final = 60.0
_TOKEN_BYTES: Final = 8
_SAVING: Final = re.compile(rf"{re.escape(SAVING)}[0-9a-f]{{{2 * _TOKEN_BYTES}}}")


@dataclass(frozen=True, order=True)
class PlacedName:
    """The name of one save: the folder that it is written into. `step` orders a program's saves."""

    step: int
    token: str

    def __str__(self) -> str:
        return f"{SAVING}{self.token}"


@dataclass(frozen=True)
class SavePlace:
    """Where one save goes: the program's `directory`, by way of the folder named by `token`.

    `save_id` is what stock DCP calls so.
    """

    directory: Path
    token: str
    save_id: str

    @property
    def folder(self) -> Path:
        """The folder that the save is written into."""
        return self.directory / f"{SAVING}{self.token}"


def new_token() -> str:
    """Return a random token for one save."""
    return secrets.token_hex(_TOKEN_BYTES)


def is_saving_folder(folder: Path) -> bool:
    """Return True for a folder that a save into a directory of the program is written into."""
    return _SAVING.fullmatch(folder.name) is not None


def find_commit(folder: Path) -> Manifest | None:
    """Return the manifest of the save in `folder`, even if its files have moved up already.

    For a checkpoint of a run, this is its manifest. Raises as `read_manifest` does.
    """
    manifest = read_manifest(folder)
    if manifest is None and is_saving_folder(folder):
        above = read_manifest(folder.parent)
        if above is not None and above.name == folder.name:
            return above
    return manifest


def fsync_commit(folder: Path) -> None:
    """Make the name of the save's manifest durable, in `folder` or in the directory above it."""
    if not is_saving_folder(folder):
        durable.fsync_directory(folder)
        return
    with contextlib.suppress(FileNotFoundError):
        durable.fsync_directory(folder)
    durable.fsync_directory(folder.parent)


def publish(folder: Path) -> None:
    """Move the committed save in `folder` up into the directory above it.

    A call that was interrupted can be repeated. If another process moves the same save, this one
    waits for it. In each state on disk, stock DCP sees the former checkpoint, none, or the new one.
    Raises `OSError` if storage fails, its subclass `TimeoutError` if the other process does not end
    within `LOCK_S`, and `DamagedCheckpointError` if the manifest is invalid.
    """
    with contextlib.ExitStack() as stack:
        try:
            is_locked = stack.enter_context(file_locks.locked(folder / LOCK, LOCK_S))
        except FileNotFoundError:
            # Another process has completed the move.
            return
        if not is_locked:
            raise TimeoutError(f"{folder}: another process has moved its files for {LOCK_S:.0f} s")
        _publish(folder)


def _publish(folder: Path) -> None:
    manifest = read_manifest(folder)
    if manifest is None:
        return
    target = folder.parent
    paths = [entry.path for entry in manifest.files]
    if (folder / METADATA).exists():
        _withdraw_former(folder, target)
    for path in sorted(paths, key=lambda path: path == METADATA):
        _move_up(folder, target, path)
    durable.fsync_directory(target)
    os.rename(folder / MANIFEST, target / MANIFEST)
    durable.fsync_directory(target)
    _remove_former(folder, manifest)


def finish(directory: Path, *, besides: Collection[str] = ()) -> None:
    """Complete the saves into `directory` that were committed and not moved up.

    `besides` are tokens of saves that are still being written. Other users' directories stay as
    they are. Raises as `publish` does.
    """
    committed = []
    for folder in _saving_folders(directory, besides):
        with contextlib.suppress(DamagedCheckpointError):
            manifest = find_commit(folder)
            if manifest is not None:
                committed.append((manifest.committed_at, folder, manifest))
    for _, folder, manifest in sorted(committed, key=lambda one: one[:2]):
        if (folder / MANIFEST).exists():
            publish(folder)
        else:
            _remove_former(folder, manifest)


def clear(directory: Path, *, besides: Collection[str] = ()) -> None:
    """Complete committed saves as `finish` does, and remove those of killed programs."""
    finish(directory, besides=besides)
    for folder in _saving_folders(directory, besides):
        shutil.rmtree(folder, ignore_errors=True)


def _saving_folders(directory: Path, besides: Collection[str]) -> list[Path]:
    """Return this user's folders of saves in `directory`, except those with a token `besides`."""
    skipped = {f"{SAVING}{token}" for token in besides}
    try:
        with os.scandir(directory) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if _SAVING.fullmatch(entry.name)
                and entry.name not in skipped
                and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder for folder in found if _is_mine(folder) and reading.is_mine(directory))


def _is_mine(folder: Path) -> bool:
    """Return what `is_mine` does, and False for a folder that another process just removed."""
    with contextlib.suppress(FileNotFoundError):
        return reading.is_mine(folder)
    return False


def _withdraw_former(folder: Path, target: Path) -> None:
    """Take the former checkpoint out of sight before the first of its files is replaced."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(target / MANIFEST, folder / FORMER)
    with contextlib.suppress(FileNotFoundError):
        (target / METADATA).unlink()
        durable.fsync_directory(target)


def _remove_former(folder: Path, manifest: Manifest) -> None:
    """Remove the files of the former checkpoint that `manifest` does not list, then `folder`."""
    for path in _files_of(folder / FORMER) - {entry.path for entry in manifest.files}:
        with contextlib.suppress(OSError):
            (folder.parent / path).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _files_of(path: Path) -> set[str]:
    """Return the files that a former manifest lists, none without one or if it is invalid."""
    try:
        return {entry.path for entry in Manifest.model_validate_json(path.read_bytes()).files}
    except (OSError, ValueError):
        return set()


def _move_up(folder: Path, target: Path, path: str) -> None:
    """Move one file up, unless an interrupted call has done so already."""
    if "/" in path:
        durable.make_directory((target / path).parent)
    try:
        os.rename(folder / path, target / path)
    except FileNotFoundError:
        if not (target / path).exists():
            raise
