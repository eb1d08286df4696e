"""Who writes what, and where, for all ranks at once: rank 0's part of planning.

A box is known by the number of its first element, counted through all tensors end to end. Equal
numbers are copies of one box, of which exactly one is written: by the holder with the least to
write so far, so that replicated state is spread evenly. Everything is sorting and adding up of
columns; Python loops run over keys, ranks and sets of holders, never over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.contracts.errors import SaveError
from holdfast.trainer.planning.columns import (
    Int32s,
    Int64s,
    Item,
    Rows,
    UInt64s,
    decode_table,
    whole_masses,
)

ALIGNMENT: Final = 64
_KEYS_SHOWN: Final = 5
_MIX: Final = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class GlobalPlan:
    """Who writes which row, and where; columns are by row, as all nodes' rows were joined.

    `key` numbers `items`. `row` lists the rows that are written, by key and then by place;
    `writer` is the rank that writes a row, `offset` and `length` are bytes in that rank's file,
    `form` numbers `form_sizes`. `kept` has for each rank the rows that it writes, in the order of
    its file: of its shared block, then of its own.
    """

    items: tuple[Item, ...]
    row: Int64s
    key: Int32s
    place: Int64s
    form: Int32s
    form_sizes: Int64s
    writer: Int32s
    offset: Int64s
    length: Int64s
    kept: tuple[tuple[Int32s, Int32s], ...]
    file_bytes: Int64s


@dataclass(frozen=True)
class _Groups:
    """Rows sorted by box: `order` lists rows, `start` and `count` a stretch of it for each box."""

    order: Int64s
    start: Int64s
    count: Int64s

    def rows_of(self, boxes: Int64s) -> tuple[Int64s, Int64s]:
        """All rows of these boxes, and for each its box's place among `boxes`."""
        count = self.count[boxes]
        box = np.repeat(np.arange(len(boxes)), count)
        nth = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
        return self.order[np.repeat(self.start[boxes], count) + nth], box


def plan_all(
    rows: Rows, tables: Mapping[bytes, bytes], holdings: Sequence[Sequence[bytes]]
) -> GlobalPlan:
    """Plan for all ranks; `holdings` has the digests of each rank's blocks, by rank.

    Raises `SaveError` when ranks differ about a key, or their parts do not tile a tensor.
    """
    items, key = _number_keys(rows, tables)
    numbers = np.arange(len(rows.digests), dtype=np.int32)
    block: Int32s = np.repeat(numbers, rows.row_counts)
    form_base = (np.cumsum(rows.form_counts) - rows.form_counts).astype(np.int32)
    form: Int32s = rows.form + np.repeat(form_base, rows.row_counts)
    groups = _group(rows, key, items)
    _check_tiling(rows, key, items, groups)
    length = rows.form_bytes[form]
    holders = _Holders.of(rows.digests, holdings)
    row, writer = _assign(rows, groups, block, align(length), holders)
    offset, kept, file_bytes = _lay_out(rows, block, writer, length, len(holdings))
    return GlobalPlan(
        items=items,
        row=row,
        key=key,
        place=rows.place,
        form=form,
        form_sizes=rows.form_sizes,
        writer=writer,
        offset=offset,
        length=length,
        kept=kept,
        file_bytes=file_bytes,
    )


def align(lengths: Int64s) -> Int64s:
    """Lengths rounded up to the boundary on which entries begin."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT


def offsets_of(lengths: Int64s) -> Int64s:
    """Where entries of these lengths begin in a file, each on a boundary."""
    aligned = align(lengths)
    return np.cumsum(aligned) - aligned


# --- keys and boxes ---------------------------------------------------------------------------


def _number_keys(rows: Rows, tables: Mapping[bytes, bytes]) -> tuple[tuple[Item, ...], Int32s]:
    """One list of items for all tables, and each row's place in it."""
    items: dict[str, Item] = {}
    number: dict[str, int] = {}
    base: dict[bytes, int] = {}
    flat: list[int] = []
    for digest in dict.fromkeys(rows.tables):
        base[digest] = len(flat)
        for item in decode_table(tables[digest]):
            known = items.setdefault(item.key, item)
            if known != item:
                raise SaveError(
                    f"{item.key}: one rank has {_describe(known)}, another {_describe(item)}; "
                    "every rank must save the same tensor under one name"
                )
            flat.append(number.setdefault(item.key, len(number)))
    bases = np.array([base[digest] for digest in rows.tables], dtype=np.int32)
    in_tables = rows.item + np.repeat(bases, rows.row_counts)
    return tuple(items.values()), np.array(flat, dtype=np.int32)[in_tables]


def _group(rows: Rows, key: Int32s, items: Sequence[Item]) -> _Groups:
    """Bring the copies of each box together, in the order of keys and places.

    By key first, which is cheap; where ranks come in the order of their parts that is all.
    """
    extent = np.array([max(prod(item.shape), 1) for item in items], dtype=np.int64)
    code = (np.cumsum(extent) - extent)[key]
    code += rows.place
    small = key.astype(np.uint16) if len(items) < 1 << 16 else key
    order = np.argsort(small, kind="stable")
    code = code[order]
    if np.any(code[1:] < code[:-1]):
        again = np.argsort(code)
        order, code = order[again], code[again]
        repeated = np.flatnonzero(_is_repeated(code))
        # Copies of one box stay in the order of their blocks, whatever the sort did to them.
        settled = np.lexsort((order[repeated], code[repeated]))
        order[repeated] = order[repeated[settled]]
    is_first = np.ones(len(code), dtype=bool)
    np.not_equal(code[1:], code[:-1], out=is_first[1:])
    start = np.flatnonzero(is_first)
    return _Groups(order, start, np.diff(start, append=len(code)))


def _is_repeated(code: Int64s) -> npt.NDArray[np.bool_]:
    same = code[1:] == code[:-1]
    repeated = np.zeros(len(code), dtype=bool)
    repeated[1:] |= same
    repeated[:-1] |= same
    return repeated


def _check_tiling(rows: Rows, key: Int32s, items: Sequence[Item], groups: _Groups) -> None:
    """Raise `SaveError` unless the boxes of every tensor cover it exactly once."""
    first = groups.order[groups.start]
    key_of_box = key[first]
    total: UInt64s = np.zeros(len(items), dtype=np.uint64)
    starts = np.flatnonzero(np.diff(key_of_box, prepend=-1))
    if len(starts):
        total[key_of_box[starts]] = np.add.reduceat(rows.mass[first], starts)
    wrong = total != whole_masses([item.shape for item in items])
    repeated = np.flatnonzero(groups.count > 1)
    copies, box = groups.rows_of(repeated)
    unequal = rows.mass[copies] != rows.mass[first[repeated]][box]
    wrong[key[copies[unequal]]] = True
    if not wrong.any():
        return
    names = [items[number].key for number in np.flatnonzero(wrong).tolist()]
    more = f" and {len(names) - _KEYS_SHOWN} more" if len(names) > _KEYS_SHOWN else ""
    raise SaveError(
        f"{', '.join(names[:_KEYS_SHOWN])}{more}: the ranks' parts do not cover the tensor "
        "exactly once; expected shards that neither overlap nor leave a gap, or the same whole "
        "tensor on every rank that has it"
    )


# --- writers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Holders:
    """Which ranks hold each block: `rank[start[b] : start[b] + count[b]]`, ascending."""

    rank: Int64s
    start: Int64s
    count: Int64s
    ranks: int

    @classmethod
    def of(cls, digests: Sequence[bytes], holdings: Sequence[Sequence[bytes]]) -> _Holders:
        number = {digest: n for n, digest in enumerate(digests)}
        blocks = np.array([number[d] for held in holdings for d in held], dtype=np.int64)
        ranks = np.repeat(np.arange(len(holdings)), [len(held) for held in holdings])
        count = np.bincount(blocks, minlength=len(digests))
        order = np.argsort(blocks, kind="stable")
        return cls(ranks[order], np.cumsum(count) - count, count, len(holdings))

    def of_block(self, block: int) -> Int64s:
        return self.rank[self.start[block] : self.start[block] + self.count[block]]


def _assign(
    rows: Rows, groups: _Groups, block: Int32s, weight: Int64s, holders: _Holders
) -> tuple[Int64s, Int32s]:
    """The row that is written of each box, and the rank that writes each row, -1 for none."""
    row = groups.order[groups.start]
    writer: Int32s = np.repeat(holders.rank[holders.start].astype(np.int32), rows.row_counts)
    is_shared = groups.count > 1
    if holders.count.max(initial=1) > 1:
        is_shared |= holders.count[block[row]] > 1
    shared = np.flatnonzero(is_shared)
    copies, _ = groups.rows_of(shared)
    writer[copies] = -1
    alone = np.flatnonzero(writer >= 0) if len(shared) else slice(None)
    loads = np.bincount(writer[alone], weights=weight[alone], minlength=holders.ranks)
    loads = loads.astype(np.int64)
    for batch in _batches(_holder_sets(shared, groups, block, holders)):
        _share_out(batch, groups, weight, loads, row, writer)
    return row, writer


@dataclass(frozen=True)
class _HolderSet:
    """Boxes that the same ranks hold: `nth` says which copy of a box each member has."""

    members: Int64s
    nth: Int64s
    boxes: Int64s


def _holder_sets(
    shared: Int64s, groups: _Groups, block: Int32s, holders: _Holders
) -> list[_HolderSet]:
    """Boxes with more than one holder by their blocks, sets with the fewest members first."""
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
    """Sets to treat at once: of one size, about as many boxes, and no member in common."""
    turn: dict[int, int] = {}
    batches: dict[tuple[int, int, int], list[_HolderSet]] = {}
    for one in sets:
        members = one.members.tolist()
        now = max(turn.get(rank, 0) for rank in members)
        turn.update(dict.fromkeys(members, now + 1))
        batches.setdefault((len(members), now, len(one.boxes).bit_length()), []).append(one)
    return [batches[size] for size in sorted(batches)]


def _share_out(
    sets: Sequence[_HolderSet],
    groups: _Groups,
    weight: Int64s,
    loads: Int64s,
    row: Int64s,
    writer: Int32s,
) -> None:
    """Give each box, heaviest first, to the member of its set that has the least so far."""
    most = max(len(one.boxes) for one in sets)
    boxes = np.full((len(sets), most), -1, dtype=np.int64)
    for number, one in enumerate(sets):
        heaviest_first = np.argsort(-weight[row[one.boxes]], kind="stable")
        boxes[number, : len(one.boxes)] = one.boxes[heaviest_first]
    members = np.stack([one.members for one in sets])
    nth = np.stack([one.nth for one in sets])
    load = loads[members]
    every = np.arange(len(sets))
    for column in boxes.T:
        has_box = column >= 0
        index, box = every[has_box], column[has_box]
        least = np.argmin(load[index], axis=1)
        row[box] = groups.order[groups.start[box] + nth[index, least]]
        writer[row[box]] = members[index, least]
        load[index, least] += weight[row[box]]
    loads[members] = load


# --- files ------------------------------------------------------------------------------------


def _lay_out(
    rows: Rows, block: Int32s, writer: Int32s, length: Int64s, ranks: int
) -> tuple[Int64s, tuple[tuple[Int32s, Int32s], ...], Int64s]:
    """Each row's offset in its writer's file, each rank's rows, each file's bytes."""
    turn = 2 * writer + np.repeat(rows.kinds, rows.row_counts)
    written = np.flatnonzero(writer >= 0)
    turn = turn[written]
    if np.any(turn[1:] < turn[:-1]):
        small = turn.astype(np.uint16) if 2 * ranks < 1 << 16 else turn
        in_file = np.argsort(small, kind="stable")
        written, turn = written[in_file], turn[in_file]
    aligned = align(length[written])
    end = np.cumsum(aligned)
    bounds = np.searchsorted(turn, np.arange(2 * ranks + 1, dtype=turn.dtype))
    before = np.concatenate((np.zeros(1, dtype=np.int64), end))[bounds]
    offset = np.zeros(len(length), dtype=np.int64)
    offset[written] = end - aligned - np.repeat(before[:-1:2], np.diff(bounds[::2]))
    row_base = np.cumsum(rows.row_counts) - rows.row_counts
    local = (written - row_base[block[written]]).astype(np.int32)
    parts = np.split(local, bounds[1:-1])
    kept = tuple((parts[2 * rank], parts[2 * rank + 1]) for rank in range(ranks))
    return offset, kept, np.diff(before[::2])


def _describe(item: Item) -> str:
    return "a number" if item.dtype is None else f"{item.dtype} of shape {item.shape}"
