"""Few words between ranks at start and at saves, over a gloo group of the session's own.

The training group is never used: a collective of ours between two of the program's would
deadlock as soon as one rank is late. An error on one rank is told to all, so that nobody waits
for a rank that has raised.
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
    """All ranks of the program; with a single process every word stays where it is.

    `stage_group` is over the ranks that save together: those of the pipeline stage, where there
    are stages, else all.
    """

    def __init__(self) -> None:
        """Makes the group, so every rank must construct this at the same point."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.stage_group = self.group
        self._meeting: NodeMeeting | None = None

    def meet_on(self, status_table: RankStatusTable, local_rank: int) -> None:
        """Agree on numbers through `status_table` from now on, if all ranks have a record of it."""
        if self.group is not None and status_table.ranks == self.world_size:
            self._meeting = NodeMeeting(status_table, local_rank)

    def join_stage(self, stages: Sequence[int]) -> None:
        """Make the groups of the stages; `stages` has each rank's. All make all: they count."""
        if self.group is None:
            return
        for stage in sorted(set(stages)):
            members = [rank for rank, other in enumerate(stages) if other == stage]
            made = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
            if self.rank in members:
                self.stage_group = made

    def close(self) -> None:
        """Let the groups go, once nothing waits in them; nobody else may still refer to them.

        A group's threads let go of a collective's tensors after those who waited for it went on.
        Where the interpreter ends first, such a thread ends the process by SIGABRT. Only the end
        of the group waits for its threads, and it comes with the last reference.
        """
        if self._meeting is not None:
            self._meeting.close()
        groups = {id(group): group for group in (self.stage_group, self.group) if group}
        self.group = self.stage_group = None
        while groups:
            # The program may have let all groups go before.
            with contextlib.suppress(AssertionError, ValueError):
                dist.destroy_process_group(groups.popitem()[1])

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
        if self._meeting is not None:
            return self._meeting.largest([int(value) for value in values])
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


class HierarchicalGroup:
    """Talk that grows with nodes: ranks to the first of their node, those to the first of all.

    Every rank of the group calls the same methods in the same order. Made together: each says
    which `node` it is on.
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
        """True on the rank that speaks for its node."""
        return self._rank == self._mates[0]

    @property
    def is_root(self) -> bool:
        return self._rank == 0

    @property
    def mates(self) -> list[int]:
        """The group's ranks on this node."""
        return self._mates

    def gather_node(self, value: Any) -> list[Any]:
        """What each rank of the node gave, on its first rank; empty on others."""
        return self._gather(value, self._mates)

    def gather_firsts(self, value: Any) -> list[Any]:
        """What each node's first rank gave, on the root; empty on others. First ranks only."""
        return self._gather(value, self._firsts)

    def scatter_firsts(self, values: Sequence[Any]) -> Any:
        """The root's word for this node; `values` has one for each. First ranks only."""
        return self._scatter(values, self._firsts)

    def scatter_node(self, values: Sequence[Any]) -> Any:
        """The first rank's word for this rank; `values` has one for each of the node."""
        return self._scatter(values, self._mates)

    def gather_all(self, value: Any) -> list[Any]:
        """What every rank gave, by rank, on the root; empty on others."""
        mine = dict(zip(self._mates, self.gather_node(value), strict=False))
        if not self.is_first:
            return []
        every = {rank: v for node in self.gather_firsts(mine) for rank, v in node.items()}
        return [every[rank] for rank in sorted(every)]

    def scatter_all(self, values: Sequence[Any]) -> Any:
        """The root's word for this rank; `values` has one for each rank."""
        node: Sequence[Any] = []
        if self.is_first:
            by_node: dict[int, list[Any]] = {self._nodes[first]: [] for first in self._firsts}
            for rank, value in enumerate(values):
                by_node[self._nodes[rank]].append(value)
            node = self.scatter_firsts(list(by_node.values()))
        return self.scatter_node(node)

    def agree(self, problem: str | None) -> list[str]:
        """Every rank's problem, on every rank, in the order of nodes; empty when there is none."""
        found = [text for text in self.gather_node(problem) if text]
        verdict: list[str] = []
        if self.is_first:
            told = [text for node in self.gather_firsts(found) for text in node]
            verdict = self.scatter_firsts([told] * len(self._firsts))
        agreed: list[str] = self.scatter_node([verdict] * len(self._mates))
        return agreed

    def _gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """To the first of `ranks`, one after another: no group of their own is needed."""
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
