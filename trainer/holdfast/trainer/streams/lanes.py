"""Reads one lane of a stream, in the worker of a loader or in the rank itself.

With a buffer, the samples of a shard are shuffled in blocks. A block's order depends on the seed,
the epoch, the shard and the block's first sample. So the state of a shard is where its block begins
and how many of its samples were given, and a resume reads at most one block again.

Before each sample is read, the generators of Python, NumPy and torch are seeded from the seed, the
epoch, the shard and the sample's number in it, and before a shard is opened from the first three.
So a random transform gives the same result for any reader. A collator gets the seed of its batch's
first sample. In the rank itself, the program's own generators are restored afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from holdfast.contracts.node.reporting import report
from holdfast.trainer.data.order import permute
from holdfast.trainer.state import rng
from holdfast.trainer.streams.division import Cursor, LaneState, last_steps, moved, shares
from holdfast.trainer.streams.seeds import BLOCK, COLLATE, OPEN, READ, TRANSFORM, key_of, seed_all
from holdfast.trainer.streams.source import Source

_END: Final = object()


class Mark(NamedTuple):
    """The state of a lane after a sample: its open shards, and how many places are unopened."""

    opened: tuple[Cursor, ...]
    unopened: int


class Delivery(NamedTuple):
    """What a worker sends to the rank: a batch, and the state of its lane after it."""

    lane: int
    batch: Any
    mark: Mark


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What determines the samples of an epoch: `order` has the shards by place."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    seed: int
    epoch: int
    buffer: int
    open_shards: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a lane's samples one rank gets: that of `member` among `members` ranks.

    With a `filler`, each batch has `batch` samples, and the filler stands for those that an epoch's
    last step lacks.
    """

    member: int
    members: int
    batch: int
    is_last: bool
    drop_last: bool
    filler: Any = None


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the program's generators at the end, as if nothing had been drawn."""
    noted = rng.note()
    try:
        yield
    finally:
        random.setstate(noted.python)
        np.random.set_state(noted.numpy)
        torch.default_generator.set_state(noted.torch)


@contextlib.contextmanager
def hidden_worker() -> Iterator[None]:
    """Hide from a dataset that it is read in a worker, so that it does not divide itself again."""
    here: Any = worker
    kept, here._worker_info = here._worker_info, None
    try:
        yield
    finally:
        here._worker_info = kept


class _ShardReader:
    """Reads one shard from a cursor on, in shuffled blocks if the epoch has a buffer."""

    def __init__(self, source: Source, epoch: Epoch, cursor: Cursor) -> None:
        self._epoch, self._cursor = epoch, cursor
        self.shard = epoch.order[cursor.place]
        seed_all(key_of(OPEN, epoch.seed, epoch.epoch, self.shard))
        opening = getattr(source, "open_seeded", source.open)
        # A source may change what it gets, and the cursor of a block still has it.
        position = copy.deepcopy(cursor.position)
        self._samples = iter(opening(epoch.names[self.shard], position))
        self._block: list[Any] | None = None
        self._order: list[int] = []
        # The position after the sample that was read last, or a function that returns it.
        self._position: Any = cursor.position

    def read(self) -> Any:
        """Return the next sample and its number in the shard, or `_END`."""
        if self._epoch.buffer < 2:
            return self._read_plain()
        if self._block is None:
            self._fill()
        assert self._block is not None
        if self._cursor.taken >= len(self._block):
            return _END
        number = self._order[self._cursor.taken]
        found = self._block[number], self._cursor.before + number
        self._cursor = replace(self._cursor, taken=self._cursor.taken + 1)
        if self._cursor.taken == len(self._block) == self._epoch.buffer:
            self._cursor = moved(self._cursor, self._position, len(self._block))
            self._block = None
        return found

    def cursor(self) -> Cursor:
        """Return how far the shard was given. Call it before the next sample is read."""
        if self._epoch.buffer < 2 and callable(self._cursor.position):
            self._cursor = replace(self._cursor, position=self._cursor.position())
        return self._cursor

    def _read_plain(self) -> Any:
        number = self._cursor.before
        seed_all(self._key(READ, number))
        try:
            sample, position = next(self._samples)
        except StopIteration:
            return _END
        self._cursor = moved(self._cursor, position, 1)
        return sample, number

    def _fill(self) -> None:
        """Read the next block. It is shorter than the buffer at the end of the shard."""
        first, block = self._cursor.before, []
        for number in range(first, first + self._epoch.buffer):
            seed_all(self._key(READ, number))
            try:
                sample, self._position = next(self._samples)
            except StopIteration:
                break
            block.append(sample)
        else:
            # At once, because the source may read ahead as soon as it is asked for more.
            if callable(self._position):
                self._position = self._position()
        self._block = block
        if block:
            places = np.arange(len(block), dtype=np.uint64)
            self._order = permute(places, len(block), self._key(BLOCK, first), 0).tolist()

    def _key(self, kind: int, number: int) -> int:
        return key_of(kind, self._epoch.seed, self._epoch.epoch, self.shard, number)


class LaneReader:
    """The samples of one lane. It reads `open_shards` shards in turn, a sample of each."""

    def __init__(self, source: Source, epoch: Epoch, state: LaneState) -> None:
        self._source, self._epoch = source, epoch
        self._unopened = deque(state.unopened)
        self._opened = deque(_ShardReader(source, epoch, cursor) for cursor in state.opened)
        while self._unopened and len(self._opened) < epoch.open_shards:
            self._opened.append(self._open())

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._epoch.epoch

    def read(self) -> Any:
        """Return the next sample, the number of its shard and its number in it, or None."""
        while self._opened:
            reader = self._opened[0]
            found = reader.read()
            if found is not _END:
                self._opened.rotate(-1)
                return found[0], reader.shard, found[1]
            self._opened.popleft()
            if self._unopened:
                self._opened.appendleft(self._open())
        return None

    def mark(self) -> Mark:
        """Return the lane's state after the sample that was read last."""
        return Mark(tuple(each.cursor() for each in self._opened), len(self._unopened))

    def _open(self) -> _ShardReader:
        return _ShardReader(self._source, self._epoch, Cursor(self._unopened.popleft()))


def parts_of(lane: LaneReader, share: Share) -> Iterator[tuple[list[Any], Mark]]:
    """Iterate over one rank's samples of each step that a lane gives, and the lane's state after.

    A lane that is not the last keeps a sample for each member, so that the epoch's last step has
    one for each rank.
    """
    unit, kept = share.members * share.batch, share.members
    ahead: deque[tuple[Any, Mark | None]] = deque()
    # Where the last steps end is known only when the end is in sight.
    marks_all, count = share.is_last and share.members > 1, 0
    while True:
        while len(ahead) < unit + kept and (found := lane.read()) is not None:
            count += 1
            ahead.append((found, lane.mark() if marks_all or count % unit == 0 else None))
        if len(ahead) < unit + kept:
            break
        yield _own(ahead, unit, share)
    if not share.is_last:
        return
    is_filled = share.filler is not None
    sizes = last_steps(len(ahead), share.members, share.batch, is_filled=is_filled)
    if share.drop_last:
        sizes = [unit] if len(ahead) >= unit else []
    elif ahead and not sizes and share.member == 0:
        report(
            f"holdfast: the last {len(ahead)} samples of epoch {lane.epoch} are left out, because "
            f"{share.members} ranks cannot share them"
        )
    for number, size in enumerate(sizes, 1):
        samples, mark = _own(ahead, size, share)
        # Nothing is left after the last one, whatever was read.
        yield samples, Mark((), 0) if number == len(sizes) else mark


def _own(ahead: deque[tuple[Any, Mark | None]], size: int, share: Share) -> tuple[list[Any], Mark]:
    """Take `size` samples. Return those of this member, and the lane's state after all of them."""
    taken = [ahead.popleft() for _ in range(size)]
    sizes = shares(size, share.members)
    first, mark = sum(sizes[: share.member]), taken[-1][1]
    own = [sample for sample, _ in taken[first : first + sizes[share.member]]]
    return own, mark if mark is not None else Mark((), 0)


class LaneData(IterableDataset[Delivery]):
    """The lanes of one rank, each of which one worker reads. Without workers, there is one lane."""

    def __init__(
        self,
        source: Source,
        epoch: Epoch,
        lanes: list[tuple[int, LaneState]],
        share: Share,
        collate: Callable[[list[Any]], Any],
        transform: Callable[[Any], Any] | None,
    ) -> None:
        """`lanes` are numbers and states, in the order in which they give batches."""
        super().__init__()
        self._source, self._epoch, self._lanes, self._share = source, epoch, lanes, share
        self._collate, self._transform = collate, transform

    def __iter__(self) -> Iterator[Delivery]:
        info = get_worker_info()
        number, state = self._lanes[0 if info is None else info.id]
        steps = self._steps(state)
        while True:
            with kept_generators() if info is None else hidden_worker():
                found = next(steps, None)
                if found is None:
                    return
                samples = [self._transformed(each) for each in found[0]]
                if self._share.filler is not None:
                    samples += [self._share.filler] * (self._share.batch - len(samples))
                first = found[0][0][1:] if found[0] else (-1, -1)
                seed_all(self._key(COLLATE, *first))
                batch = self._collate(samples)
            yield Delivery(number, batch, found[1])

    def _steps(self, state: LaneState) -> Iterator[tuple[list[Any], Mark]]:
        # The shards are opened when the first step is asked for.
        yield from parts_of(LaneReader(self._source, self._epoch, state), self._share)

    def _transformed(self, found: Any) -> Any:
        sample, shard, number = found
        if self._transform is None:
            return sample
        seed_all(self._key(TRANSFORM, shard, number))
        return self._transform(sample)

    def _key(self, kind: int, shard: int, number: int) -> int:
        return key_of(kind, self._epoch.seed, self._epoch.epoch, shard, number)
