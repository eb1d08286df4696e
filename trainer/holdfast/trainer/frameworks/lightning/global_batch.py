"""Loaders of Lightning and Fabric that give each step the same samples at every number of ranks.

Both divide the samples by torch's `DistributedSampler`: rank r of R takes every R-th sample of an
order that follows from the epoch, from number r on. The batches of all ranks are then samples that
follow each other in that order. So at another number of ranks, a step has the same samples if the
sampler is of this class, and if the ranks' batches have as many samples together.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.utils import data

from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.records.topology import FIXED, GLOBAL_BATCHES
from holdfast.trainer.frameworks.program_loop.order import Batches

DISTRIBUTED: Final = data.DistributedSampler.__name__
ADVICE: Final = 'use strategy="ddp" and a loader over a dataset with an index'


@dataclass(frozen=True, kw_only=True)
class SampleShare:
    """How a loader gives the ranks their samples.

    `order` is the class of the sampler, None if there is none. Each of `parts` data-parallel ranks
    gets batches of `size` samples, None if a batch sampler of the program decides. The program gave
    the loader the size `given`. `seed` and `shuffle` are those of a `DistributedSampler`.
    """

    parts: int
    order: str | None
    size: int | None
    given: int | None
    seed: int = 0
    shuffle: bool = False

    @classmethod
    def of(cls, loader: Any, ranks: int, given: int | None) -> SampleShare:
        """Return how `loader` does it now. Without `DistributedSampler`, each rank is a part."""
        found = cls(parts=ranks, order=order_of(loader), size=batch_size(loader), given=given)
        sampler = sampler_of(loader)
        if found.order != DISTRIBUTED:
            return found
        return replace(
            found, parts=sampler.num_replicas, seed=sampler.seed, shuffle=sampler.shuffle
        )

    @property
    def is_elastic(self) -> bool:
        """True if the samples of each step can be the same at another number of ranks."""
        return self.order == DISTRIBUTED and self.size is not None

    @property
    def global_batch(self) -> int:
        return (self.size or 0) * self.parts


def continue_share(loader: Any, saved: SampleShare, *, rank: int, ranks: int) -> None:
    """Let `loader` continue the order and the global batch that another launch saved.

    A program that gives a loader another size than before has the last word. Raises
    `CheckpointError` if the order or the global batch cannot be the same on `ranks` ranks.
    """
    if saved.order == DISTRIBUTED:
        _distribute(loader, saved, rank, ranks)
    now = SampleShare.of(loader, ranks, batch_size(loader))
    if saved.parts != now.parts and not (saved.is_elastic and now.order == DISTRIBUTED):
        raise CheckpointError(
            f"the order of the samples came from {saved.order} on {saved.parts} ranks, and comes "
            f"from {now.order} on {now.parts}. It continues at another number of ranks only with "
            f"{DISTRIBUTED} and a batch size. Run on {saved.parts} ranks; for a new run, {ADVICE}"
        )
    if now.size is None or saved.size is None or now.size != saved.given:
        return
    size, rest = divmod(saved.global_batch, now.parts)
    if rest or not size:
        raise CheckpointError(
            f"a global batch of {saved.global_batch} ({saved.size} on each of {saved.parts} ranks) "
            f"does not split evenly over {now.parts} ranks; run on a number of ranks that divides "
            "it"
        )
    if now.size != size:
        _set_batch_size(loader, size)
        if rank == 0:
            report(
                f"holdfast: each rank's batch has {size} samples instead of {now.size}, so that "
                f"the global batch of the run stays {saved.global_batch} at world size {now.parts}"
            )


def limits_of(shares: Sequence[SampleShare], streams: Set[int] = frozenset()) -> dict[str, Any]:
    """Return which numbers of ranks can continue, by the keys of `contracts.topology.LIMITS`.

    `streams` are the global batches of streams.
    """
    orders = {each.order or "a loader without a sampler" for each in shares if not each.is_elastic}
    if orders:
        found = " and ".join(sorted(orders))
        return {
            FIXED: f"the order of the samples comes from {found}, and only that of "
            f"{DISTRIBUTED} can continue at another number of ranks; for a new run, {ADVICE}"
        }
    return {GLOBAL_BATCHES: sorted({each.global_batch for each in shares} | streams)}


def has_order(loader: Any) -> bool:
    """Return True if a sampler orders the samples, so that batches can be skipped unread."""
    return (
        isinstance(loader, data.DataLoader)
        and not isinstance(loader.dataset, data.IterableDataset)
        and loader.batch_sampler is not None
    )


def sampler_of(loader: Any) -> Any:
    """Return the sampler that orders the samples. Lightning gives some loaders a batch sampler."""
    found = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return getattr(loader, "sampler", None) if found is None else found


def order_of(loader: Any) -> str | None:
    return type(sampler_of(loader)).__name__ if has_order(loader) else None


def batch_size(loader: Any) -> int | None:
    """Return the samples in a batch, or None if a batch sampler of the user's own decides."""
    found = getattr(loader.batch_sampler, "batch_size", None) if has_order(loader) else None
    return found if isinstance(found, int) else None


def _distribute(loader: Any, saved: SampleShare, rank: int, ranks: int) -> None:
    """Give `loader` the sampler that it had on several ranks, even on one rank."""
    if has_order(loader) and type(sampler_of(loader)) in {
        data.RandomSampler,
        data.SequentialSampler,
    }:
        sampler: Any = data.DistributedSampler(
            loader.dataset,
            num_replicas=ranks,
            rank=rank,
            shuffle=saved.shuffle,
            seed=saved.seed,
        )
        _batches_of(loader).sampler = sampler
        # A DataLoader refuses assignments to its parts.
        object.__setattr__(loader, "sampler", sampler)


def _set_batch_size(loader: Any, size: int) -> None:
    _batches_of(loader).batch_size = size
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)


def _batches_of(loader: Any) -> Any:
    """Return the loader's own batch sampler, under the one that counts its batches."""
    batches = loader.batch_sampler
    return batches.inner if isinstance(batches, Batches) else batches
