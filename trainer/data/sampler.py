"""Samplers for `torch.utils.data.DataLoader` on top of the elastic data order.

Both begin where the session stands when they are iterated, and neither has a state: what a step
trains on follows from the step's number. A loader may therefore fetch ahead as far as it likes;
what it fetched and nobody trained on comes again after a resume, once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol

from torch.utils.data import DataLoader, Sampler

from holdfast.contracts.errors import SpecError
from holdfast.trainer.data.order import DataOrder, local_batch


class Place(Protocol):
    """Where training stands, asked whenever an iteration begins."""

    @property
    def next_step(self) -> int:
        """The step under way, from 1."""
        ...

    @property
    def open_epoch(self) -> int | None:
        """The epoch that the program's loop is in, None when it does not count epochs."""
        ...

    def begin(self) -> None:
        """Called before the first ids of an iteration are given."""
        ...


class ElasticSampler(Sampler[list[int]]):
    """One list of sample ids per step for this rank; give it as a loader's `batch_sampler`.

    A sampler made after a resume, at any rank count, goes on where the last committed step
    ended. In a loop over `Session.epochs` an iteration ends with the epoch.
    """

    def __init__(
        self,
        order: DataOrder,
        *,
        rank: int,
        world_size: int,
        first_step: int | Place,
        last_step: int,
    ) -> None:
        """Steps are counted from 1, both ends are included. Raises `SpecError` on a bad split.

        `first_step` may be a place, asked when an iteration begins.
        """
        self.local_batch = local_batch(order.global_batch, world_size)
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self._first_step = first_step
        self.last_step = last_step
        # The last step that ids were drawn for; a loader fetches ahead of training.
        self.reached = 0

    @property
    def first_step(self) -> int:
        """The step that an iteration begun now would begin with."""
        first = self._first_step
        return first if isinstance(first, int) else first.next_step

    def __iter__(self) -> Iterator[list[int]]:
        if not isinstance(self._first_step, int):
            self._first_step.begin()
        steps, epoch = self._steps(), self._epoch
        for step in steps:
            if epoch is not None and self.order.epoch(step) > epoch:
                # Data was passed over meanwhile, and with it the rest of the epoch.
                return
            self.reached = max(self.reached, step)
            yield self.order.rank_ids(step, self.rank, self.world_size).tolist()

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
    """Single sample ids, an epoch at a time, in place of torch's `DistributedSampler`.

    An iteration gives what is left of the epoch: the ids of each step whose first sample lies in
    it. Batches of `local_batch` ids, or of a size that divides it, are the session's steps.
    """

    def __init__(self, order: DataOrder, *, rank: int, world_size: int, place: Place) -> None:
        """`place` tells the step under way. Raises `SpecError` on a bad split."""
        self.local_batch = local_batch(order.global_batch, world_size)
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self._place = place
        self.reached = 0

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that an iteration begun now would go through."""
        epoch = self._place.open_epoch
        return self.order.epoch(self._place.next_step) if epoch is None else epoch

    def set_epoch(self, epoch: int) -> None:
        """Changes nothing: the epoch follows from the step. Raises `SpecError` on another one."""
        if epoch != self.epoch:
            raise SpecError(
                f"set_epoch({epoch}): after step {self._place.next_step - 1} training is in epoch "
                f"{self.epoch}; expected that one. Loop over session.epochs(n), and train on "
                "every batch of an epoch"
            )

    def __iter__(self) -> Iterator[int]:
        self._place.begin()
        steps, epoch = self._steps(), self.epoch
        for step in steps:
            if self.order.epoch(step) > epoch:
                return
            self.reached = max(self.reached, step)
            yield from self.order.rank_ids(step, self.rank, self.world_size).tolist()

    def __len__(self) -> int:
        return len(self._steps()) * self.local_batch

    def _steps(self) -> range:
        first, epoch = self._place.next_step, self.epoch
        # No epoch has more steps than samples; left early, former ones come before it.
        behind = max(0, epoch - self.order.epoch(first))
        within = range(first, first + self.order.samples * (1 + behind) + 1)
        return _until(within, epoch, self.order)


def check_order(loader: object) -> None:
    """Raises `SpecError` for a DataLoader whose order no resume can continue.

    It may have a sampler of the session's, or a state of its own, as torchdata's has. That state
    leaves a generator given to it out where the loader has no workers.
    """
    if not isinstance(loader, DataLoader):
        return
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    if any(isinstance(each, ElasticSampler | ElasticDistributedSampler) for each in samplers):
        return
    if hasattr(loader, "state_dict"):
        if loader.generator is None or loader.num_workers > 0:
            return
        raise SpecError(
            "this loader has a generator of its own, which its state does not hold: after a resume "
            "the next epoch would have another order. Leave the generator out, and torch's own "
            "random state, which checkpoints hold, gives the order"
        )
    raise SpecError(
        f"this DataLoader has a sampler of its own ({type(loader.sampler).__name__}), whose order "
        "no resume can continue; give it sampler=session.distributed_sampler(...) or "
        "batch_sampler=session.sampler(...), or use torchdata's StatefulDataLoader in per_rank"
    )


def _until(steps: range, epoch: int, order: DataOrder) -> range:
    """Those of `steps` that begin in `epoch` or before it; they are in the order of epochs."""
    return steps[: bisect_right(steps, epoch, key=order.epoch)]
