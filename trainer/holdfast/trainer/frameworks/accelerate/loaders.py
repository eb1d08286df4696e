"""Prepared loaders that report each batch, so that a checkpoint knows the place in the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderDispatcher, SkipBatchSampler
from accelerate.data_loader import skip_first_batches as skip_in_accelerate
from accelerate.utils import send_to_device, synchronize_rng_states

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.program_loop.loader import (
    Iterate,
    ResumedEpoch,
    WrappedLoader,
    problem_of,
    wrap_sampler,
)
from holdfast.trainer.frameworks.program_loop.order import (
    DATA,
    Batches,
    Generators,
    LoaderOrder,
    Start,
    own_generator,
    set_generator,
)
from holdfast.trainer.frameworks.program_loop.streamed import StreamedLoader
from holdfast.trainer.frameworks.streamed import has_shards, is_stream, stream_arguments
from holdfast.trainer.state import rng
from holdfast.trainer.state.torchdata_loaders import is_stateful_loader

# The batch sampler of a loader that Accelerate prepared.
#
# Accelerate fetches one batch ahead. So when a checkpoint is saved, the next batch has already
# been fetched, and a dataset may have drawn random numbers for it. The generators are therefore
# noted before each fetch in this process. After a resume, that batch is fetched with the same
# numbers.


class DealtBatches(Batches):
    """The batches that Accelerate deals out to the ranks.

    All ranks draw the same order, so a checkpoint keeps the order of one rank. `fetch` are the
    generators before the newest fetch, noted unless worker processes fetch.
    """

    def __init__(self, inner: Any, *, notes_fetches: bool) -> None:
        super().__init__(inner)
        self._notes_fetches = notes_fetches
        self.fetch: rng.NotedGenerators | None = None
        self._data_fetch: Mapping[str, Any] = {}

    @property
    def unit(self) -> int:  # type: ignore[override]
        if getattr(self._inner, "split_batches", False):
            return 1
        return int(getattr(self._inner, "num_processes", 1))

    @property
    def even_batches(self) -> bool:
        return bool(self._inner.even_batches)

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._inner.even_batches = value

    def states_of(self, start: Start) -> list[Generators]:
        """Return the generators before the second fetch, and before the first."""
        return [start.now, start.fetch or start.now]

    def note_fetch(self) -> None:
        """Note the generators, unless worker processes fetch."""
        if not self._notes_fetches:
            return
        self.fetch = rng.note()
        if not self.data.is_idle:
            self._data_fetch = self.data.before_fetch()

    def before_newest_fetch(self) -> Generators | None:
        if self.fetch is None:
            return None
        return {**rng.as_tensors(self.fetch), DATA: self._data_fetch}

    def skipped(self, start: Start) -> Iterator[Any]:
        """Return the batches from `start` on, as this number of ranks shares them."""
        if not start.is_dealt:
            return super().skipped(start)
        # The ranks' number has changed, so they share the rest of the dealt batches again.
        inner = copy.copy(self._inner)
        inner.batch_sampler = SkipBatchSampler(self._inner.batch_sampler, start.skip)
        return iter(inner)


# The key of the generators before the newest fetch.
FETCH: Final = "fetch"


class Loader(WrappedLoader):
    """Wraps a loader that Accelerate prepared."""

    batches: DealtBatches | None

    def find_problem(self) -> str | None:
        return problem_of(self.inner) or problem_of_ranks(self.inner)

    def install(self) -> DealtBatches:
        return install(self.inner)

    def is_at_end(self, done: int) -> bool:
        """Return True if no batch follows. Accelerate has fetched it already if there is one."""
        return bool(self.inner.end_of_dataloader)

    def exhaust(self, batches: Iterator[Any]) -> None:
        """Accelerate fetches ahead, so it has done this before the last batch."""

    def describe(
        self, *, done: int, is_ending: bool = False, is_under_way: bool = False
    ) -> dict[str, Any]:
        """Return what a checkpoint keeps, the same on all ranks.

        A pass that is ending is one that Accelerate has not counted yet.
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
        self.inner.iteration = int(saved["iteration"])
        self.has_begun = bool(saved["has_begun"])
        if self.has_begun:
            self.before_pass()
        if self.batches is None or "samples" not in saved:
            return
        self.require_samples(saved["samples"])
        sampler = self.batches.sampler_of_ids
        if saved["seed"] is not None:
            sampler.initial_seed = saved["seed"]
        if saved["generator"] is not None:
            set_generator(sampler, saved["generator"].clone())
        self.passes = int(saved["passes"])
        order = self.batches.order = LoaderOrder(saved["order"], saved["own"])
        if self.passes or saved["done"]:
            self.resumed = ResumedEpoch(passes=self.passes, done=int(saved["done"]), order=order)

    def restore_rank(self, saved: Mapping[str, Any]) -> None:
        """Restore the generators with which the next batch was fetched, and those of ends."""
        super().restore_rank(saved)
        if self.resumed is not None:
            self.resumed.fetch = saved.get(FETCH)

    def describe_rank(self, *, is_training: bool) -> dict[str, Any]:
        """Return the generators now, and before the newest fetch of a pass that is under way."""
        found = super().describe_rank(is_training=is_training)
        if self.batches is None or not is_training:
            return found
        fetch = self.batches.before_newest_fetch()
        return found if fetch is None else {**found, FETCH: fetch}

    def take_over(self) -> None:
        """Take over the place that Accelerate's own `load_state` gave a stateful loader."""
        base = self.inner.base_dataloader
        state = base.next_iter_state if is_stateful_loader(base) else None
        if state is None or self.batches is None:
            return
        if base.num_workers:
            raise SpecError(
                f"loader {self.number}: load_state of Accelerate's own checkpoint sets a stateful "
                f"loader with {base.num_workers} workers to a place that Holdfast cannot follow; "
                "load it with num_workers=0, or without use_stateful_dataloader"
            )
        base.next_iter_state = None
        self.before_pass()
        done = 0 if state["_iterator_finished"] else int(state["_num_yielded"]) * self.unit
        self.resumed = ResumedEpoch(done=done)

    def before_pass(self) -> None:
        """Drop the iterator that a stateful loader made when it was constructed.

        Only the first pass of a run may use it. Later ones draw a seed for a new one.
        """
        if is_stateful_loader(self.inner.base_dataloader):
            self.inner.base_dataloader.load_state_dict({})


class Stream(StreamedLoader):
    """Wraps a loader over a stream that Accelerate prepared.

    Accelerate's loader stays the one of its gradient state, which accumulation asks for the end.
    """

    def moved(self, batch: Any) -> Any:
        inner = self.inner
        # A dispatcher has no device of its own. It uses that of the process.
        device = getattr(inner, "device", None)
        if device is None and isinstance(inner, DataLoaderDispatcher):
            device = PartialState().device
        inner.end_of_dataloader = self.is_last
        if device is None:
            return batch
        return send_to_device(batch, device, non_blocking=inner._non_blocking)

    def begin_stream(self, *, is_new: bool) -> None:
        kinds = getattr(self.inner, "rng_types", None)
        if is_new and kinds:
            synchronize_rng_states(kinds, self.inner.synchronized_generator)
        self.inner.begin()

    def end_stream(self) -> None:
        self.inner.end()

    @property
    def passes_of_inner(self) -> int:
        return int(self.inner.iteration)

    @passes_of_inner.setter
    def passes_of_inner(self, passes: int) -> None:
        self.inner.iteration = passes

    def take_over(self) -> None:
        """Accelerate's own `load_state` gives a stream no place."""


def wrapped(
    given: Any, prepared: Any, number: int, iterate: Iterate, *, ranks: int, is_split: bool
) -> Loader | Stream:
    """Return the wrapper of a loader that the program gave and Accelerate prepared.

    With `is_split`, the loader's batches are those of all `ranks` together.
    """
    problem = ""
    if is_stream(given) and has_shards(given.dataset):
        batch = "global_batch" if is_split else "batch_size"
        try:
            found = stream_arguments(given, batch=batch)
            return Stream(prepared, number, iterate, found, dealt=1 if is_split else ranks)
        except SpecError as error:
            problem = f"a loader whose samples no resume could find again: {error}"
    loader = Loader(prepared, number, iterate)
    loader.problem = problem or loader.problem
    return loader


class Rest:
    """A loader without its first `skip` batches. Everything else is the loader's."""

    def __init__(self, loader: Loader | Stream, skip: int) -> None:
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
    if dataloader.batches is None and type(dataloader) is Loader:
        return skip_in_accelerate(dataloader.inner, num_batches)
    return Rest(dataloader, num_batches)


def is_loader(item: object) -> bool:
    """Return True for one of these wrappers, whose `__class__` is another one."""
    return type(item) in {Loader, Stream}


def problem_of_ranks(loader: Any) -> str | None:
    """Return why the ranks cannot continue their shares of a prepared loader, or None."""
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


def install(loader: Any) -> DealtBatches:
    """Wrap the batch sampler of a prepared loader in place, and return the wrapper."""
    base = loader.base_dataloader
    batches = wrap_sampler(
        base, lambda inner: DealtBatches(inner, notes_fetches=base.num_workers == 0)
    )
    if is_stateful_loader(base):
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
