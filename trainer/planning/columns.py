"""What one rank has to save, as columns of numbers: small to send, fast to sort by the million.

A row is one box of a tensor (or one number) that the rank holds. Names, types and whole shapes
are in tables of items, which most ranks have in common; rows that only one rank has (its random
state) are a block of their own, so that the block of the others is the same, bit for bit, on
ranks that hold the same. Blocks and tables are known by digest: each travels once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.contracts.digests import new_checksum

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt64s = npt.NDArray[np.uint64]

SHARED: Final = 0
OWN: Final = 1
_ODD_A: Final = np.uint64(0x9E3779B97F4A7C15)
_ODD_B: Final = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT: Final = np.uint64(29)


class Item(NamedTuple):
    """One key of the state. `dtype` is torch's name without `torch.`, None for a number.

    `path` is the key before its parts were joined, `shape` the whole tensor's.
    """

    key: str
    path: tuple[str | int, ...]
    dtype: str | None
    shape: tuple[int, ...]


class Row(NamedTuple):
    """One box that a rank holds: where it begins in the tensor, its sizes, its bytes in a file."""

    item: Item
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    entry_bytes: int


@dataclass(frozen=True)
class Block:
    """Rows as columns; `kind` is SHARED or OWN, `table` the digest of the items' table.

    `item` is each row's place in the table, `place` the number of the box's first element in its
    tensor, `mass` the box's weight (see `masses`), `form` each row's place among the forms. Forms
    are the different (sizes, entry bytes): `form_sizes` has a row each, short ones padded by 1.
    """

    kind: int
    table: bytes
    item: Int32s
    place: Int64s
    mass: UInt64s
    form: Int32s
    form_sizes: Int64s
    form_bytes: Int64s

    def digest(self) -> bytes:
        """The same on ranks whose rows are the same."""
        checksum = new_checksum()
        checksum.update(bytes([self.kind, self.form_sizes.shape[1]]) + self.table)
        for column in (self.item, self.place, self.form, self.form_sizes, self.form_bytes):
            checksum.update(np.int64(column.size).tobytes() + column.tobytes())
        return checksum.digest()


def encode_table(items: Sequence[Item]) -> bytes:
    """A table of items as bytes, the same for the same items."""
    return json.dumps(items, separators=(",", ":")).encode()


def decode_table(content: bytes) -> list[Item]:
    """The items that `encode_table` was given."""
    return [
        Item(key, tuple(path), dtype, tuple(shape))
        for key, path, dtype, shape in json.loads(content)
    ]


def make_block(kind: int, items: Sequence[Item], rows: Iterable[Row]) -> tuple[Block, bytes]:
    """The block of `rows`, whose items are all in `items`, and the encoded table of these.

    Raises `ValueError` naming a row that reaches beyond its tensor.
    """
    content = encode_table(items)
    index = {item.key: number for number, item in enumerate(items)}
    forms: dict[tuple[tuple[int, ...], int], int] = {}
    columns: list[tuple[int, int, int]] = []
    boxes: list[Row] = []
    for row in rows:
        shape = row.item.shape
        if len(row.offsets) != len(shape) or any(
            o < 0 or s < 0 or o + s > whole
            for o, s, whole in zip(row.offsets, row.sizes, shape, strict=True)
        ):
            raise ValueError(
                f"{row.item.key}: a part of sizes {row.sizes} at {row.offsets} reaches beyond "
                f"its tensor of {shape}"
            )
        form = forms.setdefault((row.sizes, row.entry_bytes), len(forms))
        columns.append((index[row.item.key], linear_place(row.offsets, shape), form))
        boxes.append(row)
    dims = max((len(sizes) for sizes, _ in forms), default=0)
    sizes = [[*sizes, *[1] * (dims - len(sizes))] for sizes, _ in forms]
    item, place, form_of = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    block = Block(
        kind=kind,
        table=_digest(content),
        item=item.astype(np.int32),
        place=np.ascontiguousarray(place),
        mass=masses([row.offsets for row in boxes], [row.sizes for row in boxes]),
        form=form_of.astype(np.int32),
        form_sizes=np.array(sizes, dtype=np.int64).reshape(len(forms), dims),
        form_bytes=np.array([entry for _, entry in forms], dtype=np.int64),
    )
    return block, content


def linear_place(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The number of a box's first element, counted row by row through its tensor."""
    place = 0
    for offset, size in zip(offsets, shape, strict=True):
        place = place * size + offset
    return place


def masses(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> UInt64s:
    """A weight for each box, such that boxes tile a tensor exactly when their weights add up to it.

    Each dimension's coordinates get pseudo-random widths; a box weighs the product of its sides,
    modulo 2^64. Boxes that overlap, or leave a gap, add up to another weight but for a chance of
    about one in 2^60.
    """
    dims = max((len(box) for box in offsets), default=0)
    lows = np.zeros((len(offsets), dims), dtype=np.uint64)
    highs = np.zeros((len(offsets), dims), dtype=np.uint64)
    present = np.zeros((len(offsets), dims), dtype=bool)
    for number, (low, size) in enumerate(zip(offsets, sizes, strict=True)):
        lows[number, : len(low)] = low
        highs[number, : len(low)] = [a + b for a, b in zip(low, size, strict=True)]
        present[number, : len(low)] = True
    sides = _scatter(highs) - _scatter(lows)
    sides[~present] = 1
    weights: UInt64s = np.prod(sides, axis=1, dtype=np.uint64)
    return weights


def whole_masses(shapes: Sequence[Sequence[int]]) -> UInt64s:
    """What the boxes of a tensor of each shape must weigh together."""
    return masses([(0,) * len(shape) for shape in shapes], shapes)


@dataclass(frozen=True)
class Rows:
    """Many blocks end to end, as a node sends them and rank 0 joins them.

    `digests`, `kinds`, `tables`, `row_counts` and `form_counts` are by block.
    """

    digests: tuple[bytes, ...]
    kinds: npt.NDArray[np.int8]
    tables: tuple[bytes, ...]
    row_counts: Int64s
    form_counts: Int64s
    item: Int32s
    place: Int64s
    mass: UInt64s
    form: Int32s
    form_sizes: Int64s
    form_bytes: Int64s


def pack(blocks: Mapping[bytes, Block]) -> Rows:
    """Blocks by their digests, end to end in the order given."""
    every = list(blocks.values())
    return Rows(
        digests=tuple(blocks),
        kinds=np.array([b.kind for b in every], dtype=np.int8),
        tables=tuple(b.table for b in every),
        row_counts=np.array([len(b.item) for b in every], dtype=np.int64),
        form_counts=np.array([len(b.form_bytes) for b in every], dtype=np.int64),
        item=_end_to_end([b.item for b in every], np.int32),
        place=_end_to_end([b.place for b in every], np.int64),
        mass=_end_to_end([b.mass for b in every], np.uint64),
        form=_end_to_end([b.form for b in every], np.int32),
        form_sizes=_stack([b.form_sizes for b in every]),
        form_bytes=_end_to_end([b.form_bytes for b in every], np.int64),
    )


def join(parts: Sequence[Rows]) -> Rows:
    """All blocks of all parts, in order."""
    return Rows(
        digests=tuple(digest for part in parts for digest in part.digests),
        kinds=_end_to_end([part.kinds for part in parts], np.int8),
        tables=tuple(table for part in parts for table in part.tables),
        row_counts=_end_to_end([part.row_counts for part in parts], np.int64),
        form_counts=_end_to_end([part.form_counts for part in parts], np.int64),
        item=_end_to_end([part.item for part in parts], np.int32),
        place=_end_to_end([part.place for part in parts], np.int64),
        mass=_end_to_end([part.mass for part in parts], np.uint64),
        form=_end_to_end([part.form for part in parts], np.int32),
        form_sizes=_stack([part.form_sizes for part in parts]),
        form_bytes=_end_to_end([part.form_bytes for part in parts], np.int64),
    )


def _end_to_end(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _stack(parts: Sequence[Int64s]) -> Int64s:
    """Tables of sizes one under another, narrow ones padded by 1."""
    dims = max((part.shape[1] for part in parts), default=0)
    stacked = np.ones((sum(len(part) for part in parts), dims), dtype=np.int64)
    at = 0
    for part in parts:
        stacked[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return stacked


def _scatter(coordinates: UInt64s) -> UInt64s:
    """A pseudo-random number for each coordinate and column, the same everywhere and always."""
    columns = np.arange(1, coordinates.shape[1] + 1, dtype=np.uint64) * _ODD_B
    mixed = (coordinates + columns) * _ODD_A
    mixed = (mixed ^ (mixed >> _SHIFT)) * _ODD_B
    scattered: UInt64s = mixed ^ (mixed >> _SHIFT)
    return scattered


def _digest(content: bytes) -> bytes:
    checksum = new_checksum()
    checksum.update(content)
    return checksum.digest()
