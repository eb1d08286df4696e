"""Which bytes of which file go where: the arithmetic of loading, without files and torch.

A saved chunk and a wanted chunk of one tensor overlap in a box. In the file, the box is one or
more stretches of bytes at regular distances, and likewise in the destination: a `CopySeries`. Files
are read in units, which are the blocks of their checksums. A series is clipped to each unit that
it touches. If several ranks of a node want a unit, one of them reads it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

PIECE_BYTES: Final = 4 * 1024 * 1024
NOBODY: Final = -1

Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopySeries:
    """`count` stretches of `length` bytes, from file offset `source` to memory offset `target`.

    Consecutive stretches are `source_stride` bytes apart in the file, `target_stride` in memory.
    """

    source: int
    target: int
    length: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0

    @property
    def bytes(self) -> int:
        return self.length * self.count

    @property
    def end(self) -> int:
        """The first byte of the file after the last stretch."""
        return self.source + (self.count - 1) * self.source_stride + self.length

    def moved(self, by: int) -> CopySeries:
        return CopySeries(
            self.source + by,
            self.target,
            self.length,
            self.count,
            self.source_stride,
            self.target_stride,
        )


@dataclass(frozen=True)
class Unit:
    """A part of a file that is read at once. `digest` is its expected checksum, or None."""

    path: str
    start: int
    size: int
    digest: str | None


@dataclass(frozen=True)
class FileUnits:
    """One file cut into units. The first unit has the number `first`, counted over all files."""

    path: str
    size: int
    first: int
    unit_bytes: int
    digests: tuple[str, ...] | None

    @property
    def count(self) -> int:
        return -(-self.size // self.unit_bytes)

    def unit(self, number: int) -> Unit:
        index = number - self.first
        start = index * self.unit_bytes
        digest = self.digests[index] if self.digests is not None else None
        return Unit(self.path, start, min(self.unit_bytes, self.size - start), digest)


def overlap(saved: Chunk, wanted: Chunk) -> Chunk | None:
    low = tuple(max(a, b) for a, b in zip(saved.offsets, wanted.offsets, strict=True))
    high = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(saved.offsets, saved.sizes, wanted.offsets, wanted.sizes, strict=True)
    )
    sizes = tuple(end - begin for begin, end in zip(low, high, strict=True))
    return None if any(size <= 0 for size in sizes) else Chunk(low, sizes)


def series_between(saved: Chunk, wanted: Chunk, item_bytes: int) -> list[CopySeries]:
    """Return the moves from `saved` in the file, from byte 0, into the memory of `wanted`.

    Both are contiguous with `item_bytes` per element. Empty if they do not overlap.
    """
    box = overlap(saved, wanted)
    if box is None:
        return []
    source, source_strides = _place(box, saved, item_bytes)
    target, target_strides = _place(box, wanted, item_bytes)
    length, dimension = item_bytes, len(box.sizes) - 1
    while dimension >= 0:
        length *= box.sizes[dimension]
        dimension -= 1
        full = box.sizes[dimension + 1]
        if not full == saved.sizes[dimension + 1] == wanted.sizes[dimension + 1]:
            break
    loops = _merge(
        [
            (box.sizes[d], source_strides[d], target_strides[d])
            for d in range(dimension + 1)
            if box.sizes[d] > 1
        ]
    )
    if not loops:
        return [CopySeries(source, target, length)]
    *outer, (count, source_stride, target_stride) = loops
    return [
        CopySeries(
            source + sum(i * s for i, (_, s, _) in zip(at, outer, strict=True)),
            target + sum(i * t for i, (_, _, t) in zip(at, outer, strict=True)),
            length,
            count,
            source_stride,
            target_stride,
        )
        for at in product(*(range(n) for n, _, _ in outer))
    ]


def clip(series: CopySeries, start: int, end: int) -> list[CopySeries]:
    """Return the parts of `series` whose file bytes are in [start, end), cut at any byte."""
    if series.source >= start and series.end <= end:
        return [series]
    first, last, stride = 0, series.count, series.source_stride
    if series.count > 1:
        first = max(0, (start - series.source - series.length) // stride + 1)
        last = min(series.count, -(-(end - series.source) // stride))
    head, tail = [], []
    if first < last and series.source + first * stride < start:
        head, first = [_cut_one(series, first, start, end)], first + 1
    if first < last and series.source + (last - 1) * stride + series.length > end:
        tail, last = [_cut_one(series, last - 1, start, end)], last - 1
    whole = []
    if first < last:
        at, to = series.source + first * stride, series.target + first * series.target_stride
        whole = [CopySeries(at, to, series.length, last - first, stride, series.target_stride)]
    return [part for part in (*head, *whole, *tail) if part.length > 0]


def cut(series: CopySeries, file: FileUnits) -> Iterator[tuple[int, list[CopySeries]]]:
    """Yield (unit number, parts in it) for each unit of `file` that `series` touches."""
    size = file.unit_bytes
    for index in range(series.source // size, (series.end - 1) // size + 1):
        parts = clip(series, index * size, (index + 1) * size)
        if parts:
            yield file.first + index, parts


def pieces(unit: Unit) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of the pieces of a unit, each held in memory at once, in order."""
    for start in range(unit.start, unit.start + unit.size, PIECE_BYTES):
        yield start, min(PIECE_BYTES, unit.start + unit.size - start)


def assign(wanted: Flags, sizes: Counts) -> npt.NDArray[np.int64]:
    """Return the local rank that reads each unit, or `NOBODY` if no rank wants it.

    `wanted[rank, unit]` is True if the rank wants the unit, and `sizes[unit]` is its bytes. A unit
    that one rank wants is read by that rank. Each other unit goes to the rank with the least load.
    """
    readers = wanted.sum(axis=0)
    owner = np.full(wanted.shape[1], NOBODY, dtype=np.int64)
    owner[readers == 1] = wanted[:, readers == 1].argmax(axis=0)
    load = [(int(sizes[owner == rank].sum()), rank) for rank in range(wanted.shape[0])]
    heapq.heapify(load)
    for unit in np.flatnonzero(readers > 1).tolist():
        read_bytes, rank = load[0]
        owner[unit] = rank
        heapq.heapreplace(load, (read_bytes + int(sizes[unit]), rank))
    return owner


def _place(box: Chunk, inside: Chunk, item_bytes: int) -> tuple[int, list[int]]:
    """Return the byte offset of `box` in the memory of `inside`, and that memory's byte strides."""
    strides, stride = [0] * len(inside.sizes), item_bytes
    for dimension in range(len(inside.sizes) - 1, -1, -1):
        strides[dimension] = stride
        stride *= inside.sizes[dimension]
    begin = sum((b - o) * s for b, o, s in zip(box.offsets, inside.offsets, strides, strict=True))
    return begin, strides


def _merge(loops: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring loops if the outer loop continues where the inner loop ends."""
    merged: list[tuple[int, int, int]] = []
    for count, source, target in loops:
        if merged and merged[-1][1:] == (count * source, count * target):
            merged[-1] = (merged[-1][0] * count, source, target)
        else:
            merged.append((count, source, target))
    return merged


def _cut_one(series: CopySeries, index: int, start: int, end: int) -> CopySeries:
    """Return the part of one stretch in [start, end). Its length is negative if there is none."""
    at = series.source + index * series.source_stride
    low, high = max(at, start), min(at + series.length, end)
    return CopySeries(low, series.target + index * series.target_stride + low - at, high - low)
