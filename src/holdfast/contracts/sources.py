"""Where the files of a checkpoint are: in its directory, or where the program itself wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from holdfast.contracts.errors import CheckpointError, ForeignFileError
from holdfast.contracts.manifest import Manifest
from holdfast.contracts.paths import MANIFEST
from holdfast.contracts.reading import held_folder


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


def require_own_format(manifest: Manifest, action: str) -> None:
    """Raise `CheckpointError` if the program wrote the checkpoint itself, in its own format.

    `action` says what cannot be done with it, such as `export it`.
    """
    if manifest.source is not None:
        raise CheckpointError(
            f"{manifest.id}: the program itself wrote this checkpoint, so Holdfast cannot "
            f"{action}; its files are in {manifest.source}"
        )
