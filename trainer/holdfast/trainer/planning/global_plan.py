"""Plan which rank writes what, for all ranks together: rank 0's part of planning.

Exactly one of several equal boxes is written. Most boxes have one holder, which writes them. A box
with several holders goes to the one with the least to write. If its copies may differ, the lowest
rank writes it. All work is comparing and adding columns: Python loops run over keys, ranks and sets
of holders, never over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.contracts.errors import SaveError
from holdfast.trainer.format.columns import (
    FIRST,
    KINDS,
    Int32s,
    Int64s,
    Item,
    ShardTable,
    UInt64s,
    decode_table,
    end_to_end,
    whole_coverage_hashes,
)

# Find the boxes that several ranks hold: group the copies of each box.
#
# A box is identified by its tensor and the number of its first element. Ranks usually come in the
# order of their parts, so the places of one tensor rise from block to block. One comparison of
# neighbours shows this for all blocks and tensors together. Only the remaining rows are sorted.


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


# Chooses the writer of a box that several ranks hold: the rank with the least to write so far.
#
# This spreads replicated state evenly. Boxes that the same ranks hold are handled together,
# heaviest first. Python loops run over sets of holders and over the boxes of the largest set.

NOBODY: Final = -1
_MIX: Final = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Holders:
    """The ranks that hold each block: `rank[start[b] : start[b] + count[b]]`, ascending."""

    rank: Int64s
    start: Int64s
    count: Int64s

    @classmethod
    def of(cls, digests: Sequence[bytes], holdings: Sequence[Sequence[bytes]]) -> Holders:
        """`holdings` has the digests of each rank's blocks, by rank."""
        number = {digest: n for n, digest in enumerate(digests)}
        blocks = np.array([number[d] for held in holdings for d in held], dtype=np.int64)
        ranks = np.repeat(np.arange(len(holdings)), [len(held) for held in holdings])
        count = np.bincount(blocks, minlength=len(digests))
        order = np.argsort(blocks, kind="stable")
        return cls(ranks[order], np.cumsum(count) - count, count)

    @property
    def first(self) -> Int32s:
        return self.rank[self.start].astype(np.int32)

    def of_block(self, block: int) -> Int64s:
        return self.rank[self.start[block] : self.start[block] + self.count[block]]


def choose_writers(
    loose: Loose, groups: Groups, holders: Holders, loads: Int64s, by_first: Bools
) -> Int32s:
    """Return the rank that writes each row, `NOBODY` for a copy that another rank writes.

    The lowest rank that has them writes the boxes of the keys `by_first`. If copies differ, all of
    them then come from one rank. `loads` has the bytes that each rank already writes, and is
    increased by what each rank gets here.
    """
    first = groups.first
    writer = holders.first[loose.block]
    is_shared = (groups.count > 1) | (holders.count[loose.block[first]] > 1)
    is_first = by_first[loose.key[first]]
    _give_to_first(np.flatnonzero(is_shared & is_first), groups, writer)
    shared = np.flatnonzero(is_shared & ~is_first)
    copies, _ = groups.rows_of(shared)
    writer[copies] = NOBODY
    alone = np.flatnonzero(writer >= 0)
    np.add.at(loads, writer[alone], loose.weight[alone])
    for batch in _batches(_holder_sets(shared, groups, loose.block, holders)):
        _share_out(batch, groups, loose.weight, loads, writer)
    return writer


def _give_to_first(boxes: Int64s, groups: Groups, writer: Int32s) -> None:
    """Keep only the lowest rank of each box in `writer`, which has the lowest of each block."""
    copies, box = groups.rows_of(boxes)
    order = np.lexsort((writer[copies], box))
    is_other = np.diff(box[order], prepend=-1) == 0
    writer[copies[order[is_other]]] = NOBODY


@dataclass(frozen=True)
class _HolderSet:
    """Boxes that the same ranks hold. `nth` is the index of each member's copy of a box."""

    members: Int64s
    nth: Int64s
    boxes: Int64s


def _holder_sets(
    shared: Int64s, groups: Groups, block: Int32s, holders: Holders
) -> list[_HolderSet]:
    """Group the boxes with several holders by their blocks, sets with fewest members first."""
    if not len(shared):
        return []
    blocks = np.arange(len(holders.count), dtype=np.uint64)
    label = (blocks + np.uint64(1)) * _MIX
    label = (label ^ (label >> np.uint64(31))) * _MIX
    copies, box = groups.rows_of(shared)
    labels = np.add.reduceat(label[block[copies]], np.flatnonzero(np.diff(box, prepend=-1)))
    _, first, which = np.unique(labels, return_index=True, return_inverse=True)
    by_set = np.argsort(which, kind="stable")
    ends = np.cumsum(np.bincount(which))
    sets = []
    for number, boxes in enumerate(np.split(shared[by_set], ends[:-1])):
        sample = shared[first[number]]
        at = slice(groups.start[sample], groups.start[sample] + groups.count[sample])
        held = block[groups.order[at]]
        members = np.concatenate([holders.of_block(b) for b in held])
        nth = np.repeat(np.arange(len(held)), holders.count[held])
        sets.append(_HolderSet(members, nth, boxes))
    return sorted(sets, key=lambda one: (len(one.members), int(one.members.min())))


def _batches(sets: Sequence[_HolderSet]) -> list[list[_HolderSet]]:
    """Group sets to handle together: equal sizes, similar numbers of boxes, no common member."""
    turn: dict[int, int] = {}
    batches: dict[tuple[int, int, int], list[_HolderSet]] = {}
    for one in sets:
        members = one.members.tolist()
        now = max(turn.get(rank, 0) for rank in members)
        turn.update(dict.fromkeys(members, now + 1))
        batches.setdefault((len(members), now, len(one.boxes).bit_length()), []).append(one)
    return [batches[size] for size in sorted(batches)]


def _share_out(
    sets: Sequence[_HolderSet], groups: Groups, weight: Int64s, loads: Int64s, writer: Int32s
) -> None:
    """Give each box, heaviest first, to the member of its set with the least to write so far."""
    first = groups.first
    most = max(len(one.boxes) for one in sets)
    boxes = np.full((len(sets), most), -1, dtype=np.int64)
    for number, one in enumerate(sets):
        # Heaviest first, as in any greedy balance: a heavy box at the end could not be evened out.
        heaviest_first = np.argsort(-weight[first[one.boxes]], kind="stable")
        boxes[number, : len(one.boxes)] = one.boxes[heaviest_first]
    members = np.stack([one.members for one in sets])
    nth = np.stack([one.nth for one in sets])
    load = loads[members]
    every = np.arange(len(sets))
    for column in boxes.T:
        has_box = column >= 0
        index, box = every[has_box], column[has_box]
        least = np.argmin(load[index], axis=1)
        row = groups.order[groups.start[box] + nth[index, least]]
        writer[row] = members[index, least]
        load[index, least] += weight[row]
    loads[members] = load


ALIGNMENT: Final = 64
_KEYS_SHOWN: Final = 5

Kept = tuple[Int32s, ...]
"""Rows that a rank writes, in file order: those of its block of each of the KINDS."""


@dataclass(frozen=True)
class GlobalPlan:
    """Which rank writes which row. A row is a column of a line of a shard table.

    `keys` gives for each shard table the index in `items` of each column. `writers` gives for each
    row, in shape (blocks, rows), the rank that writes it, `NOBODY` for none. `held` gives each
    rank's blocks as (shard_table, line), and `kept` the rows of them that it writes, by kind.
    """

    items: tuple[Item, ...]
    shard_tables: tuple[ShardTable, ...]
    keys: tuple[Int32s, ...]
    writers: tuple[Int32s, ...]
    held: tuple[tuple[tuple[int, int], ...], ...]
    kept: tuple[Kept, ...]
    file_bytes: Int64s


def plan_all(
    shard_tables: Sequence[ShardTable],
    tables: Mapping[bytes, bytes],
    holdings: Sequence[Sequence[bytes]],
) -> GlobalPlan:
    """Plan for all ranks. `holdings` has the digests of each rank's blocks, by rank.

    Raises `SaveError` if ranks disagree about a key, or if their parts do not tile a tensor.
    """
    items, keys = _number_keys(shard_tables, tables)
    weights = [
        align(shard_table.pattern.form_bytes)[shard_table.pattern.form]
        for shard_table in shard_tables
    ]
    holders = Holders.of(
        [digest for shard_table in shard_tables for digest in shard_table.digests], holdings
    )
    distinct = find_distinct(shard_tables, keys, items)
    # Only these rows need sorting. Where all places rise, one comparison has shown that no two
    # ranks hold the same box.
    is_loose = _find_loose(shard_tables, keys, distinct, holders)
    loose = pick_loose(shard_tables, keys, weights, is_loose)
    groups = group(loose.key, loose.place, items)
    _check_tiling(shard_tables, keys, items, distinct, loose, groups)
    loads = np.zeros(len(holdings), dtype=np.int64)
    writers = _holders_write(shard_tables, weights, distinct, keys, holders, loads)
    by_first = np.zeros(len(items), dtype=bool)
    for shard_table, key in zip(shard_tables, keys, strict=True):
        by_first[key] |= shard_table.pattern.kind == FIRST
    chosen, begin = choose_writers(loose, groups, holders, loads, by_first), 0
    for writer, rows in zip(writers, loose.at, strict=True):
        writer.ravel()[rows] = chosen[begin : begin + len(rows)]
        begin += len(rows)
    held = _locate(shard_tables, holdings)
    kept, file_bytes = _keep(shard_tables, weights, writers, held)
    return GlobalPlan(
        items, tuple(shard_tables), tuple(keys), tuple(writers), held, kept, file_bytes
    )


def align(lengths: Int64s) -> Int64s:
    """Round lengths up to the alignment of entries."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def offsets_of(lengths: Int64s) -> Int64s:
    """Return the aligned offset at which each entry of these lengths begins in a file."""
    aligned = align(lengths)
    return np.cumsum(aligned) - aligned


def _number_keys(
    shard_tables: Sequence[ShardTable], tables: Mapping[bytes, bytes]
) -> tuple[tuple[Item, ...], list[Int32s]]:
    """Return one list of items for all tables, and each shard table's column indices in it."""
    items: dict[str, Item] = {}
    number: dict[str, int] = {}
    numbers: dict[bytes, Int32s] = {}
    for digest in dict.fromkeys(one.pattern.table for one in shard_tables):
        found = []
        for item in decode_table(tables[digest]):
            known = items.setdefault(item.key, item)
            if known != item:
                raise SaveError(
                    f"{item.key}: one rank has {_describe(known)}, another {_describe(item)}. "
                    "Every rank must save the same tensor under one name"
                )
            found.append(number.setdefault(item.key, len(number)))
        numbers[digest] = np.array(found, dtype=np.int32)
    keys = [numbers[one.pattern.table][one.pattern.item] for one in shard_tables]
    return tuple(items.values()), keys


def _find_loose(
    shard_tables: Sequence[ShardTable], keys: Sequence[Int32s], distinct: Bools, holders: Holders
) -> list[Bools]:
    """Return for each shard table the rows that two blocks or two ranks may hold."""
    found, first = [], 0
    for shard_table, key in zip(shard_tables, keys, strict=True):
        end = first + len(shard_table.digests)
        has_many = holders.count[first:end] > 1
        found.append(has_many[:, None] | ~distinct[key][None, :])
        first = end
    return found


def _check_tiling(
    shard_tables: Sequence[ShardTable],
    keys: Sequence[Int32s],
    items: Sequence[Item],
    distinct: Bools,
    loose: Loose,
    groups: Groups,
) -> None:
    """Raise `SaveError` unless the boxes of every tensor cover it exactly once."""
    total: UInt64s = np.zeros(len(items), dtype=np.uint64)
    for shard_table, key in zip(shard_tables, keys, strict=True):
        decided = np.flatnonzero(distinct[key])
        total[key[decided]] += np.add.reduce(shard_table.coverage_hash, axis=0)[decided]
    first = groups.first
    sorted_out = first[~distinct[loose.key[first]]]
    np.add.at(total, loose.key[sorted_out], loose.coverage_hash[sorted_out])
    wrong = total != whole_coverage_hashes([item.shape for item in items])
    repeated = np.flatnonzero(groups.count > 1)
    copies, box = groups.rows_of(repeated)
    unequal = loose.coverage_hash[copies] != loose.coverage_hash[first[repeated]][box]
    # Copies must have the same box. A sum over one of them would hide a copy of another size.
    wrong[loose.key[copies[unequal]]] = True
    if not wrong.any():
        return
    names = [items[number].key for number in np.flatnonzero(wrong).tolist()]
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    raise SaveError(
        f"{', '.join(names[:_KEYS_SHOWN])}{more}: the ranks' parts do not cover the tensor "
        "exactly once. Save shards that neither overlap nor leave a gap, or the same whole "
        "tensor on every rank that has it"
    )


def _holders_write(
    shard_tables: Sequence[ShardTable],
    weights: Sequence[Int64s],
    distinct: Bools,
    keys: Sequence[Int32s],
    holders: Holders,
    loads: Int64s,
) -> list[Int32s]:
    """Give every row to its first holder. Add the bytes of rows with one holder to `loads`."""
    writers, first = [], 0
    for shard_table, weight, key in zip(shard_tables, weights, keys, strict=True):
        end = first + len(shard_table.digests)
        holder = holders.first[first:end]
        writers.append(
            np.repeat(holder, shard_table.place.shape[1]).reshape(shard_table.place.shape)
        )
        alone = holder[holders.count[first:end] == 1]
        np.add.at(loads, alone, weight[distinct[key]].sum())
        first = end
    return writers


def _locate(
    shard_tables: Sequence[ShardTable], holdings: Sequence[Sequence[bytes]]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the (shard_table, line) of each rank's blocks, in the order of kinds."""
    where = {
        digest: (number, line)
        for number, shard_table in enumerate(shard_tables)
        for line, digest in enumerate(shard_table.digests)
    }
    return tuple(
        tuple(sorted((where[d] for d in held), key=lambda at: shard_tables[at[0]].pattern.kind))
        for held in holdings
    )


def _keep(
    shard_tables: Sequence[ShardTable],
    weights: Sequence[Int64s],
    writers: Sequence[Int32s],
    held: Sequence[Sequence[tuple[int, int]]],
) -> tuple[tuple[Kept, ...], Int64s]:
    """Return the rows that each rank writes, and the bytes of each rank's file."""
    kept = []
    file_bytes = np.zeros(len(held), dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int32)
    for rank, blocks in enumerate(held):
        its = [nothing] * len(KINDS)
        for shard_table, line in blocks:
            rows = np.flatnonzero(writers[shard_table][line] == rank).astype(np.int32)
            its[shard_tables[shard_table].pattern.kind] = rows
            file_bytes[rank] += weights[shard_table][rows].sum()
        kept.append(tuple(its))
    return tuple(kept), file_bytes


def _describe(item: Item) -> str:
    return "a number" if item.dtype is None else f"{item.dtype} of shape {item.shape}"
