"""Few words between ranks at start and at saves, over a gloo group of the session's own.

The training group is never used: a collective of ours between two of the program's would
deadlock as soon as one rank is late. An error on one rank is told to all, so that nobody waits
for a rank that has raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from holdfast.contracts.errors import HoldfastError

TIMEOUT: Final = timedelta(minutes=30)

T = TypeVar("T")


class Ranks:
    """All ranks of the program; with a single process every word stays where it is."""

    def __init__(self) -> None:
        """Makes the group, so every rank must construct this at the same point."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` returned on rank 0, on every rank; its error is raised everywhere."""
        mine = _attempt(compute) if self.rank == 0 else None
        box: list[Any] = [_portable(mine) if mine else None]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        value: T = _unpack([mine or box[0]], own=0 if mine else None)[0]
        return value

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """What `compute` returned on each rank, by rank; one rank's error is raised everywhere."""
        mine = _attempt(compute)
        boxes: list[Any] = [mine]
        if self.group is not None:
            boxes = [None] * self.world_size
            dist.all_gather_object(boxes, _portable(mine), group=self.group)
            boxes[self.rank] = mine
        return _unpack(boxes, own=self.rank)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks; every rank gives as many."""
        if self.group is None:
            return list(values)
        words = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.group)
        return [int(word) for word in words.tolist()]


def _attempt(compute: Callable[[], Any]) -> tuple[Any, Exception | None, str]:
    try:
        return compute(), None, ""
    except Exception as error:
        # Whatever it is, the other ranks wait for a word; it is raised again by `_unpack`.
        return None, error, f"{type(error).__name__}: {error}"


def _portable(outcome: tuple[Any, Exception | None, str]) -> tuple[Any, None, str]:
    return outcome[0], None, outcome[2]


def _unpack(boxes: list[Any], own: int | None) -> list[Any]:
    """The values, or the first error: one's own as it is, another rank's in its words."""
    if own is not None and boxes[own][1] is not None:
        raise boxes[own][1]
    for rank, (_, _, problem) in enumerate(boxes):
        if problem:
            raise HoldfastError(f"rank {rank} failed: {problem}")
    return [value for value, _, _ in boxes]
