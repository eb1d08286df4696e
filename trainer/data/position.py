"""Where a run stands in its data: the order in use, and how it continues the restored one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.contracts.errors import SpecError
from holdfast.trainer.data.order import Batch, DataOrder, SkipWindow, joined
from holdfast.trainer.data.sampler import ElasticDistributedSampler, ElasticSampler


class Position:
    """The data of one rank's session, as a function of the steps that are complete.

    `completed` is their number, which the session's loop counts up; `former` is what the restored
    checkpoint says of its data, empty when there is none.
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
        """`epoch` is the one whose end had not been passed when the checkpoint was saved.

        `begins` is called when a sampler's first ids are asked for, before any is given.
        """
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self._skips, self._former, self.completed = skips, dict(former), completed
        # The epoch that the program's own loop is in, where it goes by `Session.epochs`.
        self.open_epoch: int | None = None
        # True once a step of that epoch is complete; its end is then still to come.
        self.in_epoch = False
        # True from the first step of this launch on, where the loop goes by `Session.steps`.
        self.has_begun, self._given_before = False, 0
        self._begins, self._restored = begins, (completed, epoch)
        self._order: DataOrder | None = None
        self._samplers: weakref.WeakSet[ElasticSampler | ElasticDistributedSampler] = (
            weakref.WeakSet()
        )

    @property
    def reached(self) -> int:
        """The last step that ids were drawn for, which may be ahead of training."""
        return max([self.completed, *(sampler.reached for sampler in self._samplers)])

    def pass_over(self, windows: Sequence[SkipWindow]) -> None:
        """Pass over more data, from steps on that no rank has drawn ids for."""
        self._skips = joined(self._skips, [(w.first_step, w.steps) for w in windows])
        if self._order is not None:
            self._order = replace(self._order, skips=self._skips)
        for sampler in self._samplers:
            sampler.order = replace(sampler.order, skips=self._skips)

    @property
    def next_step(self) -> int:
        """The step under way, or the next one, from 1."""
        return self.completed + 1

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the program's loop is in, else that of the next step's data.

        Without a loop over epochs it is 0 while no order is known.
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
        """One more step is complete; returns its number."""
        self.completed += 1
        self.in_epoch = self.open_epoch is not None
        return self.completed

    def finish_epoch(self) -> None:
        """The end of the open epoch has been passed."""
        assert self.open_epoch is not None
        self.open_epoch, self.in_epoch = self.open_epoch + 1, False

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True when the data of the epoch that the loop is in has been used up."""
        if self.open_epoch is None or self._order is None:
            return False
        return self._order.epoch(self.next_step) > self.open_epoch

    def begin(self) -> None:
        """A sampler's ids are asked for; the first call alone does something."""
        begins, self._begins = self._begins, None
        if begins is not None:
            begins()
            self._look_for_lost_end()

    def order(self, samples: int, global_batch: int) -> DataOrder:
        """The order of a dataset; says so when it is not the one that was trained with before.

        Raises `SpecError` where a step would hold samples twice.
        """
        if 1 <= samples < global_batch:
            raise SpecError(
                f"a dataset of {samples} samples and a global batch of {global_batch}: each step "
                f"would hold samples more than once. Choose a global batch of {samples} or less"
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
        """This rank's sample ids of the step under way, or of one `ahead` steps after it."""
        order = self.order(samples, global_batch)
        step = self.next_step + ahead
        if not self.has_begun:
            self._given_before = step
        elif step == self._given_before and self.rank == 0:
            self._given_before = 0
            print(
                f"holdfast: the samples of step {step} were asked for before the loop and again "
                "within the step. A program that fetches each batch ahead needs "
                "session.batch(..., ahead=1) within the loop; as it is, a resume may train on "
                "other batches than an uninterrupted run",
                flush=True,
            )
        return order.rank_ids(step, self.rank, self.world_size).view(Batch)

    def sampler(self, samples: int, global_batch: int, total: int) -> ElasticSampler:
        """Batches from the step under way to step `total`."""
        sampler = ElasticSampler(
            self.order(samples, global_batch),
            rank=self.rank,
            world_size=self.world_size,
            first_step=self,
            last_step=total,
        )
        self._samplers.add(sampler)
        return sampler

    def distributed_sampler(
        self, samples: int, global_batch: int, batch_size: int | None
    ) -> ElasticDistributedSampler:
        """Single ids of the rest of the epoch; raises `SpecError` on a batch that does not fit."""
        sampler = ElasticDistributedSampler(
            self.order(samples, global_batch),
            rank=self.rank,
            world_size=self.world_size,
            place=self,
        )
        if batch_size is not None and (batch_size < 1 or sampler.local_batch % batch_size):
            raise SpecError(
                f"batch_size={batch_size}: a global batch of {global_batch} gives each of "
                f"{self.world_size} ranks {sampler.local_batch} samples per step; expected that "
                "or a size that divides it"
            )
        self._samplers.add(sampler)
        return sampler

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
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

    def _look_for_lost_end(self) -> None:
        """A resume between two epochs of a loop that the session does not know."""
        order, step = self._order, self.completed
        if order is None or self.open_epoch is not None or not 0 < step == self._restored[0]:
            return
        if order.epoch(step + 1) > order.epoch(step) and self.rank == 0:
            print(
                f"holdfast: step {step} was the last of epoch {order.epoch(step)}, and this resume "
                "does not know whether the end of that epoch (evaluation, scheduler.step()) was "
                "run. Loop over session.epochs(n), which runs it again where it must",
                flush=True,
            )

    def _compare_with_former(self, order: DataOrder) -> None:
        now = {"samples": order.samples, "global_batch": order.global_batch, "seed": order.seed}
        former = {key: self._former.get(key, value) for key, value in now.items()}
        changed = [f"{key} {former[key]} → {now[key]}" for key in now if former[key] != now[key]]
        if changed and self.rank == 0:
            print(
                f"holdfast: the data order changed after step {self.completed}: "
                f"{', '.join(changed)}; samples may repeat or be passed over",
                flush=True,
            )
