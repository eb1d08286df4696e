"""Small messages between ranks at the start and at saves, over the session's own connections.

The program's process groups are never used. A collective between two of the program's collectives
would deadlock as soon as one rank is late. An error on one rank is sent to all ranks, so that no
rank waits for a rank that has raised.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from holdfast.contracts import errors
from holdfast.contracts.node.rank_status import SAID_VALUE_MAX, RankStatusTable
from holdfast.trainer.ranks.meeting import Boundary, NodeMeeting
from holdfast.trainer.ranks.rank_tree import TIMEOUT_S, RankTree

TIMEOUT: Final = timedelta(seconds=TIMEOUT_S)
# Ranks of several nodes get an answer at different moments, but not that different.
FAR_ABSENT_S: Final = 30.0

T = TypeVar("T")
Group = dist.ProcessGroup | RankTree | None
# All ranks create their control groups in the same order, so this number is equal on all of them.
_serials: Final = itertools.count()


class ControlGroup:
    """All ranks of the program. With a single process there is no communication.

    `stage_group` contains the ranks that save together: the ranks of the pipeline stage, or all
    ranks if there are no stages.
    """

    def __init__(self) -> None:
        """Connect the ranks. Every rank must call this at the same point."""
        self.rank, self.world_size = 0, 1
        self.group = RankTree()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            # Torch's store outlives a session, so a second session must not find the token and the
            # addresses of the first.
            store = PrefixStore(f"holdfast {next(_serials)}", _get_default_store())
            self.group = RankTree.over_store(store, self.rank, self.world_size)
        self.stage_group = self.group
        self._meeting: NodeMeeting | None = None
        self._status_table: RankStatusTable | None = None

    def meet_on(self, status_table: RankStatusTable, local_rank: int) -> None:
        """Use `status_table` to agree on numbers from now on, if it has a record of every rank."""
        self._status_table = status_table
        # Only a table with a record of every rank is the memory of all of them: with several nodes,
        # each node has a separate table and the tree decides, see decision 43.
        if self.world_size > 1 and status_table.ranks == self.world_size:
            self._meeting = NodeMeeting(status_table, local_rank)

    def join_stage(self, stage: int) -> None:
        """Connect the ranks of each stage. Every rank calls this with its own."""
        self.stage_group = self.group.split(stage) or self.group

    def close(self) -> None:
        """Leave the other ranks in an orderly way. No message may be pending."""
        if self._meeting is not None:
            self._meeting.close()
        self.stage_group.close()
        self.group.close()

    def share(self, compute: Callable[[], T]) -> T:
        """Run `compute` on rank 0 and return its result on every rank. Errors raise everywhere."""
        value, error = attempt(compute) if self.rank == 0 else (None, None)
        # An error is sent like a value. Otherwise the others would wait for a rank that has raised.
        sent = self.group.broadcast((value, _text_of(error)))
        shared: T = _values([sent if self.rank else (value, "")], error)[0]
        return shared

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Return the results of `compute` by rank. One rank's error is raised on every rank."""
        value, error = attempt(compute)
        return _values(self.group.gather_all((value, _text_of(error))), error)

    def largest(self, values: Sequence[int], at: Boundary | None = None) -> list[int]:
        """Return the largest of each number over all ranks. Every rank passes the same count.

        With `at`, raise `SessionError` if a rank of this node has passed it.
        """
        # A meeting stores a value and the meeting's number in one word, so it must fit beside it.
        numbers = [min(int(value), SAID_VALUE_MAX) for value in values]
        if self._meeting is not None:
            return self._meeting.largest(numbers, at)
        if at is None:
            return self.group.largest(numbers)
        with self.group.watched(partial(self._require_presence, at)):
            return self.group.largest(numbers)

    def _require_presence(self, at: Boundary, waited_s: float) -> None:
        """Raise `SessionError` if a rank of this node passed `at` long ago.

        A rank that had the answer continues too, a moment before the others have it.
        """
        # The table shows only this node's ranks. An answer reaches ranks at different moments, so a
        # rank that has left may just have heard it earlier.
        if self._status_table is None or waited_s < FAR_ABSENT_S:
            return
        records = self._status_table.records()
        if absent := [record.rank for record in records if at.has_left(record)]:
            raise at.error([self.rank], absent)


@contextlib.contextmanager
def tree_over(group: Group) -> Iterator[RankTree]:
    """Return the tree of a group's ranks. One that is made for a process group is closed again.

    All ranks of the group call this. Without a group, this process is the only rank.
    """
    if isinstance(group, RankTree):
        yield group
        return
    tree = RankTree()
    if group is not None and dist.get_world_size(group) > 1:
        # The group's own collective is used once, to exchange addresses. All its ranks are here.
        tree = RankTree.over_exchange(partial(_exchange, group), dist.get_rank(group), group.size())
    try:
        yield tree
    finally:
        tree.close()


def _exchange(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `act` and its error. All ranks raise the error after a collective."""
    try:
        return act(), None
    except Exception as error:
        # The other ranks wait for this rank's answer, so catch every error.
        return None, error


def problem_of(error: BaseException | None, rank: int) -> str | None:
    """Return an error's text with the rank's number, or None without an error."""
    return None if error is None else f"rank {rank}: {error}"


def _text_of(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _values(boxes: list[tuple[Any, str]], own: Exception | None) -> list[Any]:
    """Return the values, or raise the first error: the own one as is, another's as text."""
    # A rank's own error keeps its type and traceback. Another's is only known as text.
    if own is not None:
        raise own
    for rank, (_, problem) in enumerate(boxes):
        if problem:
            raise errors.HoldfastError(f"rank {rank} failed: {problem}")
    return [value for value, _ in boxes]


class HierarchicalGroup:
    """Communication whose cost grows with nodes: ranks to their node's first rank, those to rank 0.

    Every rank of the group calls the same methods in the same order. All ranks construct it
    together, each with its `node`.
    """

    def __init__(self, tree: RankTree, node: int) -> None:
        self._whole = tree
        self._nodes: list[int] = tree.gather_all(node)
        self._mates = [rank for rank, other in enumerate(self._nodes) if other == node]
        self._node = tree.split(node) or RankTree()
        # Every rank must take part in a split, even one that will be in no new tree.
        self._first_ranks = tree.split(0 if self.is_first else None)

    @property
    def is_first(self) -> bool:
        """True on the rank that represents its node."""
        return self._whole.index == self._mates[0]

    @property
    def is_root(self) -> bool:
        return self._whole.index == 0

    @property
    def mates(self) -> list[int]:
        """The group's ranks on this node."""
        return self._mates

    def close(self) -> None:
        """Leave in an orderly way."""
        self._node.close()
        if self._first_ranks is not None:
            self._first_ranks.close()

    def gather_node(self, value: Any) -> list[Any]:
        """Return each value of the node's ranks on its first rank, and [] on others."""
        return self._node.gather(value)

    def gather_firsts(self, value: Any) -> list[Any]:
        """Return all first ranks' values on the root, and [] elsewhere. First ranks only."""
        return self._firsts.gather(value)

    def scatter_firsts(self, values: Sequence[Any]) -> Any:
        """Return this node's entry of the root's `values`. First ranks only."""
        return self._firsts.scatter(values)

    def scatter_node(self, values: Sequence[Any]) -> Any:
        """Return this rank's entry of the first rank's `values`, one for each rank of the node."""
        return self._node.scatter(values)

    def gather_all(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on the root, and [] on others."""
        return self._whole.gather(value)

    def scatter_all(self, values: Sequence[Any]) -> Any:
        """Return this rank's entry of the root's `values`."""
        return self._whole.scatter(values)

    def agree(self, problem: str | None) -> list[str]:
        """Return the problems of all ranks on every rank, ordered by rank. Empty without any."""
        return [text for text in self._whole.gather_all(problem) if text]

    @property
    def _firsts(self) -> RankTree:
        assert self._first_ranks is not None, "only the first rank of a node calls this"
        return self._first_ranks


# Errors while loading: what one rank raises, all ranks raise, by one collective.

W = TypeVar("W")
PortableError = tuple[str, str, dict[str, Any]]
_KINDS: Final[dict[str, Callable[..., errors.CheckpointError]]] = {
    kind.__name__: kind
    for kind in (errors.DamagedCheckpointError, errors.KeyMismatchError, errors.MirrorError)
}


def agree(act: Callable[[], T], tree: RankTree, describe: Callable[[T], W]) -> tuple[T, list[W]]:
    """Return the result of `act`, and every rank's `describe` of its result, by one collective.

    If `act` raised on any rank, all ranks raise the first error.
    """
    value, error = attempt(act)
    own = None if error is not None else describe(cast(T, value))
    gathered = tree.gather_all((portable(error), own))
    raise_first(error, [one for one, _ in gathered])
    return cast(T, value), [cast(W, each) for _, each in gathered]


def raise_first(error: Exception | None, failed: Sequence[PortableError | None]) -> None:
    """Raise the first error of all ranks, `failed`, on every rank. `error` is this rank's own."""
    rank, first = next(((r, one) for r, one in enumerate(failed) if one is not None), (0, None))
    if first is None:
        return
    kind, text, details = first
    if isinstance(error, errors.HoldfastError) and type(error).__name__ == kind:
        raise error
    made = _KINDS.get(kind, errors.CheckpointError)
    raise made(f"rank {rank}: not loaded: {kind}: {text}", **details) from error


def portable(error: Exception | None) -> PortableError | None:
    """Return an error in the form that is sent to other ranks: kind, message and details."""
    return None if error is None else (type(error).__name__, str(error), _details(error))


def _details(error: Exception) -> dict[str, Any]:
    """Return the attributes of a checkpoint error besides its message."""
    names = ("damaged", "missing", "extra", "reshaped", "is_passing")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}
