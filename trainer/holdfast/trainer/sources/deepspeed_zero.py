"""Finds the fp32 weights in a checkpoint of DeepSpeed ZeRO 1 to 3, without running its pickles.

Every rank saved its partition of one flat vector. In ZeRO 1 and 2, the partitions of all ranks
follow each other, and a parameter is a stretch of the whole vector. In ZeRO 3, each parameter is
cut into equal parts, one for each rank. The layout follows `deepspeed/utils/zero_to_fp32.py`.
Objects of DeepSpeed's own classes, such as its loss scaler, are skipped and never made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import CheckpointError, ForeignFileError
from holdfast.trainer.planning.compare_keys import shorten
from holdfast.trainer.sources.tensors import ByteSegment, SourceFiles, SourcePart, check_shape
from holdfast.trainer.sources.torch_file import Stored, open_torch, part_of

LATEST: Final = "latest"
TAG_BYTES_MAX: Final = 4096
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WHOLE_VECTOR: Final = "single_partition_of_fp32_groups"
_CUT_PARAMETERS: Final = "fp32_flat_groups"
_ADVICE: Final = (
    "convert it with DeepSpeed's zero_to_fp32.py, in a program that you trust, and import what "
    "that writes"
)


@dataclass(frozen=True)
class _Vector:
    """A flat vector of elements in several places of files."""

    pieces: tuple[tuple[str, Stored], ...]

    def stretch(self, begin: int, count: int, where: str) -> Iterator[ByteSegment]:
        at = 0
        for path, piece in self.pieces:
            size = prod(piece.sizes)
            low, high = max(begin, at), min(begin + count, at + size)
            if low < high:
                item = piece.dtype.itemsize
                yield ByteSegment(path, piece.offset + (low - at) * item, (high - low) * item)
            at += size
        if begin + count > at:
            raise CheckpointError(
                f"{where}: it needs elements {begin} to {begin + count} of a partition, which has "
                f"{at}; files are missing or damaged. {_ADVICE}"
            )


def is_zero_folder(directory: Path, names: Sequence[str]) -> bool:
    """Return True if a folder with these names is one of DeepSpeed, or of one of its steps."""
    if any(_MODEL.fullmatch(name) for name in names):
        return True
    tags = [name for name in names if (directory / name).is_dir()]
    return LATEST in names and bool(tags)


def read_zero(
    files: SourceFiles, directory: Path, names: Sequence[str]
) -> tuple[list[SourcePart], list[str]]:
    """Return the fp32 weights and the buffers of a DeepSpeed folder, and what else it has.

    Without a step's folder, the one that `latest` names is read. Raises `CheckpointError` if files
    are missing or damaged, or if the checkpoint has model parallelism.
    """
    if not any(_MODEL.fullmatch(name) for name in names):
        directory = _newest(directory, names)
        names = os.listdir(directory)
    models = _numbered(_MODEL, names, directory)
    optimizers = _numbered(_OPTIMIZER, names, directory)
    if not models or not optimizers:
        raise CheckpointError(
            f"{directory}: it has no files *_model_states.pt and zero_pp_rank_*_optim_states.pt of "
            f"ZeRO 1 to 3; {_ADVICE}"
        )
    opened = [_open(files, directory / name) for name in models]
    partitions = [_open(files, directory / name) for name in optimizers]
    flat = [_partition(value, path) for path, value in partitions]
    where, model = opened[0]
    parts = list(_frozen(opened, where))
    if len({is_whole for is_whole, _ in flat}) > 1:
        raise CheckpointError(f"{directory}: its files are of several ZeRO stages; {_ADVICE}")
    is_whole, groups = flat[0][0], [each for _, each in flat]
    if is_whole:
        padding = partitions[0][1]["optimizer_state_dict"].get("param_alignment_paddings")
        parts += _from_whole(groups, _shapes(model, where), padding, where)
    else:
        parts += _from_cut(groups, _shapes(model, where), where)
    parts += _buffers(model, where)
    parts = _with_shared(parts, model)
    if is_whole:
        parts += _rest(parts, model, where)
    return parts, ["optimizer state"]


def _newest(directory: Path, names: Sequence[str]) -> Path:
    """Return the folder of the step that `latest` names."""
    try:
        if LATEST not in names:
            raise ValueError("there is no such file")
        tag = read_bounded(directory / LATEST, TAG_BYTES_MAX, below=directory).decode().strip()
        # The tag comes from a file, so it must not lead out of the folder.
        if tag not in names or "/" in tag or tag.startswith("."):
            raise ValueError(f"it names {tag[:100]!r}, which the folder does not have")
    except (OSError, ForeignFileError, ValueError) as error:
        raise CheckpointError(
            f"{directory / LATEST}: {error}; expected the name of a step's folder. Give that folder"
        ) from error
    return directory / tag


def _numbered(pattern: re.Pattern[str], names: Sequence[str], directory: Path) -> list[str]:
    """Return the files of all ranks in order. Raises `CheckpointError` if a rank's is missing."""
    found = {}
    for name in names:
        if match := pattern.fullmatch(name):
            if int(match[2]):
                raise CheckpointError(
                    f"{directory}: {name}: the model was split by tensor parallelism; {_ADVICE}"
                )
            found[int(match[1] or 0)] = name
    # Without a rank's partition, all elements after it would move to other parameters.
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        raise CheckpointError(
            f"{directory}: the files of ranks {shorten(list(map(str, missing)))} are missing, like "
            f"{next(iter(found.values()))}; copy them there"
        )
    return [found[number] for number in sorted(found)]


def _open(files: SourceFiles, place: Path) -> tuple[str, dict[str, Any]]:
    path = os.path.relpath(place, files.base)
    handle = files.open(path)
    try:
        value = open_torch(handle, 0, files.size(path), str(place), others=("deepspeed.",))
    finally:
        os.close(handle)
    if not isinstance(value, dict):
        raise CheckpointError(f"{place}: it contains a {type(value).__name__}, expected a dict")
    return path, value


def _partition(value: Mapping[str, Any], path: str) -> tuple[bool, list[_Vector]]:
    """Return (whether of ZeRO 1 or 2, a rank's vector of each group)."""
    state = value.get("optimizer_state_dict")
    if isinstance(state, dict):
        for key, is_whole in ((_WHOLE_VECTOR, True), (_CUT_PARAMETERS, False)):
            groups = state.get(key)
            if isinstance(groups, list) and all(_is_flat(each) for each in groups):
                return is_whole, [_Vector(((path, each),)) for each in groups]
    raise CheckpointError(f"{path}: it has no partition of fp32 weights of ZeRO 1 to 3; {_ADVICE}")


def _is_flat(value: Any) -> bool:
    return isinstance(value, Stored) and len(value.sizes) == 1 and value.is_contiguous


def _shapes(model: Mapping[str, Any], where: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters of each group, in the order of the flat vector."""
    groups = model.get("param_shapes")
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        return [{str(name): _shape(name, s, where) for name, s in one.items()} for one in groups]
    raise CheckpointError(f"{where}: it has no param_shapes of ZeRO 1 to 3; {_ADVICE}")


def _shape(name: Any, given: Any, where: str) -> tuple[int, ...]:
    return check_shape(str(name), tuple(given), torch.float32, where)


def _from_whole(
    ranks: Sequence[Sequence[_Vector]],
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    padding: Any,
    where: str,
) -> Iterator[SourcePart]:
    """Yield the parameters of ZeRO 1 and 2: stretches of all ranks' partitions, one after another.

    `padding` has the elements that follow each parameter of each group, or is None.
    """
    for number, shapes in enumerate(groups):
        own = [rank[number] for rank in ranks if number < len(rank)]
        vector = _Vector(tuple(piece for each in own for piece in each.pieces))
        skipped = padding[number] if isinstance(padding, list) else [0] * len(shapes)
        begin = 0
        for (name, shape), after in zip(shapes.items(), skipped, strict=True):
            segments = list(vector.stretch(begin, prod(shape), f"{where}: {name}"))
            yield SourcePart.whole(name, vector.pieces[0][1].dtype, shape, segments)
            begin += prod(shape) + int(after)


def _from_cut(
    ranks: Sequence[Sequence[_Vector]],
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    where: str,
) -> Iterator[SourcePart]:
    """Yield the parameters of ZeRO 3: each is cut into equal parts, the last one padded."""
    vectors = [_Vector(tuple(piece for each in rank for piece in each.pieces)) for rank in ranks]
    begin = 0
    for shapes in groups:
        for name, shape in shapes.items():
            part = -(-prod(shape) // len(ranks))
            yield SourcePart.whole(
                name,
                vectors[0].pieces[0][1].dtype,
                shape,
                _cut(vectors, begin, part, prod(shape), f"{where}: {name}"),
            )
            begin += part


def _cut(
    vectors: Sequence[_Vector], begin: int, part: int, count: int, where: str
) -> list[ByteSegment]:
    """Return the bytes of `count` elements, of which each vector has `part` from `begin` on."""
    segments: list[ByteSegment] = []
    for number, vector in enumerate(vectors):
        here = min(part, max(0, count - number * part))
        segments += vector.stretch(begin, here, where)
    return segments


def _frozen(models: Sequence[tuple[str, Mapping[str, Any]]], where: str) -> Iterator[SourcePart]:
    """Yield the parameters that were not trained: each rank's file has a part, or all of one."""
    shapes = models[0][1].get("frozen_param_shapes")
    for name, given in (shapes or {}).items():
        shape = _shape(name, given, where)
        pieces = [
            (path, (model.get("frozen_param_fragments") or {}).get(name)) for path, model in models
        ]
        whole = next((one for _, one in pieces if isinstance(one, Stored)), None)
        if whole is None or not all(
            isinstance(one, Stored) and one.is_contiguous for _, one in pieces
        ):
            raise CheckpointError(f"{where}: {name}: a part of it is missing; {_ADVICE}")
        vectors = [_Vector(((path, _flat(one)),)) for path, one in pieces]
        part = -(-prod(shape) // len(models))
        yield SourcePart.whole(
            name, whole.dtype, shape, _cut(vectors, 0, part, prod(shape), f"{where}: {name}")
        )


def _flat(stored: Any) -> Stored:
    return Stored(stored.dtype, (prod(stored.sizes),), (1,), stored.offset)


def _buffers(model: Mapping[str, Any], where: str) -> Iterator[SourcePart]:
    module, names = model.get("module"), model.get("buffer_names")
    if isinstance(module, dict) and isinstance(names, list):
        wanted = set(map(str, names))
        for name, value in module.items():
            if name in wanted:
                yield part_of(name, value, where, where)


def _rest(
    parts: Sequence[SourcePart], model: Mapping[str, Any], where: str
) -> Iterator[SourcePart]:
    """Yield what only the module has. In ZeRO 1 and 2, that is complete parameters, not trained."""
    module, known = model.get("module"), {part.name for part in parts}
    for name, value in module.items() if isinstance(module, dict) else ():
        if name not in known and isinstance(value, Stored):
            yield part_of(name, value, where, where)


def _with_shared(parts: list[SourcePart], model: Mapping[str, Any]) -> list[SourcePart]:
    """Add the tied names of parameters, which share the bytes of another name."""
    shared = model.get("shared_params")
    by_name = {part.name: part for part in parts}
    for name, other in shared.items() if isinstance(shared, dict) else ():
        if other in by_name and name not in by_name:
            found = by_name[other]
            parts.append(SourcePart.whole(str(name), found.dtype, found.shape, found.segments))
    return parts
