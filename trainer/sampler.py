"""A batch sampler for `torch.utils.data.DataLoader` on top of the elastic data order."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from holdfast.trainer.data import DataOrder, local_batch


class ElasticSampler(Sampler[list[int]]):
    """One list of sample ids per step for this rank; give it as a DataLoader's `batch_sampler`.

    The loader may fetch ahead as far as it likes: what a step trains on follows from the step's
    number alone, so a sampler made after a resume, at any rank count, goes on where the last
    committed step ended.
    """

    def __init__(
        self, order: DataOrder, *, rank: int, world_size: int, first_step: int, last_step: int
    ) -> None:
        """Steps are counted from 1, both ends are included. Raises `SpecError` on a bad split."""
        local_batch(order.global_batch, world_size)
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.first_step = first_step
        self.last_step = last_step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.last_step + 1):
            yield self.order.rank_ids(step, self.rank, self.world_size).tolist()

    def __len__(self) -> int:
        return max(0, self.last_step - self.first_step + 1)
