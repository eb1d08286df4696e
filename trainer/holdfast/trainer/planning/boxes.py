"""Find the boxes that several ranks hold: group the copies of each box.

A box is identified by its tensor and the number of its first element. Ranks usually come in the
order of their parts, so the places of one tensor rise from block to block. One comparison of
neighbours shows this for all blocks and tensors together. Only the remaining rows are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from holdfast.trainer.format.columns import Int32s, Int64s, Item, ShardTable, end_to_end

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Groups:
    """Rows sorted by box. `order` lists rows; `start` and `count` give each box's range in it."""

    order: Int64s
    start: Int64s
    count: Int64s

    @property
    def first(self) -> Int64s:
        """One row of each box."""
        return self.order[self.start]

    def rows_of(self, boxes: Int64s) -> tuple[Int64s, Int64s]:
        """Return all rows of these boxes, and for each row the index of its box in `boxes`."""
        count = self.count[boxes]
        box = np.repeat(np.arange(len(boxes)), count)
        nth = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
        return self.order[np.repeat(self.start[boxes], count) + nth], box


def first_numbers(items: Sequence[Item]) -> Int64s:
    """Return the number of each item's first element, counted through all items in order."""
    extent = np.array([max(prod(item.shape), 1) for item in items], dtype=np.int64)
    return np.cumsum(extent) - extent


def group(key: Int32s, place: Int64s, items: Sequence[Item]) -> Groups:
    """Group the copies of each box, in the order of keys and places.

    It sorts by key first, which is cheap. If ranks come in the order of their parts, that suffices.
    """
    code = first_numbers(items)[key]
    code += place
    small = key.astype(np.uint16) if len(items) < 1 << 16 else key
    # Places need eight bytes, but keys usually fit into two, for which numpy's stable sort is a
    # radix sort.
    order = np.argsort(small, kind="stable")
    code = code[order]
    if np.any(code[1:] < code[:-1]):
        again = np.argsort(code)
        order, code = order[again], code[again]
        repeated = np.flatnonzero(_is_repeated(code))
        # Keep the copies of one box in the order of their blocks. The sort above is not stable.
        decided = np.lexsort((order[repeated], code[repeated]))
        order[repeated] = order[repeated[decided]]
    is_first = np.ones(len(code), dtype=bool)
    np.not_equal(code[1:], code[:-1], out=is_first[1:])
    start = np.flatnonzero(is_first)
    return Groups(order, start, np.diff(start, append=len(code)))


def find_distinct(
    shard_tables: Sequence[ShardTable], keys: Sequence[Int32s], items: Sequence[Item]
) -> Bools:
    """Return, by item, True if all its boxes have different places, False if some may share one.

    `keys` gives for each shard table the item of each of its columns.
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
    # The ranges of one item's places in different shard tables must not overlap.
    meet = (key[earlier] == key[later]) & (high[earlier] >= low[later])
    distinct[key[earlier[meet]]] = False
    return distinct


@dataclass(frozen=True)
class Loose:
    """The rows that may have several holders, of all shard tables, in their order.

    `at` has the flat indices of each table's rows. The other columns cover all tables.
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
    """Return the rows for which `is_loose`, of shape (blocks, rows) per shard table, is true.

    `keys` and `weights` are by column. Blocks are numbered through all shard tables.
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
