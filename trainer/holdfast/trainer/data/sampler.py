"""Samplers for `torch.utils.data.DataLoader` on top of the elastic data order.

Both start at the session's current step when they are iterated. Neither has a state, because the
data of a step follows from the step's number. So a loader may fetch ahead as far as it likes. A
resume yields the samples again that were fetched and not trained on, once.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from holdfast.contracts.errors import SpecError
from holdfast.trainer.arguments import whole
from holdfast.trainer.data.order import DataOrder, local_batch

_STREAM: Final = (
    "Give session.stream a source that names its shards, such as TextLines or a "
    "datasets.IterableDataset, or use session.sampler with an indexed dataset"
)
# An evaluation reads in order.
_SHUFFLING: Final = (DistributedSampler, RandomSampler)
# Drawing this many ids takes a few times as long as drawing one.
DRAWN_AT_ONCE: Final = 256


class DataPlace(Protocol):
    """The position of training, read whenever an iteration begins."""

    @property
    def next_step(self) -> int:
        """The current step, counted from 1."""
        ...

    @property
    def open_epoch(self) -> int | None:
        """The current epoch of the program's loop, or None if it does not count epochs."""
        ...

    def begin(self) -> None:
        """Called before the first ids of an iteration are yielded."""
        ...


class _Ids:
    """The ids of one rank's steps, drawn for several steps at once and given step by step."""

    def __init__(self, sampler: ElasticSampler | ElasticDistributedSampler) -> None:
        self._sampler = sampler
        self._steps = range(0)
        self._order = sampler.order
        self._ids: list[list[int]] = []

    def of(self, step: int) -> list[int]:
        """Return the ids of `step`, in the sampler's present order."""
        sampler = self._sampler
        if step not in self._steps or sampler.order is not self._order:
            self._order = sampler.order
            self._steps = range(step, step + max(1, DRAWN_AT_ONCE // sampler.local_batch))
            drawn = self._order.rank_ids_of(self._steps, sampler.rank, sampler.world_size)
            self._ids = drawn.tolist()
        return self._ids[step - self._steps.start]


class ElasticSampler(Sampler[list[int]]):
    """One list of sample ids per step for this rank. Use it as a loader's `batch_sampler`.

    A sampler created after a resume, at any rank count, continues after the last committed step. In
    a loop over `Session.epochs`, an iteration ends with the epoch.
    """

    def __init__(
        self,
        order: DataOrder,
        *,
        rank: int,
        world_size: int,
        first_step: int | DataPlace,
        last_step: int,
    ) -> None:
        """Steps count from 1, and both ends are included. Raises `SpecError` on a bad split.

        `first_step` may be a `DataPlace`, which is read when an iteration begins.
        """
        if not isinstance(order, DataOrder):
            raise TypeError(f"order={order!r}: expected a DataOrder")
        self.world_size = whole(world_size, "world_size", least=1)
        self.local_batch = local_batch(order.global_batch, self.world_size)
        self.order = order
        self.rank = whole(rank, "rank", most=self.world_size - 1)
        is_place = hasattr(first_step, "next_step")
        self._first_step = first_step if is_place else whole(first_step, "first_step", least=1)
        self.last_step = whole(last_step, "last_step")
        # The last step for which ids were drawn. A loader fetches ahead of training.
        self.reached = 0

    @property
    def first_step(self) -> int:
        """The first step of an iteration that would begin now."""
        first = self._first_step
        return first if isinstance(first, int) else first.next_step

    def __iter__(self) -> Iterator[list[int]]:
        if not isinstance(self._first_step, int):
            self._first_step.begin()
        steps, epoch, ids = self._steps(), self._epoch, _Ids(self)
        for step in steps:
            if epoch is not None and self.order.epoch(step) > epoch:
                # More data was skipped meanwhile, including the rest of the epoch.
                return
            self.reached = max(self.reached, step)
            yield ids.of(step)

    def __len__(self) -> int:
        return len(self._steps())

    def _steps(self) -> range:
        steps = range(self.first_step, self.last_step + 1)
        epoch = self._epoch
        return steps if epoch is None else _until(steps, epoch, self.order)

    @property
    def _epoch(self) -> int | None:
        return None if isinstance(self._first_step, int) else self._first_step.open_epoch


class ElasticDistributedSampler(Sampler[int]):
    """Single sample ids, one epoch at a time. It replaces torch's `DistributedSampler`.

    An iteration yields the rest of the epoch: the ids of each step whose first sample is in it.
    Batches of `local_batch` ids, or of one of its divisors, match the session's steps.
    """

    def __init__(self, order: DataOrder, *, rank: int, world_size: int, place: DataPlace) -> None:
        """`place` provides the current step. Raises `SpecError` on a bad split."""
        self.local_batch = local_batch(order.global_batch, world_size)
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self._place = place
        self.reached = 0
        # The number that the program gives its first epoch, 0 or 1.
        self._first_epoch: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of an iteration that would begin now."""
        epoch = self._place.open_epoch
        return self.order.epoch(self._place.next_step) if epoch is None else epoch

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the epoch follows from the step. Raises `SpecError` on another epoch.

        The program may count its epochs from 0 or from 1.
        """
        first = epoch - self.epoch
        if first not in ({0, 1} if self._first_epoch is None else {self._first_epoch}):
            raise SpecError(
                f"set_epoch({epoch}): after step {self._place.next_step - 1} training is in epoch "
                f"{self.epoch + (self._first_epoch or 0)}; expected that number. Loop over "
                "session.epochs(n), and train on every batch of an epoch"
            )
        self._first_epoch = first

    def __iter__(self) -> Iterator[int]:
        self._place.begin()
        steps, epoch, ids = self._steps(), self.epoch, _Ids(self)
        for step in steps:
            if self.order.epoch(step) > epoch:
                return
            self.reached = max(self.reached, step)
            yield from ids.of(step)

    def __len__(self) -> int:
        return len(self._steps()) * self.local_batch

    def __bool__(self) -> bool:
        """True, also at the end of an epoch: a program may ask so whether it has a sampler."""
        return True

    def _steps(self) -> range:
        first, epoch = self._place.next_step, self.epoch
        # An epoch has no more steps than samples. Unfinished earlier epochs come before it.
        behind = max(0, epoch - self.order.epoch(first))
        within = range(first, first + self.order.samples * (1 + behind) + 1)
        return _until(within, epoch, self.order)


def is_of_grain(item: object) -> bool:
    """Return True for an object of the package `grain`, or of a class below one."""
    return any(kind.__module__.startswith("grain.") for kind in type(item).__mro__)


def check_order(loader: object, is_saved: Callable[[object], bool]) -> int:
    """Return how many batches of a loader are one step, which is 1 without a session's sampler.

    A loader may use a session's sampler, or have its own state, as torchdata's loaders do, if
    `is_saved` returns True for it. Without workers, that state does not include a generator given
    to the loader. Raises `SpecError` for a loader whose order a resume cannot continue.
    """
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    for each in (sampler, batches, getattr(batches, "sampler", None)):
        if isinstance(each, ElasticDistributedSampler):
            size = loader.batch_size if isinstance(loader, DataLoader) else None
            return batches_per_step(each.local_batch, size)
        if isinstance(each, ElasticSampler):
            return 1
    kind = type(loader).__name__
    if is_of_grain(loader):
        if not is_saved(loader):
            raise SpecError(
                f"no checkpoint has the place of this {kind} of grain, so a resume would begin "
                "again with its first samples; loop over its iterator, batches = iter(...), and "
                'pass that to Session as per_rank={"batches": batches}, for one number of ranks'
            )
        return 1
    if callable(getattr(loader, "load_state_dict", None)):
        if not is_saved(loader):
            raise SpecError(
                f"no checkpoint has the state of this {kind}, so a resume would begin again with "
                f"its first samples. {_STREAM}; Session also takes a loader in per_rank, for one "
                "number of ranks"
            )
        has_own = isinstance(loader, DataLoader) and loader.generator is not None
        if not has_own or getattr(loader, "num_workers", 0) > 0:
            return 1
        raise SpecError(
            "this loader has its own generator, which its state does not contain. After a "
            "resume the next epoch would have another order. Leave the generator out; then torch's "
            "own random state, which checkpoints contain, sets the order"
        )
    if isinstance(getattr(loader, "dataset", loader), IterableDataset):
        raise SpecError(
            f"this {kind} reads a stream without a state, so a resume would begin again with its "
            f"first samples. {_STREAM}"
        )
    if not isinstance(loader, DataLoader):
        return 1
    raise SpecError(
        f"this DataLoader has its own sampler ({type(loader.sampler).__name__}), whose order "
        "no resume can continue; give it sampler=session.distributed_sampler(...) or "
        "batch_sampler=session.sampler(...), or use torchdata's StatefulDataLoader in per_rank"
    )


def note_on_open_loaders(is_saved: Callable[[object], bool]) -> str:
    """Return a note if the program reads a stream whose place no checkpoint has, or an empty text.

    A loop over steps does not name its loader, and the program may skip what it has read by itself,
    so this is not an error. `is_saved` says whether a dataset or a loader is part of a checkpoint.
    torchdata's loaders keep a state, so they are left out here.
    """
    if not any(_open_loaders(is_saved)):
        return ""
    # The iterator may be one of a program's garbage.
    gc.collect()
    for what in _open_loaders(is_saved):
        return (
            f"a DataLoader {what} was open when the steps began, and no checkpoint has its place. "
            f"Unless the program skips what it has read, a resume begins again. {_STREAM}"
        )
    return ""


def _open_loaders(is_saved: Callable[[object], bool]) -> Iterator[str]:
    """Yield what torch's iterators read whose place no checkpoint has."""
    # Each instance refers to its class. A loop over all objects would take three times as long.
    for each in gc.get_referrers(_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
        if type(each) not in {_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter}:
            continue
        dataset, batches = getattr(each, "_dataset", None), getattr(each, "_index_sampler", None)
        sampler = getattr(batches, "sampler", batches)
        if isinstance(dataset, IterableDataset):
            if not is_saved(dataset):
                yield f"over the stream {type(dataset).__name__}"
        elif type(sampler) in _SHUFFLING and not is_saved(sampler):
            yield f"in the order of a {type(sampler).__name__}"


def batches_per_step(local_batch: int, batch_size: int | None) -> int:
    """Return how many batches of a loader are one step. Raises `SpecError` if they do not fit."""
    if batch_size is None:
        return 1
    if batch_size < 1 or local_batch % batch_size:
        raise SpecError(
            f"batch_size={batch_size}: this rank trains on {local_batch} samples per step, its "
            "share of the global batch. Expected this number or one of its divisors"
        )
    return local_batch // batch_size


def _until(steps: range, epoch: int, order: DataOrder) -> range:
    """Return the `steps` that begin in `epoch` or before. Steps are ordered by epoch."""
    return steps[: bisect_right(steps, epoch, key=order.epoch)]
