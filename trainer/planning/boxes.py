"""Boxes that many ranks hold, told apart: copies of one box brought together, those that are
the only one of their kind found without sorting.

A box is known by its tensor and by the number of its first element in it. Ranks mostly come
in the order of their parts, so that the places of one tensor rise from block to block, which one
comparison of neighbours shows for all blocks and tensors at once; only what is left is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from holdfast.trainer.planning.columns import Int32s, Int64s, Item, ShardTable, end_to_end

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Groups:
    """Rows sorted by box: `order` lists rows, `start` and `count` a stretch of it for each box."""

    order: Int64s
    start: Int64s
    count: Int64s

    @property
    def first(self) -> Int64s:
        """A row of each box."""
        return self.order[self.start]

    def rows_of(self, boxes: Int64s) -> tuple[Int64s, Int64s]:
        """All rows of these boxes, and for each its box's place among `boxes`."""
        count = self.count[boxes]
        box = np.repeat(np.arange(len(boxes)), count)
        nth = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
        return self.order[np.repeat(self.start[boxes], count) + nth], box


def first_numbers(items: Sequence[Item]) -> Int64s:
    """The number of each item's first element when those of all are counted end to end."""
    extent = np.array([max(prod(item.shape), 1) for item in items], dtype=np.int64)
    return np.cumsum(extent) - extent


def group(key: Int32s, place: Int64s, items: Sequence[Item]) -> Groups:
    """Bring the copies of each box together, in the order of keys and places.

    By key first, which is cheap; where ranks come in the order of their parts that is all.
    """
    code = first_numbers(items)[key]
    code += place
    small = key.astype(np.uint16) if len(items) < 1 << 16 else key
    order = np.argsort(small, kind="stable")
    code = code[order]
    if np.any(code[1:] < code[:-1]):
        again = np.argsort(code)
        order, code = order[again], code[again]
        repeated = np.flatnonzero(_is_repeated(code))
        # Copies of one box stay in the order of their blocks, whatever the sort did to them.
        decided = np.lexsort((order[repeated], code[repeated]))
        order[repeated] = order[repeated[decided]]
    is_first = np.ones(len(code), dtype=bool)
    np.not_equal(code[1:], code[:-1], out=is_first[1:])
    start = np.flatnonzero(is_first)
    return Groups(order, start, np.diff(start, append=len(code)))


def find_distinct(
    shard_tables: Sequence[ShardTable], keys: Sequence[Int32s], items: Sequence[Item]
) -> Bools:
    """By item: True where its boxes are seen to have a place each, False where some may share one.

    `keys` says for each shard table which item each of its columns is of.
    """
    distinct = np.ones(len(items), dtype=bool)
    if not shard_tables:
        return distinct
    for shard_table, key in zip(shard_tables, keys, strict=True):
        rises = np.logical_and.reduce(shard_table.place[1:] > shard_table.place[:-1], axis=0)
        distinct[key[~rises]] = False
    key = np.concatenate(keys)
    base = first_numbers(items)[key]
    low = base + np.concatenate([shard_table.place[0] for shard_table in shard_tables])
    high = base + np.concatenate([shard_table.place[-1] for shard_table in shard_tables])
    order = np.argsort(low)
    earlier, later = order[:-1], order[1:]
    # The shard tables' stretches of one item's places must lie apart.
    meet = (key[earlier] == key[later]) & (high[earlier] >= low[later])
    distinct[key[earlier[meet]]] = False
    return distinct


@dataclass(frozen=True)
class Loose:
    """The rows that are not decided by where they stand, of all shard tables, in their order.

    `at` has for each shard table where its rows are, counted line by line; the columns are of all.
    """

    at: tuple[Int64s, ...]
    block: Int32s
    key: Int32s
    place: Int64s
    coverage_hash: npt.NDArray[np.uint64]
    weight: Int64s


def pick_loose(
    shard_tables: Sequence[ShardTable],
    keys: Sequence[Int32s],
    weights: Sequence[Int64s],
    is_loose: Sequence[Bools],
) -> Loose:
    """The rows of which `is_loose`, shape (blocks, rows) for each shard table, is true.

    `keys` and `weights` are by column; blocks are numbered through all shard tables.
    """
    at = tuple(np.flatnonzero(loose) for loose in is_loose)
    blocks, columns, first = [], [], 0
    for shard_table, rows in zip(shard_tables, at, strict=True):
        line, column = np.divmod(rows, max(shard_table.place.shape[1], 1))
        blocks.append((first + line).astype(np.int32))
        columns.append(column)
        first += len(shard_table.digests)
    return Loose(
        at=at,
        block=end_to_end(blocks, np.int32),
        key=end_to_end([key[c] for key, c in zip(keys, columns, strict=True)], np.int32),
        place=end_to_end(
            [s.place.ravel()[rows] for s, rows in zip(shard_tables, at, strict=True)], np.int64
        ),
        coverage_hash=end_to_end(
            [s.coverage_hash.ravel()[rows] for s, rows in zip(shard_tables, at, strict=True)],
            np.uint64,
        ),
        weight=end_to_end([w[c] for w, c in zip(weights, columns, strict=True)], np.int64),
    )


def _is_repeated(code: Int64s) -> Bools:
    same = code[1:] == code[:-1]
    repeated = np.zeros(len(code), dtype=bool)
    repeated[1:] |= same
    repeated[:-1] |= same
    return repeated
