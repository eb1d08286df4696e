"""A run's position in its data: the current order, and how it continues the restored one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.contracts.errors import SpecError
from holdfast.contracts.reporting import report
from holdfast.trainer.data.order import Batch, DataOrder, SkipWindow, joined
from holdfast.trainer.data.sampler import ElasticDistributedSampler, ElasticSampler


class Position:
    """The data of one rank's session, as a function of the complete steps.

    `completed` is the number of complete steps. The session's loop increments it. `former` is the
    restored checkpoint's record of its data, empty without a checkpoint.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        seed: int,
        skips: tuple[SkipWindow, ...],
        former: Mapping[str, Any],
        completed: int,
        epoch: int | None = None,
        begins: Callable[[], None] | None = None,
    ) -> None:
        """`epoch` is the epoch whose end was not complete when the checkpoint was saved.

        `begins` is called before a sampler gives its first ids.
        """
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self._skips, self._former, self.completed = skips, dict(former), completed
        # The current epoch of the program's loop, if it uses `Session.epochs`.
        self.open_epoch: int | None = None
        # True after a step of that epoch is complete, until the epoch's end is complete.
        self.in_epoch = False
        # True after the first step of this launch began, in a loop over `Session.steps`.
        self.has_begun, self._given_before = False, 0
        self._begins, self._restored = begins, (completed, epoch)
        self._order: DataOrder | None = None
        self._samplers: weakref.WeakSet[ElasticSampler | ElasticDistributedSampler] = (
            weakref.WeakSet()
        )

    @property
    def reached(self) -> int:
        """The last step for which ids were drawn. It may be ahead of training."""
        return max([self.completed, *(sampler.reached for sampler in self._samplers)])

    def skip(self, windows: Sequence[SkipWindow]) -> None:
        """Skip more data, from steps for which no rank has drawn ids."""
        self._skips = joined(self._skips, [(w.first_step, w.steps) for w in windows])
        if self._order is not None:
            self._order = replace(self._order, skips=self._skips)
        for sampler in self._samplers:
            sampler.order = replace(sampler.order, skips=self._skips)

    @property
    def next_step(self) -> int:
        """The current step, or the next one, counted from 1."""
        return self.completed + 1

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the program's loop, or else of the next step's data.

        Without a loop over epochs, it is 0 until an order is known.
        """
        if self.open_epoch is not None:
            return self.open_epoch
        step, epoch = self._restored
        if epoch is not None and step == self.completed:
            return epoch
        if self._order is not None:
            return self._order.epoch(self.next_step)
        return int(self._former.get("position", 0)) // max(int(self._former.get("samples", 1)), 1)

    def finish_step(self) -> int:
        """Complete one more step. Return its number."""
        self.completed += 1
        self.in_epoch = self.open_epoch is not None
        return self.completed

    def finish_epoch(self) -> None:
        """Complete the end of the open epoch."""
        assert self.open_epoch is not None
        self.open_epoch, self.in_epoch = self.open_epoch + 1, False

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True if the data of the loop's current epoch is used up."""
        if self.open_epoch is None or self._order is None:
            return False
        return self._order.epoch(self.next_step) > self.open_epoch

    def begin(self) -> None:
        """Prepare for a sampler's first ids. Later calls do nothing."""
        begins, self._begins = self._begins, None
        if begins is not None:
            begins()
            self._warn_of_lost_end()

    def order(self, samples: int, global_batch: int) -> DataOrder:
        """Return the order of a dataset. Print a warning if it differs from the former order.

        Raises `SpecError` if a step would contain a sample twice.
        """
        if 1 <= samples < global_batch:
            raise SpecError(
                f"a dataset of {samples} samples and a global batch of {global_batch}: each step "
                f"would contain samples more than once. Choose a global batch of {samples} or less"
            )
        order = self._order
        if order is None or (order.samples, order.global_batch) != (samples, global_batch):
            order = DataOrder(
                samples=samples, global_batch=global_batch, seed=self.seed, skips=self._skips
            )
            self._order = order
            self._compare_with_former(order)
        return order

    def batch(self, samples: int, global_batch: int, ahead: int = 0) -> Batch:
        """Return this rank's sample ids of the current step, or of the step `ahead` steps later."""
        order = self.order(samples, global_batch)
        step = self.next_step + ahead
        if not self.has_begun:
            self._given_before = step
        elif step == self._given_before and self.rank == 0:
            self._given_before = 0
            report(
                f"holdfast: the samples of step {step} were asked for before the loop and again "
                "within the step. If the program fetches each batch ahead, call "
                "session.batch(..., ahead=1) within the loop. Otherwise a resume may train on "
                "other batches than an uninterrupted run",
            )
        return order.rank_ids(step, self.rank, self.world_size).view(Batch)

    def sampler(
        self, samples: int, global_batch: int, total: int, part: tuple[int, int] | None = None
    ) -> ElasticSampler:
        """Return a sampler of batches from the current step to step `total`.

        `part` is which part of each step this rank gets and how many there are, if that is not its
        own part of the session's.
        """
        rank, parts = part or (self.rank, self.world_size)
        sampler = ElasticSampler(
            self.order(samples, global_batch),
            rank=rank,
            world_size=parts,
            first_step=self,
            last_step=total,
        )
        self._samplers.add(sampler)
        return sampler

    def distributed_sampler(
        self, samples: int, global_batch: int, batch_size: int | None
    ) -> ElasticDistributedSampler:
        """Return a sampler of the epoch's remaining ids. Raises `SpecError` on a bad batch size."""
        sampler = ElasticDistributedSampler(
            self.order(samples, global_batch),
            rank=self.rank,
            world_size=self.world_size,
            place=self,
        )
        if batch_size is not None and (batch_size < 1 or sampler.local_batch % batch_size):
            raise SpecError(
                f"batch_size={batch_size}: a global batch of {global_batch} gives each of "
                f"{self.world_size} ranks {sampler.local_batch} samples per step; expected this "
                "number or one of its divisors"
            )
        self._samplers.add(sampler)
        return sampler

    def describe(self) -> dict[str, Any]:
        """Return the record that a checkpoint keeps of this position."""
        order = self._order
        if order is None:
            return dict(self._former)
        return {
            "samples": order.samples,
            "global_batch": order.global_batch,
            "seed": order.seed,
            "position": order.position(self.next_step),
            "skips": [[w.first_step, w.steps] for w in order.skips],
        }

    def _warn_of_lost_end(self) -> None:
        """Warn after a resume between two epochs, if the program does not use `epochs`."""
        order, step = self._order, self.completed
        if order is None or self.open_epoch is not None or not 0 < step == self._restored[0]:
            return
        if order.epoch(step + 1) > order.epoch(step) and self.rank == 0:
            report(
                f"holdfast: step {step} was the last of epoch {order.epoch(step)}, and this resume "
                "does not know whether the end of that epoch (evaluation, scheduler.step()) has "
                "run. Loop over session.epochs(n), which runs the end again if needed",
            )

    def _compare_with_former(self, order: DataOrder) -> None:
        now = {"samples": order.samples, "global_batch": order.global_batch, "seed": order.seed}
        former = {key: self._former.get(key, value) for key, value in now.items()}
        changed = [f"{key} {former[key]} → {now[key]}" for key in now if former[key] != now[key]]
        if changed and self.rank == 0:
            report(
                f"holdfast: the data order changed after step {self.completed}: "
                f"{', '.join(changed)}; samples may repeat or be skipped",
            )
