"""A run's position in its data: the current order, and how it continues the restored one."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from holdfast.contracts.errors import SpecError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.data.order import Batch, DataOrder, SkipWindow, joined
from holdfast.trainer.data.sampler import (
    ElasticDistributedSampler,
    ElasticSampler,
    batches_per_step,
)

# Of the orders beside the current one, the last to be used are recorded.
ORDERS_MAX: Final = 8


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
        seeds: Sequence[int] = (),
        skips: tuple[SkipWindow, ...],
        former: Mapping[str, Any],
        completed: int,
        epoch: int | None = None,
        steps_in_epoch: int = 0,
        begins: Callable[[], None] | None = None,
    ) -> None:
        """`epoch` is the epoch whose end was not complete when the checkpoint was saved.

        `steps_in_epoch` of its steps were complete. `seeds` are those of all ranks.
        `begins` is called before a sampler gives its first ids.
        """
        self.rank, self.world_size, self.seed, self._seeds = rank, world_size, seed, tuple(seeds)
        self._skips, self._former, self.completed = skips, dict(former), completed
        # The current epoch of the program's loop, if it uses `Session.epochs`, and the number of
        # complete steps when it began.
        self.open_epoch: int | None = None
        self._epoch_began = completed - steps_in_epoch
        self._spans_epochs = False
        # How many batches of the program's loader are one step, if that is known.
        self.batches_per_step = 1
        # The complete steps of the epoch in which the run resumed, until its first step is over.
        self.resumed_inside = steps_in_epoch
        # True after a step of that epoch is complete, until the epoch's end is complete.
        self.in_epoch = False
        # True after the first step of this launch began, in a loop over `Session.steps`.
        self.has_begun, self._given_before = False, 0
        self._begins, self._restored = begins, (completed, epoch)
        self._order: DataOrder | None = None
        # By samples and global batch: those that a checkpoint recorded, and those used since.
        self._orders: dict[tuple[int, int], DataOrder] = {}
        self._restored_order: DataOrder | None = None
        self._samplers: weakref.WeakSet[ElasticSampler | ElasticDistributedSampler] = (
            weakref.WeakSet()
        )
        self._read_former()

    @property
    def reached(self) -> int:
        """The last step for which ids were drawn. It may be ahead of training."""
        return max([self.completed, *(sampler.reached for sampler in self._samplers)])

    def skip(self, windows: Sequence[SkipWindow]) -> None:
        """Skip more data, from steps for which no rank has drawn ids."""
        self._skips = joined(self._skips, [(w.first_step, w.steps) for w in windows])
        for key, order in self._orders.items():
            self._orders[key] = replace(order, skips=self._skips)
        if self._order is not None:
            self._order = self._orders[self._order.samples, self._order.global_batch]
        for sampler in self._samplers:
            sampler.order = replace(sampler.order, skips=self._skips)

    @property
    def skips(self) -> tuple[SkipWindow, ...]:
        """The recorded windows of skipped data."""
        return self._skips

    @property
    def has_order(self) -> bool:
        """True if the program draws samples in a session's order."""
        return bool(self._orders)

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

    def begin_epochs(self, epoch: int, *, in_epoch: bool) -> None:
        """Begin the program's loop over epochs in `epoch`, unless it has begun before."""
        if self.open_epoch is None:
            self.open_epoch, self.in_epoch = epoch, in_epoch
            if not in_epoch:
                self._epoch_began = self.completed

    def finish_epoch(self) -> None:
        """Complete the end of the open epoch."""
        assert self.open_epoch is not None
        self.open_epoch, self.in_epoch = self.open_epoch + 1, False
        self._epoch_began, self.resumed_inside = self.completed, 0

    @property
    def steps_in_epoch(self) -> int:
        """The number of complete steps of the current epoch, 0 if it is not known.

        Without a loop over epochs, an `ElasticSampler` gives the data of all epochs as one.
        """
        if self.open_epoch is not None:
            return self.completed - self._epoch_began
        if self._spans_epochs:
            return self.completed
        if self._order is None:
            return 0
        before, epoch = range(1, self.next_step), self._order.epoch(self.next_step)
        return len(before) - bisect_left(before, epoch, key=self._order.epoch)

    def batches_before(self, per_step: int, batches: object = None) -> int:
        """Return the number of the epoch's batches before the current step, `per_step` in each.

        `batches` is the loader's iterator. It may know the number where this position does not.
        """
        self.batches_per_step = per_step
        if self.open_epoch is None and self._order is None:
            # Torch's loaders count what they gave, and torchdata's restore the number.
            return int(getattr(batches, "_num_yielded", 0))
        return self.steps_in_epoch * per_step

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
            order = self._begin_order(samples, global_batch)
            is_new = (samples, global_batch) not in self._orders
            self._order = self._orders[samples, global_batch] = order
            if is_new:
                self._compare_with_former(order)
        return order

    def common_seed(self) -> int:
        """Return the seed. Raises `SpecError` if ranks have others: their samples would overlap."""
        for rank, seed in enumerate(self._seeds):
            if seed != self._seeds[0]:
                raise SpecError(
                    f"Session(seed=…): rank 0 has {self._seeds[0]} and rank {rank} has {seed}, so "
                    "they would draw the samples in different orders; give all ranks the same seed"
                )
        return self.seed

    def _begin_order(self, samples: int, global_batch: int) -> DataOrder:
        """Return the order of a dataset. After a change of the global batch, it continues.

        A program that uses several sizes in turn keeps an order for each of them.
        """
        if known := self._orders.get((samples, global_batch)):
            return known
        seed, former = self.common_seed(), self._order or self._restored_order
        if former is not None and former.samples == samples:
            return former.changed_at(self.next_step, global_batch)
        return DataOrder(samples=samples, global_batch=global_batch, seed=seed, skips=self._skips)

    def _read_former(self) -> None:
        """Restore the orders that the checkpoint recorded, unless the seed has changed."""
        former = self._former
        if former.get("seed") != self.seed or not {"samples", "global_batch"} <= former.keys():
            return
        since = former.get("since", (1, 0))
        rows = [*former.get("others", ()), (former["samples"], former["global_batch"], *since)]
        for samples, global_batch, step, position in rows:
            self._restored_order = self._orders[samples, global_batch] = DataOrder(
                samples=int(samples),
                global_batch=int(global_batch),
                seed=self.seed,
                skips=self._skips,
                since=(int(step), int(position)),
            )

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
        self._spans_epochs = True
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
        self.batches_per_step = batches_per_step(sampler.local_batch, batch_size)
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
            "since": list(order.since),
            "others": [
                [other.samples, other.global_batch, *other.since]
                for other in self._orders.values()
                if (other.samples, other.global_batch) != (order.samples, order.global_batch)
            ][-ORDERS_MAX:],
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
        if not changed or self.rank != 0:
            return
        is_continued = set(now) - {"global_batch"} <= {k for k in now if former[k] == now[k]}
        how = (
            "it continues from the same position, so no sample of the epoch repeats or is skipped"
            if is_continued
            else "samples may repeat or be skipped"
        )
        report(
            f"holdfast: the data order changed after step {self.completed}: {', '.join(changed)}; "
            f"{how}"
        )
