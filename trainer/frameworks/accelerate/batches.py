"""The order of a prepared loader, noted when a pass over it begins, and continued after a resume.

A pass is one iteration over a loader. Its order follows from the random generators at its start.
To continue a pass, the generators are put back as they were at its start, the order is drawn again,
and the batches that were trained on are skipped. Only their ids are drawn, no sample is read.

Accelerate fetches one batch ahead. So when a checkpoint is saved, the next batch has already been
fetched, and a dataset may have drawn random numbers for it. The generators are therefore noted
before each fetch in this process. After a resume, that batch is fetched with the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler
from torch.utils.data import BatchSampler

from holdfast.trainer.state import rng

Generators = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Order:
    """The generators at the start of a pass: those of the process, and the sampler's own or None.

    All ranks draw the same order, so a checkpoint keeps the order of one rank.
    """

    process: Generators
    own: torch.Tensor | None

    @classmethod
    def now(cls, sampler: Any) -> Order:
        """Return the order that `sampler` would give if a pass began now."""
        generator = own_generator(sampler)
        return cls(rng.capture(), None if generator is None else generator.get_state())

    @contextlib.contextmanager
    def put_back(self, sampler: Any) -> Iterator[None]:
        """Put the generators back, so that `sampler` draws this order inside the block.

        A single process may have no generator where several have one. If the sampler had none, the
        one it has now is taken away within the block. If it had one, the sampler keeps it.
        """
        rng.restore(self.process)
        kept = own_generator(sampler)
        if self.own is not None:
            set_generator(sampler, self.own)
        elif kept is not None:
            sampler.generator = None
        try:
            yield
        finally:
            if self.own is None and kept is not None:
                sampler.generator = kept


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a pass begins. By default, at its first batch and in a new order.

    `skip` counts this rank's batches or, with `is_dealt`, those that are dealt out to the ranks.
    `order` is the order to continue. `fetch` are the generators before the fetch of the first batch
    that is not skipped, and `now` those after the fetch of the second one. Training goes on with
    them.
    """

    skip: int = 0
    is_dealt: bool = False
    order: Order | None = None
    fetch: Generators | None = None
    now: Generators = field(default_factory=dict)


class Batches(BatchSampler):
    """Wraps the batch sampler of a prepared loader. Everything else is the wrapped sampler's.

    `order` is that of the newest pass. `fetch` are the generators before the newest fetch, noted
    unless worker processes fetch.
    """

    def __init__(self, inner: Any, *, notes_fetches: bool) -> None:
        self._inner, self._notes_fetches = inner, notes_fetches
        self.sampler_of_ids = innermost(inner)
        self.start = Start()
        self.order = Order.now(self.sampler_of_ids)
        self.fetch: rng.Noted | None = None

    @property
    def unit(self) -> int:
        """How many dealt batches make one batch of each rank."""
        if getattr(self._inner, "split_batches", False):
            return 1
        return int(getattr(self._inner, "num_processes", 1))

    @property
    def even_batches(self) -> bool:
        """As of the wrapped sampler."""
        return bool(self._inner.even_batches)

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._inner.even_batches = value

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, Start()
        # Set before the first and the second fetch.
        states = [start.now, start.fetch or start.now] if start.now else []
        for batch in self._remaining(start):
            if states:
                rng.restore(states.pop())
            if self._notes_fetches:
                self.fetch = rng.note()
            yield batch
        if states:
            rng.restore(start.now)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _remaining(self, start: Start) -> Iterator[Any]:
        """Yield the batches from `start` on. Put back its order before the first is drawn."""
        inner, skip = self._inner, start.skip
        if start.is_dealt:
            # The ranks' number has changed, so they share the rest of the dealt batches again.
            inner, skip = copy.copy(inner), 0
            inner.batch_sampler = SkipBatchSampler(self._inner.batch_sampler, start.skip)
        batches = itertools.islice(inner, skip, None)
        if start.order is None:
            self.order = Order.now(self.sampler_of_ids)
            return batches
        self.order = start.order
        with start.order.put_back(self.sampler_of_ids):
            first = list(itertools.islice(batches, 1))
        return itertools.chain(first, batches)


def innermost(sampler: Any) -> Any:
    """Return the sampler of single ids under shards and batches, or the innermost of batches."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)


def own_generator(sampler: Any) -> torch.Generator | None:
    """Return the generator whose state sets the order of `sampler`.

    None if it has none, and for Accelerate's seedable one, whose order follows from its epoch.
    """
    if isinstance(sampler, SeedableRandomSampler):
        return None
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def set_generator(sampler: Any, state: torch.Tensor) -> None:
    """Set the state of a sampler's own generator, which is created if there is none."""
    generator = own_generator(sampler)
    if generator is None:
        generator = sampler.generator = torch.Generator()
    generator.set_state(state)
