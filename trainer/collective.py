"""Small collectives between ranks at the start and at saves, over the session's own gloo group.

The training group is never used. A collective between two of the program's collectives would
deadlock as soon as one rank is late. An error on one rank is sent to all ranks, so that no rank
waits for a rank that has raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.rank_status import RankStatusTable
from holdfast.trainer.meeting import NodeMeeting

TIMEOUT: Final = timedelta(minutes=30)

T = TypeVar("T")


class ControlGroup:
    """All ranks of the program. With a single process there is no communication.

    `stage_group` contains the ranks that save together: the ranks of the pipeline stage, or all
    ranks if there are no stages.
    """

    def __init__(self) -> None:
        """Create the group. Every rank must call this at the same point."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.stage_group = self.group
        self._meeting: NodeMeeting | None = None

    def meet_on(self, status_table: RankStatusTable, local_rank: int) -> None:
        """Use `status_table` to agree on numbers from now on, if it has a record of every rank."""
        if self.group is not None and status_table.ranks == self.world_size:
            self._meeting = NodeMeeting(status_table, local_rank)

    def join_stage(self, stages: Sequence[int]) -> None:
        """Create the group of every stage. `stages` lists each rank's stage.

        Every rank creates all groups, because torch counts them.
        """
        if self.group is None:
            return
        for stage in sorted(set(stages)):
            members = [rank for rank, other in enumerate(stages) if other == stage]
            made = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
            if self.rank in members:
                self.stage_group = made

    def close(self) -> None:
        """Destroy the groups, once no collective is pending. No other reference may remain.

        A group's threads release a collective's tensors after the waiting rank has continued. If
        the interpreter ends first, such a thread ends the process with SIGABRT. Only the destructor
        of the group joins its threads, and it runs when the last reference is dropped.
        """
        if self._meeting is not None:
            self._meeting.close()
        groups = {id(group): group for group in (self.stage_group, self.group) if group}
        self.group = self.stage_group = None
        while groups:
            # The program may already have destroyed all groups.
            with contextlib.suppress(AssertionError, ValueError):
                dist.destroy_process_group(groups.popitem()[1])

    def share(self, compute: Callable[[], T]) -> T:
        """Run `compute` on rank 0 and return its result on every rank. Errors raise everywhere."""
        value, error = attempt(compute) if self.rank == 0 else (None, None)
        box: list[Any] = [(value, _text_of(error))]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        shared: T = _values([box[0] if self.rank else (value, "")], error)[0]
        return shared

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Return the results of `compute` by rank. One rank's error is raised on every rank."""
        value, error = attempt(compute)
        boxes: list[Any] = [None] * self.world_size
        if self.group is not None:
            dist.all_gather_object(boxes, (value, _text_of(error)), group=self.group)
        boxes[self.rank] = (value, "")
        return _values(boxes, error)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks. Every rank passes equally many."""
        if self.group is None:
            return list(values)
        if self._meeting is not None:
            return self._meeting.largest([int(value) for value in values])
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in numbers.tolist()]


def attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `act` and its error. All ranks raise the error after a collective."""
    try:
        return act(), None
    except Exception as error:
        # The other ranks wait for this rank's answer, so catch every error.
        return None, error


def problem_of(error: Exception | None, rank: int) -> str | None:
    """Return an error's text with the rank's number, or None without an error."""
    return None if error is None else f"rank {rank}: {error}"


def _text_of(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _values(boxes: list[tuple[Any, str]], own: Exception | None) -> list[Any]:
    """Return the values, or raise the first error: the own one as is, another's as text."""
    if own is not None:
        raise own
    for rank, (_, problem) in enumerate(boxes):
        if problem:
            raise HoldfastError(f"rank {rank} failed: {problem}")
    return [value for value, _ in boxes]


class HierarchicalGroup:
    """Communication whose cost grows with nodes: ranks to their node's first rank, those to rank 0.

    Every rank of the group calls the same methods in the same order. All ranks construct it
    together, each with its `node`.
    """

    def __init__(self, group: dist.ProcessGroup | None, node: int) -> None:
        self._rank, self._size = 0, 1
        if group is not None:
            self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._nodes = self._gather_nodes(group, node)
        self._group = group
        self._mates = [rank for rank, other in enumerate(self._nodes) if other == node]
        self._firsts = sorted(self._nodes.index(other) for other in set(self._nodes))

    @property
    def is_first(self) -> bool:
        """True on the rank that represents its node."""
        return self._rank == self._mates[0]

    @property
    def is_root(self) -> bool:
        return self._rank == 0

    @property
    def mates(self) -> list[int]:
        """The group's ranks on this node."""
        return self._mates

    def gather_node(self, value: Any) -> list[Any]:
        """Return each value of the node's ranks on its first rank, and [] on others."""
        return self._gather(value, self._mates)

    def gather_firsts(self, value: Any) -> list[Any]:
        """Return all first ranks' values on the root, and [] elsewhere. First ranks only."""
        return self._gather(value, self._firsts)

    def scatter_firsts(self, values: Sequence[Any]) -> Any:
        """Return this node's entry of the root's `values`. First ranks only."""
        return self._scatter(values, self._firsts)

    def scatter_node(self, values: Sequence[Any]) -> Any:
        """Return this rank's entry of the first rank's `values`, one for each rank of the node."""
        return self._scatter(values, self._mates)

    def gather_all(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on the root, and [] on others."""
        mine = dict(zip(self._mates, self.gather_node(value), strict=False))
        if not self.is_first:
            return []
        every = {rank: v for node in self.gather_firsts(mine) for rank, v in node.items()}
        return [every[rank] for rank in sorted(every)]

    def scatter_all(self, values: Sequence[Any]) -> Any:
        """Return this rank's entry of the root's `values`."""
        node: Sequence[Any] = []
        if self.is_first:
            by_node: dict[int, list[Any]] = {self._nodes[first]: [] for first in self._firsts}
            for rank, value in enumerate(values):
                by_node[self._nodes[rank]].append(value)
            node = self.scatter_firsts(list(by_node.values()))
        return self.scatter_node(node)

    def agree(self, problem: str | None) -> list[str]:
        """Return the problems of all ranks on every rank, ordered by node. Empty without any."""
        found = [text for text in self.gather_node(problem) if text]
        verdict: list[str] = []
        if self.is_first:
            problems = [text for node in self.gather_firsts(found) for text in node]
            verdict = self.scatter_firsts([problems] * len(self._firsts))
        agreed: list[str] = self.scatter_node([verdict] * len(self._mates))
        return agreed

    def _gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Send to the first of `ranks`, one after another, so that no extra group is needed."""
        if self._rank == ranks[0]:
            return [value, *(self._receive(rank) for rank in ranks[1:])]
        self._send(value, ranks[0])
        return []

    def _scatter(self, values: Sequence[Any], ranks: Sequence[int]) -> Any:
        if self._rank != ranks[0]:
            return self._receive(ranks[0])
        for rank, value in zip(ranks[1:], values[1:], strict=True):
            self._send(value, rank)
        return values[0]

    def _send(self, value: Any, rank: int) -> None:
        dist.send_object_list([value], group=self._group, group_dst=rank)

    def _receive(self, rank: int) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, group=self._group, group_src=rank)
        return box[0]

    def _gather_nodes(self, group: dist.ProcessGroup | None, node: int) -> list[int]:
        if group is None:
            return [node]
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(every, torch.tensor([node], dtype=torch.int64), group=group)
        return [int(other) for other in every]
