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

    `completed` tells how many are; `former` is what the restored checkpoint says of its data,
    empty when there is none.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        seed: int,
        skips: tuple[SkipWindow, ...],
        former: Mapping[str, Any],
        completed: Callable[[], int],
    ) -> None:
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self._skips, self._former, self._completed = skips, dict(former), completed
        self._order: DataOrder | None = None
        self._samplers: weakref.WeakSet[ElasticSampler | ElasticDistributedSampler] = (
            weakref.WeakSet()
        )

    @property
    def reached(self) -> int:
        """The last step that ids were drawn for, which may be ahead of training."""
        return max([self._completed(), *(sampler.reached for sampler in self._samplers)])

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
        return self._completed() + 1

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next step's data; 0 while no order is known."""
        if self._order is not None:
            return self._order.epoch(self.next_step)
        return int(self._former.get("position", 0)) // max(int(self._former.get("samples", 1)), 1)

    def order(self, samples: int, global_batch: int) -> DataOrder:
        """The order of a dataset; says so when it is not the one that was trained with before."""
        order = self._order
        if order is None or (order.samples, order.global_batch) != (samples, global_batch):
            order = DataOrder(
                samples=samples, global_batch=global_batch, seed=self.seed, skips=self._skips
            )
            self._order = order
            self._compare_with_former(order)
        return order

    def batch(self, samples: int, global_batch: int) -> Batch:
        """This rank's sample ids of the step under way."""
        order = self.order(samples, global_batch)
        return order.rank_ids(self.next_step, self.rank, self.world_size).view(Batch)

    def sampler(self, samples: int, global_batch: int, total: int) -> ElasticSampler:
        """Batches from the step under way to step `total`."""
        sampler = ElasticSampler(
            self.order(samples, global_batch),
            rank=self.rank,
            world_size=self.world_size,
            first_step=lambda: self.next_step,
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
            first_step=lambda: self.next_step,
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

    def _compare_with_former(self, order: DataOrder) -> None:
        now = {"samples": order.samples, "global_batch": order.global_batch, "seed": order.seed}
        former = {key: self._former.get(key, value) for key, value in now.items()}
        changed = [f"{key} {former[key]} → {now[key]}" for key in now if former[key] != now[key]]
        if changed and self.rank == 0:
            print(
                f"holdfast: the data order changed after step {self._completed()}: "
                f"{', '.join(changed)}; samples may repeat or be passed over",
                flush=True,
            )
