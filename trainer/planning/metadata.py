"""Reading `.metadata`, DCP's pickle, without running what a stranger put into it.

Only the classes that DCP's own planner and file writer put there are known; any other name is
refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.reading import read_bounded
from holdfast.trainer.planning.metadata_check import find_problem

METADATA: Final = ".metadata"
# That of 10,000 ranks with 1,000 tensors each has about 1 GB.
METADATA_BYTES_MAX: Final = 8 << 30
_OF_A_STAGE: Final = re.compile(r"pp(\d+)/\.metadata")

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
        # Not by `getattr`, at which torch would import parts of itself that it has not yet.
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
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
    if problem := find_problem(parsed):
        raise DamagedCheckpointError(
            f"{source}: {problem}; load another checkpoint, or write this one again with DCP",
            damaged=[f"{METADATA}: {problem}"],
        )
    return parsed


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was looked into: `manifest` is None for one that stock DCP wrote."""

    directory: Path
    manifest: Manifest | None
    metadata: Metadata


def read_metadata(directory: Path) -> Metadata:
    """The metadata of the checkpoint in `directory`; see `open_checkpoint`."""
    return open_checkpoint(directory).metadata


def open_checkpoint(directory: Path) -> Opened:
    """The metadata of the checkpoint in `directory`, ours or stock DCP's, of all its stages.

    A manifest, where there is one, must bear out the bytes before they are looked into, and
    must have every file that they name. Raises `DamagedCheckpointError` when they differ, are
    missing, are not DCP's, or lead outside the directory.
    """
    manifest = read_manifest(directory)
    parts = {}
    for path in _metadata_paths(directory, manifest):
        content = read_verified(directory, path, manifest)
        parts[path.removesuffix(METADATA)] = parse_metadata(content, str(directory / path))
    metadata = merge(parts)
    _check_paths(directory, metadata, manifest)
    return Opened(directory, manifest, metadata)


def merge(parts: Mapping[str, Metadata]) -> Metadata:
    """One metadata of those of all stages; keys of `parts` are their folders, `pp0/` and so on.

    A key that several stages have, such as a tied embedding's, is the first one's. Without stages
    all is as it was saved, with what a planner of one's own may have put there.
    """
    if parts.keys() == {""}:
        return parts[""]
    merged = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    for folder, part in parts.items():
        new = part.state_dict_metadata.keys() - merged.state_dict_metadata.keys()
        merged.state_dict_metadata.update(
            {key: entry for key, entry in part.state_dict_metadata.items() if key in new}
        )
        merged.planner_data.update(
            {key: path for key, path in paths_of(part).items() if key in new}
        )
        for index, info in (part.storage_data or {}).items():
            if index.fqn in new:
                moved = replace(info, relative_path=folder + info.relative_path)
                merged.storage_data[index] = moved if folder else info
    return merged


def paths_of(metadata: Metadata) -> Mapping[str, Any]:
    """The paths of nested keys, as stock DCP's planner keeps them; other planners keep others."""
    kept = metadata.planner_data
    return kept if isinstance(kept, Mapping) else {}


def pick_entries(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    """The entries that `names` has, each under its new name."""
    return Metadata(
        state_dict_metadata={
            names[key]: entry for key, entry in metadata.state_dict_metadata.items() if key in names
        },
        planner_data={names[key]: path for key, path in paths_of(metadata).items() if key in names},
        storage_data={
            replace(index, fqn=names[index.fqn]): info
            for index, info in (metadata.storage_data or {}).items()
            if index.fqn in names
        },
    )


def read_verified(
    directory: Path, path: str, manifest: Manifest | None, bytes_max: int = METADATA_BYTES_MAX
) -> bytes:
    """The bytes of a small file of a checkpoint, borne out by the manifest where there is one.

    Raises `DamagedCheckpointError` when they are not, cannot be read or are over `bytes_max`.
    """
    entry = next((e for e in manifest.files if e.path == path), None) if manifest else None
    try:
        content = read_bounded(directory / path, bytes_max)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise DamagedCheckpointError(
            f"{directory / path}: cannot be read: {words}; expected the directory of a "
            "DCP checkpoint",
            damaged=[f"{path}: {words}"],
        ) from error
    problem = entry.difference(content) if entry is not None else None
    if problem is not None:
        raise DamagedCheckpointError(
            f"{directory / path}: it is not what the manifest says, so it is not opened; "
            "`holdfast verify` lists what else is damaged",
            damaged=[f"{path}: {problem}"],
        )
    return content


def extents_of(metadata: Metadata) -> dict[str, int]:
    """How far the entries reach into each file, in bytes; -1 where one begins before it."""
    extents: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sound = info.offset >= 0 and info.length >= 0
        end = info.offset + info.length if sound else -1
        before = extents.get(info.relative_path, 0)
        extents[info.relative_path] = max(before, end) if min(before, end) >= 0 else -1
    return extents


def _metadata_paths(directory: Path, manifest: Manifest | None) -> list[str]:
    """`.metadata` of the directory and of its stages, in order; at least the directory's own."""
    if manifest is not None:
        files = [entry.path for entry in manifest.files]
    else:
        files = [str(path.relative_to(directory)) for path in directory.glob(f"*/{METADATA}")]
        files += [METADATA] if (directory / METADATA).exists() else []
    stages = {int(match[1]): path for path in files if (match := _OF_A_STAGE.fullmatch(path))}
    own = [METADATA] if METADATA in files or not stages else []
    return own + [stages[stage] for stage in sorted(stages)]


def _check_paths(directory: Path, metadata: Metadata, manifest: Manifest | None) -> None:
    """Refuse files that lie outside the directory or are shorter than `.metadata` needs."""
    listed = {entry.path: entry.bytes for entry in manifest.files} if manifest else None
    for path, extent in extents_of(metadata).items():
        problem = _problem_of_path(directory, path, extent, listed)
        if problem:
            raise DamagedCheckpointError(
                f"{directory}: its {METADATA} {problem} {path!r}; expected its own files. Load "
                "another checkpoint",
                damaged=[f"{METADATA}: names {path!r}"],
            )


def _problem_of_path(
    directory: Path, path: str, extent: int, listed: Mapping[str, int] | None
) -> str | None:
    """What is wrong with a file of which `.metadata` names the first `extent` bytes."""
    try:
        if not (directory / path).resolve().is_relative_to(directory.resolve()):
            return "points outside the directory, to"
        if listed is not None:
            size = listed.get(path, -1)
        else:
            size = (directory / path).stat().st_size if (directory / path).is_file() else -1
    except (OSError, RuntimeError):
        # Links that lead in a circle are a RuntimeError.
        size = -1
    if size < 0:
        return "names a file that the checkpoint does not have,"
    return "names bytes that are not in the file" if extent < 0 or extent > size else None
