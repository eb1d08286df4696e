"""Prepared loaders that report each batch, so that a checkpoint knows the place in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.data_loader import skip_first_batches as skip_in_accelerate
from torch.utils.data import IterableDataset

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.frameworks.accelerate.batches import (
    Batches,
    Generators,
    Order,
    Start,
    own_generator,
    set_generator,
)
from holdfast.trainer.state import rng

_OWN: Final = frozenset(
    {"inner", "number", "batches", "problem", "resumed", "passes", "has_begun", "_iterate"}
)
Iterate = Callable[["Loader", int], Iterator[Any]]


@dataclass
class Resumed:
    """What is left of the restored epoch: `passes` were complete, and `done` batches of the next.

    `done` counts batches dealt out to the ranks. `order` is None if the pass began by the program's
    own resume, in an order that is drawn again.
    """

    passes: int = 0
    done: int = 0
    order: Order | None = None
    fetch: Generators | None = None


class Loader:
    """Wraps a loader that Accelerate prepared. Attributes and the class are the wrapped loader's.

    `passes` counts the complete training passes of the epoch. `has_begun` is true from the first
    pass of the run on. `problem` says why training over the
    loader cannot be continued, or is None. `iterate` runs a pass, given the loader and the number
    of batches to skip.
    """

    inner: Any
    number: int
    batches: Batches | None
    problem: str | None
    resumed: Resumed | None
    passes: int
    has_begun: bool
    _iterate: Iterate

    def __init__(self, inner: Any, number: int, iterate: Iterate) -> None:
        self.inner, self.number, self._iterate = inner, number, iterate
        self.problem = problem_of(inner)
        self.batches = None if self.problem else install(inner)
        self.resumed, self.passes, self.has_begun = None, 0, False

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self, 0)

    def __len__(self) -> int:
        return len(self.inner)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # As of Accelerate's own wrappers: `isinstance(loader, DataLoader)` stays true.
        return self.inner.__class__

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    @property
    def unit(self) -> int:
        """How many dealt batches make one batch of each rank."""
        return 1 if self.batches is None else self.batches.unit

    def start_at(self, start: Start) -> None:
        """Let the next pass begin at `start`."""
        assert self.batches is not None
        self.batches.start = start
        self._drop_first_iterator()

    def start_of(self, resumed: Resumed) -> Start:
        """Return where the restored pass continues at this number of ranks."""
        is_shared = resumed.done % self.unit == 0
        return Start(
            skip=resumed.done // self.unit if is_shared else resumed.done,
            is_dealt=not is_shared,
            order=resumed.order,
            fetch=resumed.fetch,
            now=rng.capture() if resumed.order is not None else {},
        )

    def describe(self, *, done: int, is_ending: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps of the loader.

        `done` are the dealt batches of a pass that is under way, or 0. With `is_ending`, the pass
        is complete, and Accelerate has not counted it yet.
        """
        if self.batches is None:
            return {"iteration": int(self.inner.iteration), "has_begun": self.has_begun}
        sampler, order = self.batches.sampler_of_ids, self.batches.order
        generator = own_generator(sampler)
        return {
            "iteration": int(self.inner.iteration) + is_ending,
            "has_begun": self.has_begun,
            "samples": len(self.inner.dataset),
            "seed": getattr(sampler, "initial_seed", None),
            "generator": None if generator is None else generator.get_state(),
            "order": dict(order.process),
            "own": order.own,
            "passes": self.passes,
            "done": done,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `describe` returned. Raises `CheckpointError` for another dataset."""
        self.inner.iteration = int(saved["iteration"])
        self.has_begun = bool(saved["has_begun"])
        if self.has_begun:
            self._drop_first_iterator()
        if self.batches is None or "samples" not in saved:
            return
        if saved["samples"] != len(self.inner.dataset):
            raise CheckpointError(
                f"loader {self.number}: its dataset had {saved['samples']} samples and now has "
                f"{len(self.inner.dataset)}, so its order cannot be continued. Use the same "
                "dataset"
            )
        sampler = self.batches.sampler_of_ids
        if saved["seed"] is not None:
            sampler.initial_seed = saved["seed"]
        if saved["generator"] is not None:
            set_generator(sampler, saved["generator"].clone())
        self.passes = int(saved["passes"])
        order = self.batches.order = Order(saved["order"], saved["own"])
        if self.passes or saved["done"]:
            self.resumed = Resumed(passes=self.passes, done=int(saved["done"]), order=order)

    def take_over(self) -> None:
        """Take over the place that Accelerate's own `load_state` gave a stateful loader."""
        base = self.inner.base_dataloader
        state = base.next_iter_state if is_stateful(base) else None
        if state is None or self.batches is None:
            return
        if base.num_workers:
            raise SpecError(
                f"loader {self.number}: load_state of Accelerate's own checkpoint sets a stateful "
                f"loader with {base.num_workers} workers to a place that Holdfast cannot follow; "
                "load it with num_workers=0, or without use_stateful_dataloader"
            )
        base.next_iter_state = None
        self._drop_first_iterator()
        done = 0 if state["_iterator_finished"] else int(state["_num_yielded"]) * self.unit
        self.resumed = Resumed(done=done)

    def _drop_first_iterator(self) -> None:
        """Drop the iterator that a stateful loader made when it was constructed.

        Only the first pass of a run may use it. Later ones draw a seed for a new one.
        """
        if is_stateful(self.inner.base_dataloader):
            self.inner.base_dataloader.load_state_dict({})


class Rest:
    """A loader without its first `skip` batches. Everything else is the loader's."""

    def __init__(self, loader: Loader, skip: int) -> None:
        self._loader, self._skip = loader, skip

    def __iter__(self) -> Iterator[Any]:
        return self._loader._iterate(self._loader, self._skip)

    def __len__(self) -> int:
        return len(self._loader) - self._skip

    def __getattr__(self, name: str) -> Any:
        if name in {"_loader", "_skip"}:
            raise AttributeError(name)
        return getattr(self._loader, name)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without its first batches.

    In the epoch in which Holdfast resumed, a prepared loader continues at its restored place
    instead.
    """
    if not is_loader(dataloader):
        return skip_in_accelerate(dataloader, num_batches)
    if dataloader.batches is None:
        return skip_in_accelerate(dataloader.inner, num_batches)
    return Rest(dataloader, num_batches)


def is_loader(item: object) -> bool:
    """Return True for a `Loader`, whose `__class__` is another one."""
    return type(item) is Loader


def is_stateful(base: Any) -> bool:
    """Return True for torchdata's `StatefulDataLoader`."""
    return hasattr(base, "next_iter_state")


def problem_of(loader: Any) -> str | None:
    """Return why training over a prepared loader cannot be continued, or None."""
    try:
        len(loader)
        has_length = not isinstance(loader.dataset, IterableDataset)
    except TypeError:
        has_length = False
    if not has_length:
        return (
            f"a loader over {type(loader.dataset).__name__}, which has no length or no index, so "
            "no resume could find its place again; train over a dataset with __len__ and "
            "__getitem__"
        )
    if isinstance(loader, DataLoaderDispatcher):
        return (
            "a loader with dispatch_batches=True, whose place only rank 0 knows; use "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )
    shard = loader.base_dataloader.batch_sampler
    ranks = getattr(shard, "num_processes", 1)
    is_uneven = not (getattr(shard, "even_batches", True) or shard.drop_last)
    if is_uneven and not shard.split_batches and len(shard.batch_sampler) % ranks:
        return (
            f"a loader with even_batches=False, whose {len(shard.batch_sampler)} batches do not "
            f"divide by {ranks} ranks, so the ranks would take different numbers of steps; use "
            "even_batches=True or drop_last=True"
        )
    return None


def install(loader: Any) -> Batches:
    """Wrap the batch sampler of a prepared loader in place, and return the wrapper."""
    base = loader.base_dataloader
    name = "sampler" if base.batch_sampler is None else "batch_sampler"
    batches = Batches(getattr(base, name), notes_fetches=base.num_workers == 0)
    # A DataLoader refuses an assignment. It reads the attribute whenever an iteration begins.
    object.__setattr__(base, name, batches)
    if is_stateful(base):
        _renew_iterator(loader, base)
    return batches


def _renew_iterator(loader: Any, base: Any) -> None:
    """Replace the iterator that a stateful loader made when it was constructed.

    A pass would use that one, and the numbers that a new one draws are not drawn without Holdfast.
    """
    generators = rng.capture()
    own = base.generator.get_state() if isinstance(base.generator, torch.Generator) else None
    base._iterator = None
    loader.dl_state_dict = base.state_dict()
    rng.restore(generators)
    if own is not None:
        base.generator.set_state(own)
