"""Chooses the writer of a box that several ranks hold: the one with the least to write so far.

This spreads replicated state evenly. Boxes that the same ranks hold are handled together, heaviest
first. Python loops run over sets of holders and over the boxes of the largest set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.trainer.format.columns import Int32s, Int64s
from holdfast.trainer.planning.boxes import Bools, Groups, Loose

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
        """The lowest rank that holds each block."""
        return self.rank[self.start].astype(np.int32)

    def of_block(self, block: int) -> Int64s:
        """All ranks that hold a block."""
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
