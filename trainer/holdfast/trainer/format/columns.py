"""What one rank has to save, as columns of numbers that are small to send and fast to compare.

A row is one box of a tensor (or one number) that the rank holds. Tables of items have the names,
types and whole shapes, and most ranks share them. A rank's rows are cut into blocks by what other
ranks can share with them: whole tensors and numbers that are equal on all ranks; whole tensors
whose copies may differ, such as running means; parts of tensors; and what only one rank has, such
as its random state. A pattern is what blocks of equal-sized parts share: everything except the
places. Blocks, patterns and tables are identified by digest, and each is sent once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.contracts.disk.digests import new_checksum

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt64s = npt.NDArray[np.uint64]

# The kinds of blocks, in file order.
WHOLE: Final = 0
FIRST: Final = 1
PART: Final = 2
OWN: Final = 3
KINDS: Final = (WHOLE, FIRST, PART, OWN)
_ODD_A: Final = np.uint64(0x9E3779B97F4A7C15)
_ODD_B: Final = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT: Final = np.uint64(29)


class Item(NamedTuple):
    """One key of the state. `dtype` is torch's name without `torch.`, None for a number.

    `path` is the key as a tuple, before its parts were joined. `shape` is the whole tensor's.
    """

    key: str
    path: tuple[str | int, ...]
    dtype: str | None
    shape: tuple[int, ...]


class Row(NamedTuple):
    """One box that a rank holds: its offsets in the tensor, its sizes, and its bytes in a file."""

    item: Item
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    entry_bytes: int

    @property
    def is_whole(self) -> bool:
        """True for a number, and for a tensor that is not split."""
        return self.sizes == self.item.shape


@dataclass(frozen=True)
class BlockPattern:
    """What blocks can share: all of their rows except the places of the boxes.

    `kind` is one of KINDS. `table` is the digest of the items' table, and `item` is each row's
    index in it. `form` is each row's index among the forms, the distinct (sizes, entry bytes).
    `form_sizes` has a row for each form; short rows are padded with 1.
    """

    kind: int
    table: bytes
    item: Int32s
    form: Int32s
    form_sizes: Int64s
    form_bytes: Int64s

    def digest(self) -> bytes:
        """Return a digest that is equal on ranks with equal boxes."""
        checksum = new_checksum()
        # The sizes of the columns belong to the digest. Without them, two patterns could have the
        # same bytes cut at other places.
        checksum.update(bytes([self.kind, self.form_sizes.shape[1]]) + self.table)
        for column in (self.item, self.form, self.form_sizes, self.form_bytes):
            checksum.update(np.int64(column.size).tobytes() + column.tobytes())
        return checksum.digest()


@dataclass(frozen=True)
class Block:
    """The rows of one rank that follow one pattern, which is given by its digest.

    `place` is the number of each box's first element in its tensor. `coverage_hash` is the weight
    of each box (see `coverage_hashes`).
    """

    pattern: bytes
    place: Int64s
    coverage_hash: UInt64s

    def digest(self) -> bytes:
        """Return a digest that is equal on ranks with equal rows."""
        checksum = new_checksum()
        checksum.update(self.pattern + self.place.tobytes())
        return checksum.digest()


class Described(NamedTuple):
    """A block, its pattern, and the encoded table of the pattern's items."""

    block: Block
    pattern: BlockPattern
    table: bytes


def encode_table(items: Sequence[Item]) -> bytes:
    """Encode a table of items. Equal items give equal bytes."""
    # Ranks with the same state send this table once, so equal items must give equal bytes, see
    # decision 8.
    return json.dumps(items, separators=(",", ":")).encode()


def decode_table(content: bytes) -> list[Item]:
    return [
        Item(key, tuple(path), dtype, tuple(shape))
        for key, path, dtype, shape in json.loads(content)
    ]


def make_block(kind: int, items: Sequence[Item], rows: Iterable[Row]) -> Described:
    """Return the block of `rows`. Their items are all in `items`, each at most once.

    Raises `ValueError` with the name of a row that exceeds its tensor.
    """
    content = encode_table(items)
    index = {item.key: number for number, item in enumerate(items)}
    forms: dict[tuple[tuple[int, ...], int], int] = {}
    columns: list[tuple[int, int, int]] = []
    boxes: list[Row] = []
    for row in rows:
        shape = row.item.shape
        if len(row.offsets) != len(shape) or any(
            # Checked on the rank that holds the part, so the error names it. Rank 0 sees only
            # numbers.
            o < 0 or s < 0 or o + s > whole
            for o, s, whole in zip(row.offsets, row.sizes, shape, strict=True)
        ):
            raise ValueError(
                f"{row.item.key}: a part of sizes {row.sizes} at {row.offsets} exceeds its tensor "
                f"of shape {shape}"
            )
        form = forms.setdefault((row.sizes, row.entry_bytes), len(forms))
        columns.append((index[row.item.key], linear_place(row.offsets, shape), form))
        boxes.append(row)
    dims = max((len(sizes) for sizes, _ in forms), default=0)
    sizes = [[*sizes, *[1] * (dims - len(sizes))] for sizes, _ in forms]
    item, place, form_of = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    pattern = BlockPattern(
        kind=kind,
        table=_digest(content),
        item=item.astype(np.int32),
        form=form_of.astype(np.int32),
        form_sizes=np.array(sizes, dtype=np.int64).reshape(len(forms), dims),
        form_bytes=np.array([entry for _, entry in forms], dtype=np.int64),
    )
    block = Block(
        pattern=pattern.digest(),
        # The place of the first element is enough: rank 0 finds copies by sorting these numbers,
        # see decision 8.
        place=np.ascontiguousarray(place),
        coverage_hash=coverage_hashes([row.offsets for row in boxes], [row.sizes for row in boxes]),
    )
    return Described(block, pattern, content)


def linear_place(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of a box's first element, counted row by row through its tensor."""
    place = 0
    for offset, size in zip(offsets, shape, strict=True):
        place = place * size + offset
    return place


def coverage_hashes(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> UInt64s:
    """Return a weight for each box. The weights add up to the tensor's only if the boxes tile it.

    Each dimension's coordinates get pseudo-random widths. A box's weight is the product of its
    sides, modulo 2^64. Boxes that overlap or leave a gap have another sum, except by a chance of
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
    # Modulo 2^64 on purpose: sums that wrap around are still equal for the same tiling.
    weights: UInt64s = np.prod(sides, axis=1, dtype=np.uint64)
    return weights


def whole_coverage_hashes(shapes: Sequence[Sequence[int]]) -> UInt64s:
    """Return the total weight that the boxes of a tensor of each shape must have."""
    return coverage_hashes([(0,) * len(shape) for shape in shapes], shapes)


@dataclass(frozen=True)
class Rows:
    """Many blocks in one, as a node sends them. `digests` and `patterns` are by block."""

    digests: tuple[bytes, ...]
    patterns: tuple[bytes, ...]
    place: Int64s
    coverage_hash: UInt64s


@dataclass(frozen=True)
class ShardTable:
    """Blocks of one pattern. `place` and `coverage_hash` have the shape (blocks, rows)."""

    pattern: BlockPattern
    digests: tuple[bytes, ...]
    place: Int64s
    coverage_hash: UInt64s


def pack(blocks: Mapping[bytes, Block]) -> Rows:
    """Concatenate blocks, given by their digests, in the order given."""
    every = list(blocks.values())
    return Rows(
        digests=tuple(blocks),
        patterns=tuple(block.pattern for block in every),
        place=end_to_end([block.place for block in every], np.int64),
        coverage_hash=end_to_end([block.coverage_hash for block in every], np.uint64),
    )


def join(parts: Sequence[Rows], patterns: Mapping[bytes, BlockPattern]) -> list[ShardTable]:
    """Return all blocks of all parts by pattern, in the order of first appearance."""
    lines: dict[bytes, list[tuple[bytes, Int64s, UInt64s]]] = {}
    for part in parts:
        begin = 0
        for digest, name in zip(part.digests, part.patterns, strict=True):
            end = begin + len(patterns[name].item)
            line = (digest, part.place[begin:end], part.coverage_hash[begin:end])
            lines.setdefault(name, []).append(line)
            begin = end
    return [
        ShardTable(
            pattern=patterns[name],
            digests=tuple(digest for digest, _, _ in every),
            place=np.stack([place for _, place, _ in every]),
            coverage_hash=np.stack([coverage_hash for _, _, coverage_hash in every]),
        )
        for name, every in lines.items()
    ]


def end_to_end(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Concatenate the parts to one array of `dtype`, empty if there are none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _scatter(coordinates: UInt64s) -> UInt64s:
    """Return a pseudo-random number per coordinate and column, the same on every machine."""
    columns = np.arange(1, coordinates.shape[1] + 1, dtype=np.uint64) * _ODD_B
    mixed = (coordinates + columns) * _ODD_A
    mixed = (mixed ^ (mixed >> _SHIFT)) * _ODD_B
    scattered: UInt64s = mixed ^ (mixed >> _SHIFT)
    return scattered


def _digest(content: bytes) -> bytes:
    checksum = new_checksum()
    checksum.update(content)
    return checksum.digest()
