"""Finds the weights in a directory of `torch.distributed.checkpoint`, chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.trainer.format.metadata import Opened, open_checkpoint, paths_of
from holdfast.trainer.format.metadata_check import tile
from holdfast.trainer.format.saved_boxes import NO_FILE
from holdfast.trainer.loading.stock import needs_stock
from holdfast.trainer.loading.targets import form_of
from holdfast.trainer.planning.compare_keys import is_of_one_rank, shorten
from holdfast.trainer.sources import tensors
from holdfast.trainer.sources.torch_file import WEIGHTS, Stored, open_torch


def read_dcp(files: tensors.SourceFiles) -> tuple[list[tensors.SourcePart], list[str]]:
    """Return the weights in the DCP directory at the base of `files`, and what else it has.

    A checkpoint with a manifest is verified first. Raises `CheckpointError` if the directory is no
    DCP checkpoint, and `DamagedCheckpointError` if its files are damaged or incomplete.
    """
    opened = open_checkpoint(files.base)
    # A manifest lists the files, so damage is found before any weight is used. Other DCP
    # checkpoints have none.
    if opened.manifest is not None and (damage := find_damage(files.base, opened.manifest)):
        raise DamagedCheckpointError(f"{files.base}: {'; '.join(damage)}", damaged=damage)
    if needs_stock(opened.metadata):
        raise CheckpointError(
            f"{files.base}: its entries are compressed or transformed, which only stock DCP can "
            "undo; load it with stock DCP, and save it without transforms"
        )
    handles: dict[str, int] = {}
    try:
        for path in sorted(opened.boxes.extents):
            handles[path] = files.open(path)
        names, left_out = weights_in(opened)
        parts = [
            part
            for key, name in names.items()
            for part in _parts(opened, key, name, files, handles)
        ]
    finally:
        for handle in handles.values():
            os.close(handle)
    return parts, left_out


def weights_in(opened: Opened) -> tuple[dict[str, str], list[str]]:
    """Return the names of the weights by key, and the other parts of the checkpoint.

    The weights are at `weights_at`. A checkpoint of one flat state dict is only weights.
    Raises `CheckpointError` for a value that is not a tensor.
    """
    entries = opened.metadata.state_dict_metadata
    at = weights_at(opened)
    if not at:
        return _tensors(
            {key: key for key in entries if not is_of_one_rank(key)}, entries, opened
        ), []
    names: dict[str, str] = {}
    others: dict[str, None] = {}
    for key, path in _paths(opened).items():
        if len(path) > len(at) and path[: len(at)] == at:
            names[key] = ".".join(map(str, path[len(at) :]))
        else:
            same = next((n for n in range(len(at)) if path[n : n + 1] != at[n : n + 1]), len(at))
            others[".".join(map(str, path[: same + 1]))] = None
    return _tensors(names, entries, opened), list(others)


def weights_at(opened: Opened) -> tuple[Any, ...]:
    """Return the path at which the weights were saved, () for one flat state dict.

    It is the first of `WEIGHTS`. If all nested tensors are below one other key, such as `app`, it
    may also be below that key, as in `app.model`.
    """
    paths = _paths(opened)
    tops = {path[0] for path in paths.values() if len(path) > 1}
    if top := next((name for name in WEIGHTS if name in tops), None):
        return (top,)
    entries = opened.metadata.state_dict_metadata
    tensors = [p for key, p in paths.items() if isinstance(entries[key], TensorStorageMetadata)]
    if len({path[0] for path in tensors if len(path) > 1}) != 1:
        # The one below another key could be a copy, such as an average.
        return ()
    below = {path[1]: path[:2] for path in tensors if len(path) > 2}
    return next((below[name] for name in WEIGHTS if name in below), ())


def _paths(opened: Opened) -> dict[str, tuple[Any, ...]]:
    known = paths_of(opened.metadata)
    return {key: _path(key, known) for key in opened.metadata.state_dict_metadata}


def _path(key: str, paths: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the path of a key in the nested state."""
    found = paths.get(key)
    return found if isinstance(found, tuple) and found else split_name(key)


def split_name(name: str) -> tuple[str, ...]:
    """Return the path of a key without a known path: its part, then the name in that part."""
    part, dot, rest = name.partition(".")
    return (part, rest) if dot else (part,)


def _tensors(
    names: dict[str, str], entries: Mapping[str, STORAGE_TYPES], opened: Opened
) -> dict[str, str]:
    numbers = [key for key in names if not isinstance(entries[key], TensorStorageMetadata)]
    if numbers:
        raise CheckpointError(
            f"{opened.directory}: {shorten(numbers)} are not tensors; expected a checkpoint of a "
            "model's state dict. Save the model under the key `model`, or export its weights"
        )
    return names


def _parts(
    opened: Opened, key: str, name: str, files: tensors.SourceFiles, handles: Mapping[str, int]
) -> Iterable[tensors.SourcePart]:
    entry = opened.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    boxes, shape, dtype = opened.boxes.by_key[key], tuple(entry.size), entry.properties.dtype
    found = list(zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True))
    # A gap would leave a part of a tensor as it was in memory, and nothing would show it.
    if not tile(found, ((0,) * len(shape), shape)) or NO_FILE in boxes.file:
        raise DamagedCheckpointError(
            f"{opened.directory}: {key}: its chunks do not cover the tensor exactly; import "
            "another checkpoint",
            damaged=[f".metadata: {key}: its chunks do not cover the tensor exactly"],
        )
    rows = zip(
        found, boxes.file.tolist(), boxes.offset.tolist(), boxes.length.tolist(), strict=True
    )
    for (offsets, sizes), file, at, length in rows:
        path = opened.boxes.files[file]
        stored = _stored(handles[path], at, length, dtype, tuple(sizes), f"{files.base}: {key}")
        segment = tensors.ByteSegment(path, stored.offset, stored.extent)
        strides = None if stored.is_contiguous else stored.strides
        yield tensors.SourcePart(
            name, dtype, shape, tuple(offsets), tuple(sizes), (segment,), strides
        )


def _stored(
    handle: int, at: int, length: int, dtype: Any, sizes: tuple[int, ...], where: str
) -> Stored:
    """Return where a chunk's elements lie inside its entry, which is a `torch.save` zip."""
    heads, data_at, expected = form_of(sizes, dtype)
    # The entry has the exact form that torch writes for a dense tensor. Any other entry is read as
    # a pickle, without running it, see decision 28.
    if length == expected and os.pread(handle, data_at, at) in heads:
        return Stored(dtype, sizes, tensors.contiguous_strides(sizes), at + data_at)
    value = open_torch(handle, at, length, where)
    if not isinstance(value, Stored) or (value.dtype, value.sizes) != (dtype, sizes):
        raise DamagedCheckpointError(
            f"{where}: its entry contains another value than .metadata says, expected a dense "
            f"tensor of {dtype} and the shape {sizes}; import another checkpoint",
            damaged=[f"{where}: another value than in .metadata"],
        )
    return value
