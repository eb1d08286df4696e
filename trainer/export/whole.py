"""Whole tensors of a checkpoint, read and verified by one process, as many at a time as asked."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint._traverse import OBJ_PATH
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.contracts.errors import CheckpointError, KeyMismatchError
from holdfast.trainer.loading.compare_keys import Selection, is_of_one_rank, shorten
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.loading.train_state import read_train_state
from holdfast.trainer.planning.metadata import Opened, open_checkpoint, paths_of

MODEL: Final = "model."


@dataclass(frozen=True)
class Entry:
    """One thing to be written: the key it was saved under, the name it is to have, its size.

    `bytes` counts what it takes at the type wanted; it is 0 for numbers, which `dtype` None marks.
    `path` is its place among nested dictionaries.
    """

    key: str
    name: str
    path: OBJ_PATH
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    bytes: int

    @property
    def is_tensor(self) -> bool:
        """False for a number, such as a learning rate."""
        return self.dtype is not None


@dataclass(frozen=True)
class Source:
    """A checkpoint and what of it is to be written; `documents` are those of objects, by name."""

    opened: Opened
    entries: tuple[Entry, ...]
    documents: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self.opened.directory

    def read(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Name → whole tensor or number. Every byte read is compared with the manifest's digests.

        Raises `DamagedCheckpointError` when they differ.
        """
        flat: dict[str, Any] = {
            one.key: torch.empty(one.shape, dtype=one.dtype) if one.is_tensor else 0
            for one in entries
        }
        if flat:
            load_state(self.directory, flat, group=None, strict=False, include=tuple(flat))
        return {one.name: flat[one.key] for one in entries}


def open_source(
    directory: Path,
    *,
    include: Collection[str],
    rename: Mapping[str, str],
    dtype: torch.dtype | None,
) -> Source:
    """Look into the checkpoint in `directory`, ours or stock DCP's.

    `include` are keys or beginnings of keys, empty for all; `rename` is that of `Selection`;
    `dtype`, when given, is that of all floating-point tensors written. What single ranks have for
    themselves, such as the state of their random numbers, is left out.

    Raises `DamagedCheckpointError` for what cannot be believed, `KeyMismatchError` for a rename
    that fits nothing, and `CheckpointError` when nothing is left to write.
    """
    opened = open_checkpoint(directory)
    saved = {
        key: value
        for key, value in opened.metadata.state_dict_metadata.items()
        if not is_of_one_rank(key)
    }
    pick = Selection(include=tuple(include))
    taken = [key for key in saved if pick.takes(key)]
    kept = read_train_state(directory, opened.manifest).get("objects", {})
    documents = {name: document for name, document in kept.items() if pick.takes(name)}
    if not taken and not documents:
        raise CheckpointError(
            f"{directory}: no key lies under {', '.join(include) or 'it'}; it has "
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
            Entry(
                key=key,
                name=names[key],
                path=path or split_name(names[key]),
                dtype=wanted,
                shape=shape,
                bytes=math.prod(shape) * wanted.itemsize if wanted is not None else 0,
            )
        )
    return Source(opened, tuple(entries), documents)


def batches(entries: Sequence[Entry], bytes_max: int) -> Iterator[list[Entry]]:
    """Entries in their order, as many together as `bytes_max` allow and never none."""
    batch: list[Entry] = []
    for entry in entries:
        if batch and sum(one.bytes for one in batch) + entry.bytes > bytes_max:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def weights_of(source: Source) -> list[Entry]:
    """The tensors; `KeyMismatchError` names the numbers, which a file of tensors has no place for.

    The `model.` before a parameter's name is Holdfast's own, and goes.
    """
    require_tensors(source)
    numbers = [entry.key for entry in source.entries if not entry.is_tensor]
    if numbers:
        raise KeyMismatchError(
            f"{source.directory}: a file of tensors cannot hold numbers, and {shorten(numbers)} "
            "are such; leave them out with --include, or write --to torch",
            extra=numbers,
        )
    return [replace(one, name=one.name.removeprefix(MODEL)) for one in source.entries]


def require_tensors(source: Source) -> None:
    """Raise `CheckpointError` where nothing but plain values of objects is to be written."""
    if not source.entries:
        raise CheckpointError(
            f"{source.directory}: {', '.join(source.documents)} has no tensors, and this form "
            "holds nothing else; write --to torch"
        )


def split_name(name: str) -> OBJ_PATH:
    """The path of a key whose own is not known: its part, then its name in that part."""
    part, dot, rest = name.partition(".")
    return (part, rest) if dot else (part,)


def _type_of(entry: TensorStorageMetadata, wanted: torch.dtype | None) -> torch.dtype:
    saved = entry.properties.dtype
    return wanted if wanted is not None and saved.is_floating_point else saved
