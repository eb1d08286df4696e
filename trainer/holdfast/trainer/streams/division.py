"""Which rank reads which shards of an epoch, as pure functions.

An epoch has its shards in an order, and a shard's *place* is its index in that order. The unread
part of an epoch is a list of open shards, with their positions, and of places that nobody has
opened. `divide` deals them out to lanes. A lane is a sequence of samples that one loader worker
reads. The lanes of a group of ranks are read by each of its members, and each takes its own share
of the samples. Most groups have one rank. There are larger groups only if fewer shards than ranks
are left.

A rank gives full batches until one of them can give no more. The rest is then divided again, with
at most half as many lanes, until there is one lane that all ranks read. Its last steps have smaller
batches, so each rank has the same number of batches and each sample is given once. A resume at
another size divides the rest in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Cursor:
    """How far a shard was read: `position` is the source's, where the current block begins.

    `before` is the number of samples before that block, and `taken` how many of it were given.
    """

    place: int
    position: Any = None
    before: int = 0
    taken: int = 0


@dataclass(frozen=True)
class LaneState:
    """The unread part of one lane: open shards, the next one first, then places in their order."""

    opened: tuple[Cursor, ...] = ()
    unopened: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Ranks that read the same lanes. Member `n` is rank `first + n`."""

    number: int
    first: int
    members: int
    lanes: tuple[LaneState, ...]


@dataclass(frozen=True)
class Division:
    """One division of the rest of an epoch. `width` is the largest number of lanes it might use.

    With `is_last`, there is one lane, which all ranks read, and the epoch ends with it.
    """

    width: int
    is_last: bool
    groups: tuple[Group, ...]

    def group_of(self, rank: int) -> Group:
        """Return the group of `rank`."""
        return next(g for g in self.groups if g.first <= rank < g.first + g.members)


def divide(rest: LaneState, ranks: int, width: int) -> Division:
    """Deal the unread part of an epoch out to at most `width` lanes of `ranks` ranks.

    Open shards come first, each kind by place, and item k goes to lane k % lanes.
    """
    opened = sorted(rest.opened, key=lambda one: one.place)
    unopened = sorted(rest.unopened)
    count = len(opened) + len(unopened)
    lanes = max(1, min(width, count))
    groups = min(lanes, ranks)
    # Each group has the same number of lanes.
    lanes -= lanes % groups
    found = [
        LaneState(
            tuple(opened[lane::lanes]), tuple(unopened[(lane - len(opened)) % lanes :: lanes])
        )
        for lane in range(lanes)
    ]
    share, more = divmod(ranks, groups)
    made, first = [], 0
    for number in range(groups):
        members = share + (number < more)
        made.append(Group(number, first, members, tuple(found[number::groups])))
        first += members
    return Division(width, lanes == 1, tuple(made))


def joined(lanes: Iterable[LaneState]) -> LaneState:
    """Return the unread parts of several lanes as one."""
    opened: list[Cursor] = []
    unopened: list[int] = []
    for lane in lanes:
        opened += lane.opened
        unopened += lane.unopened
    return LaneState(tuple(opened), tuple(unopened))


def next_width(width: int, rest: LaneState, *, has_progress: bool) -> int:
    """Return the width of the division after one of `width`, some of whose lanes have ended.

    It stays only if steps were given and each lane would have several shards again, so an epoch has
    few divisions.
    """
    count = len(rest.opened) + len(rest.unopened)
    return width if has_progress and count >= 2 * width else max(1, width // 2)


def shares(samples: int, ranks: int) -> list[int]:
    """Return how many of a step's samples each rank gets: as equal as possible."""
    share, more = divmod(samples, ranks)
    return [share + (rank < more) for rank in range(ranks)]


def last_steps(left: int, ranks: int, batch: int, *, is_filled: bool = False) -> list[int]:
    """Return the samples of each of the last steps, for the last `left` samples of an epoch.

    `left` is below ranks * (batch + 1). Each rank gets a sample in each step. So with a batch of
    one, some ranks may get two samples in the last step. There is no step for fewer samples than
    ranks. With `is_filled`, a filler stands for each sample that a step lacks, so a rank may get no
    sample, and none is left out.
    """
    if is_filled:
        full, rest = divmod(left, ranks * batch)
        return [ranks * batch] * full + [rest] * (rest > 0)
    if left < ranks:
        return []
    if left <= ranks * batch or left < 2 * ranks:
        return [left]
    return [left - left // 2, left // 2]


def moved(cursor: Cursor, position: Any, given: int) -> Cursor:
    """Return the cursor at the start of the next block, after `given` samples of this one."""
    return replace(cursor, position=position, before=cursor.before + given, taken=0)
