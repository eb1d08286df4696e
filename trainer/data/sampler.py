"""Samplers for `torch.utils.data.DataLoader` on top of the elastic data order.

Both begin where the session stands when they are iterated, and neither has a state: what a step
trains on follows from the step's number. A loader may therefore fetch ahead as far as it likes;
what it fetched and nobody trained on comes again after a resume, once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from holdfast.contracts.errors import SpecError
from holdfast.trainer.data.order import DataOrder, local_batch


class ElasticSampler(Sampler[list[int]]):
    """One list of sample ids per step for this rank; give it as a loader's `batch_sampler`.

    A sampler made after a resume, at any rank count, goes on where the last committed step
    ended.
    """

    def __init__(
        self,
        order: DataOrder,
        *,
        rank: int,
        world_size: int,
        first_step: int | Callable[[], int],
        last_step: int,
    ) -> None:
        """Steps are counted from 1, both ends are included. Raises `SpecError` on a bad split.

        `first_step` may be a function, asked when an iteration begins.
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
        return self._first_step() if callable(self._first_step) else self._first_step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.last_step + 1):
            self.reached = max(self.reached, step)
            yield self.order.rank_ids(step, self.rank, self.world_size).tolist()

    def __len__(self) -> int:
        return max(0, self.last_step - self.first_step + 1)


class ElasticDistributedSampler(Sampler[int]):
    """Single sample ids, an epoch at a time, in place of torch's `DistributedSampler`.

    An iteration gives what is left of the epoch: the ids of each step whose first sample lies in
    it. Batches of `local_batch` ids, or of a size that divides it, are the session's steps.
    """

    def __init__(
        self, order: DataOrder, *, rank: int, world_size: int, first_step: Callable[[], int]
    ) -> None:
        """`first_step` tells the step under way. Raises `SpecError` on a bad split."""
        self.local_batch = local_batch(order.global_batch, world_size)
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self._first_step = first_step
        self.reached = 0

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that an iteration begun now would go through."""
        return self.order.epoch(self._first_step())

    def set_epoch(self, epoch: int) -> None:
        """Changes nothing: the epoch follows from the step. Raises `SpecError` on another one."""
        if epoch != self.epoch:
            raise SpecError(
                f"set_epoch({epoch}): after step {self._first_step() - 1} the data stands in "
                f"epoch {self.epoch}; expected that one. Begin the loop over epochs at "
                "session.epoch, and train on every batch of an epoch"
            )

    def __iter__(self) -> Iterator[int]:
        for step in self._steps():
            self.reached = max(self.reached, step)
            yield from self.order.rank_ids(step, self.rank, self.world_size).tolist()

    def __len__(self) -> int:
        return len(self._steps()) * self.local_batch

    def _steps(self) -> range:
        first = self._first_step()
        # No epoch has more steps than samples, and steps are in the order of their epochs.
        within = range(first, first + self.order.samples + 1)
        return within[: bisect_right(within, self.order.epoch(first), key=self.order.epoch)]
