"""The random numbers of a loader: noted before each fetch, and replayed by a resume.

A trainer's loader runs one batch ahead. So the batch of the next step was drawn before the current
step, with other random numbers than those of the checkpoint. A resume sets three states: that of
the epoch's start before the loader begins, that of the first batch's fetch before this fetch, and
that of the checkpoint after it. Workers of a loader have separate random states.

A loader that reports its fetches is a copy. Accelerate asks the loader that is being read how many
samples of the last batch are not duplicates, so the copy has the answer of the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, skip_first_batches
from torch.utils.data import DataLoader, Sampler

from holdfast.trainer.frameworks.data_generators import DataGenerators, attributes_of
from holdfast.trainer.state import rng
from holdfast.trainer.state.objects import NumpyGenerator, TorchGenerator

# Random generators that a loader or its samplers own, which no seed and no epoch resets.
#
# Each pass over such a loader draws from where the pass before ended. So a resume within an epoch
# needs the states at the epoch's start, to draw the same order again. A resume in a new epoch needs
# the states at the end of the epoch before.

# A sampler need not be a `Sampler`, but a loader has it under one of these names.
PARTS: Final = ("sampler", "batch_sampler", "batch_samplers", "generator", "synchronized_generator")

States = dict[str, Any]


class LoaderGenerators:
    """The generators of one rank's loader: their states now, and at the start of the epoch."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._begin: States = {}
        # What a resume must set when the loader begins.
        self._again: States | None = None

    def watch(self, loader: Any) -> None:
        self._loader = loader

    def begin_epoch(self) -> None:
        """Forget a resume: it concerned the epoch before, whose loader did not begin."""
        self._again = None

    def state_dict(self) -> dict[str, States]:
        return {"begin": self._begin, "now": self._states()}

    def resume(self, saved: Mapping[str, States], *, is_same_epoch: bool) -> None:
        """Set the saved states, and those of the epoch's start when the loader begins."""
        self._set(saved["now"])
        self._begin = saved["begin"]
        self._again = saved["begin"] if is_same_epoch else None

    def begin(self) -> None:
        """Called before the loader begins an epoch."""
        if self._again is not None:
            self._set(self._again)
            self._again = None
        self._begin = self._states()

    def _states(self) -> States:
        return {path: item.state_dict() for path, item in _generators(self._loader)}

    def _set(self, states: States) -> None:
        for path, item in _generators(self._loader):
            if path in states:
                item.load_state_dict(states[path])


def _generators(loader: Any) -> Iterator[tuple[str, TorchGenerator | NumpyGenerator]]:
    """Yield each generator of a loader with the attributes that lead to it."""
    found = [(name, getattr(loader, name, None)) for name in PARTS]
    seen: set[int] = set()
    while found:
        path, item = found.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Generator):
            yield path, TorchGenerator(item)
        elif isinstance(item, np.random.Generator):
            yield path, NumpyGenerator(item)
        elif isinstance(item, list | tuple):
            found += [
                (f"{path}.{i}", each) for i, each in enumerate(item) if isinstance(each, Sampler)
            ]
        else:
            found += [(f"{path}.{n}", each) for n, each in attributes_of(item) if _is_part(n, each)]


def _is_part(name: str, item: Any) -> bool:
    return name in PARTS or isinstance(item, torch.Generator | np.random.Generator | Sampler)


# What Accelerate's own copy of a loader does not take over.
NOT_COPIED: Final = ("_drop_last", "_non_blocking")
NO_REMAINDER: Final = -1


class FetchStates:
    """The random states at the start of the epoch and before the newest fetch, on one rank.

    `fetched` is the number of batches of the epoch that the loader has begun to fetch, or 0 if
    that cannot be watched.
    """

    def __init__(self) -> None:
        self._epoch = self._fetch = rng.note()
        self.generators, self.data = LoaderGenerators(), DataGenerators()
        self._data_fetch: dict[str, Any] = {}
        self.fetched = self._skipped = 0
        # True until the first fetch of an epoch.
        self.is_new = True
        # The restored states, until the loader begins.
        self._saved: dict[str, Any] | None = None
        # What a resume must still set: before the first fetch, and after it.
        self._first: tuple[States, dict[str, Any]] | None = None
        self._then: tuple[States, dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._saved is not None:
            return {**self._saved, "data": {**self._saved["data"], "now": self.data.state_dict()}}
        return {
            "data": {"fetch": self._data_fetch, "now": self.data.state_dict()},
            "generators": self.generators.state_dict(),
            "epoch": rng.as_tensors(self._epoch),
            "fetch": rng.as_tensors(self._fetch),
            "fetched": self.fetched,
        }

    def begin_epoch(self) -> None:
        """Note that the next fetch is the first of an epoch."""
        self.is_new, self._skipped, self.fetched = True, 0, 0
        self._saved = self._first = self._then = None
        self.generators.begin_epoch()
        self.data.begin_pass()

    def resume(self, saved: dict[str, Any], skipped: int) -> None:
        """Prepare a resume within an epoch, after `skipped` of its batches."""
        self._saved, self._skipped = saved, skipped
        if saved["fetched"] > skipped:
            self._first = saved["fetch"], saved["data"]["fetch"]

    def continue_with(self, now: States) -> None:
        """Set the states that training continues with, once batches are fetched again."""
        if self._saved is not None and self._saved["fetched"] >= self._skipped:
            self._then = now, self.data.state_dict()

    def before_first(self) -> None:
        """Called before the first fetches of an epoch, which start the loader."""
        self.is_new = False
        self.generators.begin()
        if self._saved is not None:
            rng.restore(self._saved["epoch"])
            self._saved = None
        self._epoch = rng.note()

    def before_fetch(self, number: int) -> None:
        """Called before batch `number` of the epoch, from 0, is fetched or skipped."""
        if number < self._skipped:
            return
        if self._first is not None:
            self._restore(*self._first)
            self._first = None
        elif self._then is not None:
            self.after_first()
        self._fetch, self.fetched = rng.note(), number + 1
        if not self.data.is_idle:
            self._data_fetch = self.data.before_fetch()

    def after_first(self) -> None:
        """Set the states to continue with, if no batch must be fetched before that."""
        if self._then is not None and self._first is None:
            self._restore(*self._then)
            self._then = None

    def _restore(self, states: States, data: dict[str, Any]) -> None:
        rng.restore(states)
        self.data.load_state_dict(data)


class WatchedBatches:
    """A loader's batch sampler that reports each batch to `FetchStates` before it is fetched."""

    def __init__(self, batch_sampler: Any, states: FetchStates) -> None:
        self.batch_sampler, self._states = batch_sampler, states

    def __iter__(self) -> Iterator[Any]:
        for number, ids in enumerate(self.batch_sampler):
            self._states.before_fetch(number)
            yield ids
        self._states.after_first()

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def watched(loader: Any, states: FetchStates) -> Any:
    """Return a copy of `loader` whose fetches are watched, or `loader` if they cannot be.

    Workers fetch in separate processes, a dispatcher fetches for other ranks, and a stateful
    loader has its own position.
    """
    can_be = (
        isinstance(loader, DataLoader)
        and not isinstance(loader, DataLoaderDispatcher)
        and not hasattr(getattr(loader, "base_dataloader", loader), "state_dict")
        and loader.num_workers == 0
        and loader.batch_sampler is not None
    )
    if not can_be:
        return loader
    copy = skip_first_batches(loader, 0)
    copy.batch_sampler.batch_sampler = WatchedBatches(loader.batch_sampler, states)
    for name in NOT_COPIED:
        if hasattr(loader, name):
            setattr(copy, name, getattr(loader, name))
    return copy


def keep_remainder(loader: Any, gradient_state: Any) -> None:
    """Give the loader that is being read the remainder of `loader`, of which it is a copy.

    A copy computes it when it begins, from the attributes of a batch sampler that it lacks.
    """
    active = gradient_state.active_dataloader
    if active is None or active is loader or not hasattr(loader, "remainder"):
        return
    active.remainder = NO_REMAINDER
    # As the loader does: one without these attributes has no remainder.
    with contextlib.suppress(Exception):
        if not loader._drop_last:
            length = getattr(loader.dataset, "total_dataset_length", len(loader.dataset))
            active.remainder = length % loader.total_batch_size


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's samplers, as the trainer does for a loader that is not a copy."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)
