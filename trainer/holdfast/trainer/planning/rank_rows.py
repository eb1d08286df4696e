"""What one rank has to save, read from its live state: rows for the plan, entries for its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import SaveError
from holdfast.trainer.format import columns
from holdfast.trainer.format.saved_boxes import find_odd_stride
from holdfast.trainer.planning import layout
from holdfast.trainer.planning.compare_keys import is_of_one_rank
from holdfast.trainer.planning.signature import Signature, flatten, room_of

# Later values of a number may need this many bytes more than the first one.
NUMBER_ROOM_BYTES: Final = 192

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


@dataclass(frozen=True)
class RankRows:
    """One rank's blocks by digest, their patterns and tables, and its file's possible entries.

    `entries` has one tuple for each of the KINDS, in the order of the rows.
    """

    blocks: Mapping[bytes, columns.Block]
    patterns: Mapping[bytes, columns.BlockPattern]
    tables: Mapping[bytes, bytes]
    entries: tuple[tuple[layout.TensorEntry | layout.NumberEntry, ...], ...]
    signature: Signature


def describe_rank(state: Mapping[str, Any]) -> RankRows:
    """Read `state`. Raises `SaveError` with the name of a value that cannot be saved."""
    flat = flatten(state)
    paths = flatten_state_dict(dict(state))[1]
    reader = _Reader()
    found = []
    for key, value in flat.items():
        item = _item(key, paths[key], value)
        held = reader.read(item, value)
        found.append((item, held, _kind_of(item, held, value)))
    blocks, patterns, tables = {}, {}, {}
    entries: list[tuple[layout.TensorEntry | layout.NumberEntry, ...]] = []
    for kind in columns.KINDS:
        ours = [(item, held) for item, held, its_kind in found if its_kind == kind]
        rows = [held for _, held in ours if held is not None]
        entries.append(tuple(entry for _, entry in rows))
        if ours:
            made = columns.make_block(kind, [item for item, _ in ours], [row for row, _ in rows])
            blocks[made.block.digest()] = made.block
            patterns[made.block.pattern] = made.pattern
            tables[made.pattern.table] = made.table
    return RankRows(blocks, patterns, tables, tuple(entries), Signature(flat))


def _kind_of(
    item: columns.Item,
    held: tuple[columns.Row, layout.TensorEntry | layout.NumberEntry] | None,
    value: Any,
) -> int:
    # Such keys have one holder, and their values differ by rank.
    if is_of_one_rank(item.key):
        return columns.OWN
    # Buffers such as running means may differ between replicas. All of them come from one rank, so
    # that they belong together.
    if isinstance(value, torch.nn.Buffer) and held is not None and held[0].is_whole:
        return columns.FIRST
    return columns.WHOLE if held is not None and held[0].is_whole else columns.PART


def check_form(key: str, value: torch.Tensor) -> None:
    """Raise `SaveError` for a tensor whose bytes are not its values in order."""
    refuse_marked_shard(key, value)
    part = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(part, ShardedTensor):
        return
    if problem := problem_with_form(part):
        raise SaveError(
            f"{key}: it is {problem}, and a checkpoint cannot store it exactly; expected a dense "
            "tensor with memory. Train with plain tensors, or keep this one out of the model and "
            "the optimizer and give Session(extra={…}) an object whose state_dict returns it as "
            "dense tensors"
        )


def problem_with_form(part: torch.Tensor) -> str:
    """Return why the bytes of a tensor are not its values in order, or an empty text."""
    if layout.is_wrapper(part):
        inner = layout.inner_names(part)
        held = f"with inner tensors {inner}" if inner else "that has its values in other tensors"
        return f"a {type(part).__name__} {held}"
    if part.is_meta:
        return "on the meta device, without bytes"
    if part.layout is not torch.strided:
        return f"of layout {part.layout}"
    if part.is_quantized:
        return f"quantized, of type {part.dtype}"
    return (
        ""
        if layout.has_form(part.dtype)
        else f"of type {part.dtype}, which torch.save cannot write"
    )


class _Reader:
    """Reads values one by one, and caches what many of them share."""

    def __init__(self) -> None:
        self._templates: dict[tuple[torch.Size, torch.dtype], layout.TensorTemplate] = {}
        self._boxes: dict[Any, Box] = {}
        self._lengths: dict[str, int] = {}

    def read(
        self, item: columns.Item, value: Any
    ) -> tuple[columns.Row, layout.TensorEntry | layout.NumberEntry] | None:
        """Return the row and the entry of one value, None if this rank has no part of it."""
        if item.dtype is None:
            length = self._number_bytes(value)
            return columns.Row(item, (), (), length), layout.NumberEntry(item.key, length)
        check_form(item.key, value)
        # An empty tensor has no separate parts: every rank has all of it, and one rank writes it.
        box = ((0,) * len(item.shape), item.shape)
        if 0 not in item.shape:
            held = self._box(item.key, value)
            if held is None or 0 in held[1]:
                return None
            box = held
        offsets, sizes = box
        template = self._template(torch.Size(sizes), value.dtype)
        entry = layout.TensorEntry(item.key, torch.Size(sizes), value.dtype, template)
        return columns.Row(item, offsets, sizes, template.length), entry

    def _number_bytes(self, value: Any) -> int:
        text = repr(value)
        if text not in self._lengths:
            room = NUMBER_ROOM_BYTES + room_of(value)
            self._lengths[text] = len(layout.encode_number(value)) + room
        return self._lengths[text]

    def _template(self, shape: torch.Size, dtype: torch.dtype) -> layout.TensorTemplate:
        if (shape, dtype) not in self._templates:
            self._templates[shape, dtype] = layout.make_template(shape, dtype)
        return self._templates[shape, dtype]

    def _box(self, key: str, value: torch.Tensor) -> Box | None:
        if isinstance(value, DTensor):
            return self._dtensor_box(key, value)
        if isinstance(value, ShardedTensor):
            return _sharded_box(key, value)
        return (0,) * value.dim(), tuple(value.shape)

    def _dtensor_box(self, key: str, value: DTensor) -> Box | None:
        mesh = value.device_mesh
        if mesh.get_coordinate() is None:
            return None
        known = (mesh, value.placements, value.shape)
        if known not in self._boxes:
            self._boxes[known] = _placed_box(key, value)
        # The placements are the same for many tensors, so each box is computed once.
        box = self._boxes[known]
        local = tuple(value.to_local().shape)
        # Padding or an uneven split by hand: a box of the wrong size would overlap a neighbour's.
        if local != box[1]:
            raise SaveError(
                f"{key}: this rank's part has shape {local}, but its placements "
                f"{value.placements} give {box[1]}. Create the DTensor with `distribute_tensor`"
            )
        return box


def _placed_box(key: str, value: DTensor) -> Box:
    """Return the box that the placements give this rank."""
    if (problem := find_odd_stride(value)) is not None:
        raise SaveError(f"{key}: {problem}")
    try:
        (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise SaveError(
            f"{key}: a DTensor with placements {value.placements} cannot be saved: "
            f"{error}. Reduce or redistribute it first"
        ) from error
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _sharded_box(key: str, value: ShardedTensor) -> Box | None:
    shards = value.local_shards()
    if len(shards) > 1:
        raise SaveError(
            f"{key}: a ShardedTensor with {len(shards)} shards on one rank cannot be saved. "
            "Use DTensor, as fully_shard does, or give FSDP a device mesh"
        )
    if not shards:
        return None
    place = shards[0].metadata
    return tuple(place.shard_offsets), tuple(place.shard_sizes)


def _item(key: str, path: tuple[str | int, ...], value: Any) -> columns.Item:
    if not isinstance(value, torch.Tensor):
        return columns.Item(key, path, None, ())
    dtype = str(value.dtype).removeprefix("torch.")
    return columns.Item(key, path, dtype, tuple(value.size()))


# Tensors that attributes mark as shards of a larger tensor: torch's `CheckpointableTensor`.

_ATTRIBUTES: Final = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_marked_shard(value: Any) -> bool:
    """Return True for a tensor that its attributes mark as shards of a larger one.

    This is the test of torch 2.14. DCP does not apply it to a DTensor or a ShardedTensor.
    """
    return (
        # By attributes, as torch 2.14 does it: older versions have no such class.
        all(hasattr(value, name) for name in _ATTRIBUTES)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor | ShardedTensor)
    )


def refuse_marked_shard(key: str, value: torch.Tensor) -> None:
    """Raise `SaveError` for such a tensor. Otherwise each rank's shard would count as the whole."""
    if is_marked_shard(value):
        shape = tuple(getattr(value, _ATTRIBUTES[0]))
        raise SaveError(
            f"{key}: its attributes {', '.join(_ATTRIBUTES)} mark it as shards of a tensor of "
            f"shape {shape}, which cannot be saved as such; expected a DTensor. Make it one with "
            "DTensor.from_local, or save it with holdfast.trainer.dcp on torch 2.14 or newer"
        )
