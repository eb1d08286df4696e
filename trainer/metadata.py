"""Reading `.metadata`, DCP's pickle, without running what a stranger put into it.

Only the classes that DCP's own planner and file writer put there are known; any other name is
refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.manifest import read_manifest

METADATA: Final = ".metadata"

_ALLOWED: Final = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        # Stock DCP notes the directory that it wrote to, which older writers gave as a path.
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves the names of DCP's own metadata and torch's dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP never writes")


def parse_metadata(content: bytes, source: str) -> Metadata:
    """The metadata in `content`; `source` names it in errors.

    Raises `DamagedCheckpointError` when it is no metadata of DCP, or names anything else than
    DCP's own classes: no code of such a file is run.
    """
    try:
        parsed = _MetadataUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        # A hostile or torn pickle can raise anything at all; whatever it was, it is not ours.
        raise DamagedCheckpointError(
            f"{source}: not the metadata of a DCP checkpoint: {error}; "
            "load another checkpoint, or write this one again with DCP",
            damaged=[f"{METADATA}: {error}"],
        ) from error
    if not isinstance(parsed, Metadata):
        raise DamagedCheckpointError(
            f"{source}: holds a {type(parsed).__name__}, expected DCP's Metadata",
            damaged=[f"{METADATA}: a {type(parsed).__name__}"],
        )
    return parsed


def read_metadata(directory: Path) -> Metadata:
    """The metadata of the checkpoint in `directory`, ours or stock DCP's.

    A manifest, where there is one, must bear out the bytes before they are looked into. Raises
    `DamagedCheckpointError` when they differ, are missing or are not DCP's.
    """
    path = directory / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path}: cannot be read: {error.strerror}; expected the directory of a DCP checkpoint",
            damaged=[f"{METADATA}: {error.strerror}"],
        ) from error
    manifest = read_manifest(directory)
    entry = next((e for e in manifest.files if e.path == METADATA), None) if manifest else None
    if entry is not None:
        problem = entry.difference(content)
        if problem is not None:
            raise DamagedCheckpointError(
                f"{path}: it is not what the manifest says, so it is not opened; "
                "`holdfast verify` lists what else is damaged",
                damaged=[f"{METADATA}: {problem}"],
            )
    return parse_metadata(content, str(path))
