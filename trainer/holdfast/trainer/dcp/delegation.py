"""Which calls stock DCP serves, because Holdfast's engine cannot, and the warning that says so."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

CheckpointId = str | os.PathLike[str] | None
# The stagers of stock DCP. The engine stages instead of them.
_STAGERS: Final = (DefaultStager, BlockingAsyncStager, FileSystemWriter)


def directory_of_save(checkpoint_id: CheckpointId, writer: StorageWriter | None) -> Path | str:
    """Return the directory to save into, or as text why stock DCP must save.

    A plain `FileSystemWriter` names a directory like `checkpoint_id` does, and takes over a
    `checkpoint_id`, as in stock DCP. Its options choose how stock DCP writes, so they have no
    effect.
    """
    if writer is None:
        return _local(checkpoint_id, FileSystemWriter.validate_checkpoint_id(checkpoint_id or ""))
    # A subclass may write anywhere and in any form, so only the class itself is known.
    if type(writer) is not FileSystemWriter:
        return f"the storage writer is a {type(writer).__name__}"
    if writer.transforms.extensions:
        return "the FileSystemWriter has extensions"
    if writer.serialization_format is not SerializationFormat.TORCH_SAVE:
        return f"the FileSystemWriter writes {writer.serialization_format.name}"
    # Stock DCP's writer takes over the `checkpoint_id` of a call, and a program may read it there.
    writer.reset(checkpoint_id)
    return _absolute(writer.path)


def directory_of_load(checkpoint_id: CheckpointId, reader: StorageReader | None) -> Path | str:
    """Return the directory to load from, or as text why stock DCP must load.

    A plain `FileSystemReader` is used as a writer is by `directory_of_save`.
    """
    if reader is None:
        return _local(checkpoint_id, FileSystemReader.validate_checkpoint_id(checkpoint_id or ""))
    if type(reader) is not FileSystemReader:
        return f"the storage reader is a {type(reader).__name__}"
    reader.reset(checkpoint_id)
    return _absolute(reader.path)


def target_of(directory: Path) -> Path:
    """Return the directory that a link such as `latest` names, or `directory` if it is not a link.

    Links above it stay: they may differ between nodes, such as those of an automounter.
    """
    with contextlib.suppress(OSError):
        joined = directory.parent / os.readlink(directory)
        plain = _absolute(joined)
        # Above a link, `..` is not the folder before it in the text.
        is_same = plain.exists() and plain.samefile(joined)
        return target_of(plain) if is_same else Path(os.path.realpath(directory))
    return directory


def extensions_of(reader: StorageReader | None) -> ExtensionRegistry | None:
    """Return the extensions that a plain `FileSystemReader` was made with."""
    return reader.transforms.extension_registry if isinstance(reader, FileSystemReader) else None


def why_not_staged(stager: AsyncStager | None) -> str | None:
    """Return why the engine cannot stage for the caller, or None if it can."""
    if stager is None or type(stager) in _STAGERS:
        return None
    return f"the stager is a {type(stager).__name__}"


def warn(call: str, reason: str) -> None:
    """Warn that stock DCP serves a call."""
    warnings.warn(
        f"dcp.{call}: {reason}, so torch.distributed.checkpoint.{call} does it, without Holdfast's "
        "manifest and checks. Pass a directory as checkpoint_id for a call by Holdfast",
        stacklevel=4,
    )


def _local(checkpoint_id: CheckpointId, is_valid: bool) -> Path | str:
    if not checkpoint_id:
        # Stock DCP raises its own error, so there is nothing to warn of.
        return ""
    return _absolute(checkpoint_id) if is_valid else f"{checkpoint_id} is not a local path"


def _absolute(checkpoint_id: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(checkpoint_id))
