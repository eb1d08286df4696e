"""The position in the training data of a Lightning trainer.

The order of the samples stays the one that Lightning chooses: that of its `DistributedSampler`, or
of the loader's own sampler. In the middle of an epoch, a resume goes on with the next batch:

| loader | how the resume reaches the next batch |
|---|---|
| a `DataLoader` with a batch sampler | the sampler draws its ids again, and no data is read |
| a loader with a state of its own, such as `StatefulDataLoader` | by that state |
| streams without a length, several loaders, other iterables | the batches are read again |

Samplers draw from random generators when an iteration begins. So the generators' states of that
moment are saved, and a resume sets them for a moment. Lightning itself starts the loader again from
the epoch's first batch, and counts on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.contracts.reporting import report
from holdfast.trainer.state import rng

Draws = dict[str, torch.Tensor]


class Remaining:
    """A batch sampler that begins after the first `skip` batches, and has the length of all."""

    def __init__(self, batches: Any, skip: int) -> None:
        self.batches, self.skip = batches, skip
        self._latest: _RemainingIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        self._latest = _RemainingIterator(iter(self.batches), self.skip)
        return self._latest

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def arrive(self) -> None:
        """Skip now, if the loader has not done so yet. Later iterations skip nothing."""
        if self._latest is not None:
            self._latest.arrive()
        self.skip = 0


class _RemainingIterator(Iterator[Any]):
    """Skips when the first batch is asked for, as late as the sampler itself would draw."""

    def __init__(self, batches: Iterator[Any], skip: int) -> None:
        self._batches, self._skip = batches, skip

    def __next__(self) -> Any:
        self.arrive()
        return next(self._batches)

    def arrive(self) -> None:
        skip, self._skip = self._skip, 0
        for _ in range(skip):
            next(self._batches, None)


class TrainingData:
    """The training loaders of a `fit`, and where training stands in them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaders: list[Any] = []
        # The random states before the epoch's iterator was created, and before its first batch.
        self._start: Draws = {}
        self._first: Draws = {}
        self._start_states: list[Any] = []
        # What the checkpoint contains, until it is used.
        self._saved: Mapping[str, Any] = {}
        self._saved_rank: Mapping[str, Any] = {}
        self._resumes_inside = self._is_loading = False
        self._remaining: list[Remaining] = []
        self._created = 0
        process = trainer.strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            return self._scaled(process(loader)) if self._is_loading else process(loader)

        trainer.strategy.process_dataloader = process_dataloader

    # --- what a checkpoint contains -------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Return how the order is made, which is the same on all ranks."""
        return {
            "world_size": self._trainer.world_size,
            "batch_sizes": [_batch_size(each) for each in self._loaders],
            "samplers": [_order_of(each) for each in self._loaders],
            "has_states": any(map(_has_state, self._loaders)),
        }

    def rank_state(self) -> dict[str, Any]:
        """Return the random states of the epoch, and the states of this rank's loaders."""
        return {
            "start": self._start,
            "first": self._first,
            "now": _generators(self._loaders),
            "loaders": _states_of(self._loaders),
            "loaders_at_start": self._start_states,
        }

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` if the loaders cannot continue at this number of ranks."""
        self._saved = state
        saved, now = state["world_size"], self._trainer.world_size
        if saved != now and state["has_states"]:
            raise CheckpointError(
                f"a training loader has a state of its own, saved by each of {saved} ranks, and "
                f"cannot continue at {now}: it contains one rank's share of the data. Run at "
                f"{saved} ranks, or use a DataLoader over a dataset with an index"
            )

    def load_rank(self, state: Mapping[str, Any]) -> None:
        self._saved_rank = state

    # --- called by the loops --------------------------------------------------------------

    def resume_inside(self) -> None:
        """The first iterator continues the restored epoch."""
        self._resumes_inside = True

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around Lightning's creation of the training loaders and of their first iterator."""
        now, self._is_loading, self._created = rng.capture(), True, 0
        try:
            yield
        finally:
            self._is_loading = False
        fetcher = self._trainer.fit_loop._data_fetcher
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise SpecError(
                "training_step takes dataloader_iter, so only the module knows which batches it "
                "has used, and no resume can continue there; take batch instead"
            )
        if self._resumes_inside and self._loaders:
            self._resumes_inside = False
            self._arrive(fetcher)
            rng.restore(now)

    def before_iterator(self, combined: Any) -> None:
        """Note the random states, or set those of the restored epoch."""
        self._loaders = list(combined.flattened)
        self._check_order()
        if self._resumes_inside:
            self._prepare_skip()
            return
        if self._saved_rank and not self._is_loading:
            # The first new epoch after a resume between two epochs.
            now = rng.capture()
            _load_ended_states(self._loaders, self._saved_rank["loaders"])
            _set_draws(self._loaders, now | self._saved_rank["now"])
            self._saved_rank = {}
        self._start = _draws(self._loaders)
        self._start_states = _states_of(self._loaders) if self._reads_again else []

    def before_first_batch(self) -> None:
        """Note the random states from which samplers draw that have not drawn yet."""
        self._first = _draws(self._loaders)

    # --- a resume in the middle of an epoch -----------------------------------------------

    @property
    def _trained(self) -> int:
        """The batches of this epoch that were trained on."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    @property
    def _reads_again(self) -> bool:
        """True if a resume must read the epoch's former batches again.

        Lightning fetches one batch ahead if a loader has no length. The loader's own state is then
        one batch ahead of training, and would skip that batch.
        """
        if all(map(_has_state, self._loaders)):
            return not all(map(_has_length, self._loaders))
        return len(self._loaders) != 1 or not _has_order(self._loaders[0])

    def _prepare_skip(self) -> None:
        """Set everything that an iterator of the restored epoch reads when it is created."""
        for loader in self._loaders:
            # Lightning does so later, but workers fetch as soon as the iterator exists.
            _set_sampler_epoch(loader, self._trainer.fit_loop.epoch_progress.current.processed)
        saved = self._saved_rank
        self._start, self._first = saved.get("start", {}), saved.get("first", {})
        self._start_states = saved.get("loaders_at_start", [])
        _set_draws(self._loaders, self._start)
        _load_states(
            self._loaders, self._start_states if self._reads_again else saved.get("loaders", [])
        )
        if not self._reads_again and not any(map(_has_state, self._loaders)):
            self._remaining = [_skip_batches(each, self._trained) for each in self._loaders]

    def _arrive(self, fetcher: Any) -> None:
        """Make the iterator yield the batch after the last one that was trained on."""
        _set_draws(self._loaders, self._first)
        for each in self._remaining:
            each.arrive()
        if self._reads_again:
            for _ in range(self._trained):
                next(fetcher, None)
            # The loop adds the batches that were trained on.
            fetcher.fetched -= self._trained
        _set_draws(self._loaders, self._saved_rank.get("now", {}))
        self._saved_rank = {}

    # --- another number of ranks ----------------------------------------------------------

    def _scaled(self, loader: Any) -> Any:
        """Return a loader whose batch keeps the run's global batch at this number of ranks.

        Raises `CheckpointError` if the global batch does not split evenly.
        """
        number, self._created = self._created, self._created + 1
        sizes, former_ranks = self._saved.get("batch_sizes", []), self._saved.get("world_size")
        ranks = self._trainer.world_size
        if former_ranks in (None, ranks) or number >= len(sizes) or not _has_order(loader):
            return loader
        former = sizes[number]
        if former is None:
            return loader
        wanted, rest = divmod(former * former_ranks, ranks)
        if rest or not wanted:
            raise CheckpointError(
                f"a global batch of {former * former_ranks} ({former} on each of {former_ranks} "
                f"ranks) does not split evenly over {ranks} ranks; run at a number of ranks that "
                "divides it"
            )
        if _batch_size(loader) != wanted:
            _set_batch_size(loader, wanted)
            if self._trainer.is_global_zero:
                report(
                    f"holdfast: {former_ranks} → {ranks} ranks: each rank's batch has {wanted} "
                    f"samples instead of {former}, so the global batch stays the same"
                )
        return loader

    def _check_order(self) -> None:
        """Raise `CheckpointError` if another number of ranks changes the order of the samples."""
        former, ranks = self._saved.get("samplers"), self._trainer.world_size
        now = [_order_of(each) for each in self._loaders]
        if former is None or self._saved["world_size"] == ranks:
            return
        if now != former or any(each != DistributedSampler.__name__ for each in now):
            raise CheckpointError(
                f"the order of the samples came from {former} at {self._saved['world_size']} "
                f"ranks, and comes from {now} at {ranks}. It continues at another number of ranks "
                'only with DistributedSampler. Use strategy="ddp": Lightning then uses that '
                "sampler at one rank too"
            )


def _draws(loaders: list[Any]) -> Draws:
    """Return the state of every generator that a sampler may draw from."""
    return rng.capture() | _generators(loaders)


def _generators(loaders: list[Any]) -> Draws:
    """Return the states of the loaders' own generators, by their place."""
    return {name: one.get_state() for name, one in _named_generators(loaders)}


def _set_draws(loaders: list[Any], states: Draws) -> None:
    rng.restore(states)
    for name, one in _named_generators(loaders):
        if name in states:
            one.set_state(states[name])


def _named_generators(loaders: list[Any]) -> Iterator[tuple[str, torch.Generator]]:
    for number, loader in enumerate(loaders):
        sampler = _sampler_of(loader)
        # Lightning puts a sampler of another kind into its DistributedSamplerWrapper.
        wrapped = getattr(getattr(sampler, "dataset", None), "_sampler", None)
        for part, owner in (("loader", loader), ("sampler", sampler), ("wrapped", wrapped)):
            found = getattr(owner, "generator", None)
            if isinstance(found, torch.Generator):
                yield f"{part}{number}", found


def _has_state(loader: Any) -> bool:
    """Return True if the loader's own state says where it stands.

    torchdata's loader cannot continue a `DistributedSampler` that draws: its resume draws twice.
    """
    sampler = _sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and not hasattr(sampler, "state_dict"):
        return False
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _states_of(loaders: list[Any]) -> list[Any]:
    return [each.state_dict() if _has_state(each) else None for each in loaders]


def _load_states(loaders: list[Any], states: list[Any]) -> None:
    for loader, state in zip(loaders, states, strict=False):
        if state is not None and _has_state(loader):
            loader.load_state_dict(state)


def _load_ended_states(loaders: list[Any], states: list[Any]) -> None:
    """Restore loaders whose next iterator begins a new epoch.

    torchdata's loader continues the saved epoch with its first iterator after `load_state_dict`.
    That epoch has no batches left, although the loader does not know it: Lightning asks for as many
    batches as the loader has, and not for one more.
    """
    _load_states(loaders, states)
    for loader, state in zip(loaders, states, strict=False):
        if state is not None and isinstance(loader, DataLoader):
            iter(loader)


def _has_length(loader: Any) -> bool:
    return sized_len(loader) is not None


def _has_order(loader: Any) -> bool:
    """Return True if a sampler orders the samples, so that batches can be skipped unread."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _sampler_of(loader: Any) -> Any:
    """Return the sampler that orders the samples. Lightning gives some loaders a batch sampler."""
    found = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return getattr(loader, "sampler", None) if found is None else found


def _order_of(loader: Any) -> str | None:
    return type(_sampler_of(loader)).__name__ if _has_order(loader) else None


def _batch_size(loader: Any) -> int | None:
    """Return the samples in a batch, or None if a batch sampler of the user's own decides."""
    found = getattr(loader.batch_sampler, "batch_size", None) if _has_order(loader) else None
    return found if isinstance(found, int) else None


def _skip_batches(loader: Any, count: int) -> Remaining:
    """Make the loader's next iterator begin after `count` batches."""
    remaining = Remaining(loader.batch_sampler, count)
    # A DataLoader refuses assignments to its parts. Persistent workers keep the sampler, too.
    object.__setattr__(loader, "batch_sampler", remaining)
    if loader._iterator is not None:
        loader._iterator._index_sampler = remaining
    return remaining


def _set_batch_size(loader: Any, size: int) -> None:
    loader.batch_sampler.batch_size = size
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)
