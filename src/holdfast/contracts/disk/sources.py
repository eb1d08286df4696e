"""Where the files of a checkpoint are: in its directory, or where the program itself wrote them.

A checkpoint that the program wrote has a directory in the run's folder with nothing but a manifest,
and the manifest names the folder of the files as its `source`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.durable import create_bytes, fsync_directory, make_directory
from holdfast.contracts.disk.manifest import Manifest, encode_manifest
from holdfast.contracts.disk.paths import MANIFEST, METADATA, CheckpointName, RunPaths
from holdfast.contracts.disk.reading import held_folder
from holdfast.contracts.errors import CheckpointError, ForeignFileError

# Who ended a checkpoint of a program's own, and why, in the journal.
PROGRAM: Final = "the program"
GONE: Final = "the program deleted its files"
REPLACED: Final = "the program wrote other files in their place"


@contextlib.contextmanager
def files_folder(directory: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield the folder of the files that the manifest in `directory` lists.

    For a checkpoint that the program wrote, that is the folder which the manifest names. Anyone may
    write any name into a manifest of their own, so it counts only if it belongs to the manifest's
    owner. Raises `ForeignFileError` for any other folder, and `OSError` if there is none.
    """
    if manifest.source is None:
        yield directory
        return
    source = Path(manifest.source)
    if not source.is_absolute():
        raise ForeignFileError(source, "not an absolute path")
    with held_folder(source, below=source.parent) as held:
        if held.stat().st_uid != (directory / MANIFEST).lstat().st_uid:
            raise ForeignFileError(source, "a folder of another user than the checkpoint's")
        yield held


def is_dcp(manifest: Manifest) -> bool:
    """Return True if the checkpoint's files are those of DCP, in any directory."""
    return any(entry.path == METADATA for entry in manifest.files)


def require_own_directory(manifest: Manifest, action: str, instead: str = "") -> None:
    """Raise `CheckpointError` if the program wrote the checkpoint to a directory of its own.

    `action` says what cannot be done with it, such as `export it`, and `instead` what to do.
    """
    if manifest.source is not None:
        raise CheckpointError(
            f"{manifest.id}: the program itself wrote this checkpoint, so Holdfast cannot "
            f"{action}; its files are in {manifest.source}" + (f". {instead}" if instead else "")
        )


def require_readable(manifest: Manifest, action: str) -> None:
    """Raise `CheckpointError` if the program wrote the checkpoint in a format of its own."""
    if not is_dcp(manifest):
        require_own_directory(manifest, action)


def record_source(paths: RunPaths, manifest: Manifest) -> bool:
    """Create the manifest in the run, durably; return False if the checkpoint has one."""
    directory = paths.checkpoint(manifest.name)
    make_directory(directory)
    return create_bytes(directory / MANIFEST, encode_manifest(manifest))


def retire_source(paths: RunPaths, name: CheckpointName | str) -> None:
    """Make the manifest a tombstone, because the program's files are gone or others now.

    Journal the line `checkpoint_deleted` before. Does nothing if another process was faster.
    """
    directory = paths.checkpoint(name)
    make_directory(paths.tombstones)
    try:
        os.rename(directory / MANIFEST, paths.tombstone(name))
    except FileNotFoundError:
        return
    fsync_directory(paths.tombstones)
    # Another file in it would be somebody's, so the directory stays then.
    with contextlib.suppress(OSError):
        directory.rmdir()
    fsync_directory(paths.checkpoints)
