"""Whole tensors of a checkpoint, read and verified by one process in batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import OBJ_PATH
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.contracts.errors import CheckpointError, KeyMismatchError
from holdfast.trainer.format.metadata import Opened, open_checkpoint, paths_of
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.compare_keys import Selection, is_of_one_rank, shorten
from holdfast.trainer.planning.train_state_file import read_train_state
from holdfast.trainer.process import devices
from holdfast.trainer.sources.dcp import weights_at


@dataclass(frozen=True)
class ExportEntry:
    """One entry to write: its saved key, its name in the export, its size.

    `bytes` is the size in the wanted type, or 0 for a number, whose `dtype` is None. `path` is its
    position in nested dictionaries.
    """

    key: str
    name: str
    path: OBJ_PATH
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    bytes: int

    @property
    def is_tensor(self) -> bool:
        """True for a tensor, False for a number such as a learning rate."""
        return self.dtype is not None


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint and the entries to write.

    `documents` are those of objects, by name. `prefix` begins the names of parameters.
    """

    opened: Opened
    entries: tuple[ExportEntry, ...]
    documents: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""

    @property
    def directory(self) -> Path:
        return self.opened.directory

    def read(self, entries: Sequence[ExportEntry]) -> dict[str, Any]:
        """Return whole tensors or numbers by name. Every byte is checked against the manifest.

        Raises `DamagedCheckpointError` if bytes differ.
        """
        flat: dict[str, Any] = {
            one.key: torch.empty(one.shape, dtype=one.dtype, device=devices.CPU)
            if one.is_tensor
            else 0
            for one in entries
        }
        if flat:
            load_state(self.opened, flat, group=None, strict=False, include=tuple(flat))
        return {one.name: flat[one.key] for one in entries}


def open_source(
    directory: Path,
    *,
    include: Collection[str],
    rename: Mapping[str, str],
    dtype: torch.dtype | None,
    weights_only: bool = False,
) -> ExportSource:
    """Open the Holdfast or stock DCP checkpoint in `directory` for an export.

    `include` has keys or key prefixes. Without any, everything is taken, or with `weights_only` the
    model's part. `rename` is that of `Selection`. If given, `dtype` is the type of all
    floating-point tensors in the export. Per-rank entries, such as the state of random number
    generators, are left out.

    Raises `DamagedCheckpointError` if the checkpoint is damaged, `KeyMismatchError` for a rename
    that fits no key, and `CheckpointError` if nothing is left to write.
    """
    opened = open_checkpoint(directory)
    at = ".".join(map(str, weights_at(opened)))
    if weights_only and not include and at:
        include = (at,)
    saved = {
        key: value
        for key, value in opened.metadata.state_dict_metadata.items()
        if not is_of_one_rank(key)
    }
    taken = [key for key in saved if _is_below(key, include)]
    kept = read_train_state(opened.directory, opened.manifest).get("objects", {})
    documents = {name: document for name, document in kept.items() if _is_below(name, include)}
    if not taken and not documents:
        raise CheckpointError(
            f"{directory}: no key matches {', '.join(include) or 'the selection'}; it has "
            f"{shorten(list(saved)) or 'none'}"
        )
    names = Selection(rename=rename).rename_all(taken)
    paths = paths_of(opened.metadata)
    entries = []
    for key in taken:
        wanted: torch.dtype | None = None
        shape: tuple[int, ...] = ()
        if isinstance(value := saved[key], TensorStorageMetadata):
            wanted, shape = _type_of(value, dtype), tuple(value.size)
        path = paths.get(key) if names[key] == key else None
        entries.append(
            ExportEntry(
                key=key,
                name=names[key],
                path=path or split_name(names[key]),
                dtype=wanted,
                shape=shape,
                bytes=math.prod(shape) * wanted.itemsize if wanted is not None else 0,
            )
        )
    return ExportSource(opened, tuple(entries), documents, f"{at}." if at else "")


def batches(entries: Sequence[ExportEntry], bytes_max: int) -> Iterator[list[ExportEntry]]:
    """Yield entries in order, in batches of at most `bytes_max` but at least one entry."""
    batch: list[ExportEntry] = []
    for entry in entries:
        if batch and sum(one.bytes for one in batch) + entry.bytes > bytes_max:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def weights_of(source: ExportSource) -> list[ExportEntry]:
    """Return the tensors to write. Raises `KeyMismatchError` if the selection has numbers.

    The prefix of a parameter's name, such as `model.`, is removed.
    """
    require_tensors(source)
    numbers = [entry.key for entry in source.entries if not entry.is_tensor]
    if numbers:
        raise KeyMismatchError(
            f"{source.directory}: a file of tensors cannot hold numbers, and {shorten(numbers)} "
            "are numbers; leave them out with --include, or use --to torch",
            extra=numbers,
        )
    named = [replace(one, name=one.name.removeprefix(source.prefix)) for one in source.entries]
    owners: dict[str, str] = {}
    for one in named:
        if owners.setdefault(one.name, one.key) != one.key:
            raise KeyMismatchError(
                f"{source.directory}: {owners[one.name]} and {one.key} would both be {one.name}; "
                "give one of them another name with --rename, or choose with --include",
                extra=[one.key],
            )
    return named


def require_tensors(source: ExportSource) -> None:
    """Raise `CheckpointError` if only plain values of objects would be written."""
    if not source.entries:
        raise CheckpointError(
            f"{source.directory}: {', '.join(source.documents)} has no tensors, and this format "
            "contains nothing else; use --to torch"
        )


def split_name(name: str) -> OBJ_PATH:
    """Return the path of a key without a known path: its part, then the name in that part."""
    part, dot, rest = name.partition(".")
    return (part, rest) if dot else (part,)


def _is_below(key: str, prefixes: Collection[str]) -> bool:
    """Return True if no prefixes are given, or if `key` is one of them or lies below one.

    The optimizer's state of a parameter is not below the parameter, unlike in a `Selection`.
    """
    return not prefixes or any(key == one or key.startswith(f"{one}.") for one in prefixes)


def _type_of(entry: TensorStorageMetadata, wanted: torch.dtype | None) -> torch.dtype:
    saved = entry.properties.dtype
    return wanted if wanted is not None and saved.is_floating_point else saved
