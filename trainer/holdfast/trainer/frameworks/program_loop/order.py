"""The order of a loader, noted when a pass over it begins, and continued after a resume.

A pass is one iteration over a loader. Its order follows from the random generators at its start.
To continue a pass, the generators are put back as they were at its start, the order is drawn again,
and the batches that were trained on are skipped. Only their ids are drawn, no sample is read.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler

from holdfast.trainer.frameworks.data_generators import DataGenerators
from holdfast.trainer.state import rng

# States of generators by name. `DATA` has those of the dataset and of the collator.
Generators = Mapping[str, Any]
DATA: Final = "data"
# Those of all loaders, by their numbers as text.
DATA_OF_LOADERS: Final = "data_of_loaders"


@dataclass(frozen=True)
class LoaderOrder:
    """The generators when a pass began: those of the process, and the sampler's own or None."""

    process: Generators
    own: torch.Tensor | None

    @classmethod
    def now(cls, sampler: Any) -> LoaderOrder:
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
    `order` is the order to continue. `now` are the generators with which training continues, after
    the order was drawn. `fetch` are those before the fetch of the first batch that is not skipped,
    for a framework that fetches one batch ahead. `now` are then those after the next fetch.
    """

    skip: int = 0
    is_dealt: bool = False
    order: LoaderOrder | None = None
    fetch: Generators | None = None
    now: Generators = field(default_factory=dict)


class Batches(BatchSampler):
    """Wraps the batch sampler of a prepared loader. Everything else is the wrapped sampler's.

    `order` is that of the newest pass. `sampler_of_ids` is the wrapped sampler that draws it.
    `data` are the generators of the loader's dataset and collator.
    """

    # How many dealt batches make one batch of each rank.
    unit: int = 1

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.start, self.data = Start(), DataGenerators()
        self.find_sampler()

    def find_sampler(self) -> None:
        """Find the wrapped sampler. Call it after another one took its place."""
        self.sampler_of_ids = innermost(self._inner)
        self.order = LoaderOrder.now(self.sampler_of_ids)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, Start()
        states = self.states_of(start) if start.now else []
        self.data.begin_pass()
        for batch in self._remaining(start):
            if states:
                self._restore(states.pop())
            self.note_fetch()
            yield batch
        if states:
            self._restore(start.now)

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def inner(self) -> Any:
        return self._inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def states_of(self, start: Start) -> list[Generators]:
        """Return the generators before the first fetches of a continued pass, latest first."""
        return [start.now]

    def note_fetch(self) -> None:
        """Called before each fetch."""

    def skipped(self, start: Start) -> Iterator[Any]:
        return itertools.islice(self._inner, start.skip, None)

    def _restore(self, generators: Generators) -> None:
        rng.restore(generators)
        self.data.load_state_dict(generators.get(DATA, {}))

    def _remaining(self, start: Start) -> Iterator[Any]:
        """Yield the batches from `start` on. Put back its order before the first is drawn."""
        # Some samplers draw as soon as they are iterated, so the order is noted before.
        if start.order is None:
            self.order = LoaderOrder.now(self.sampler_of_ids)
            return self.skipped(start)
        self.order = start.order
        with start.order.put_back(self.sampler_of_ids):
            batches = self.skipped(start)
            first = list(itertools.islice(batches, 1))
        return itertools.chain(first, batches)


def innermost(sampler: Any) -> Any:
    """Return the sampler of single ids under shards and batches, or the innermost of batches."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    # Lightning puts a sampler of another kind into its DistributedSamplerWrapper.
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


def own_generator(sampler: Any) -> torch.Generator | None:
    """Return the generator whose state sets the order of `sampler`.

    None if it has none, and for Accelerate's seedable one, whose order follows from its epoch.
    """
    if hasattr(sampler, "initial_seed"):
        return None
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def set_generator(sampler: Any, state: torch.Tensor) -> None:
    """Set the state of a sampler's own generator, which is created if there is none."""
    generator = own_generator(sampler)
    if generator is None:
        generator = sampler.generator = torch.Generator()
    generator.set_state(state)
