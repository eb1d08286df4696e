"""The position in the training data of a Lightning trainer.

The order of the samples stays the one that Lightning chooses: that of its `DistributedSampler`, or
of the loader's own sampler. In the middle of an epoch, a resume continues with the next batch:

| loader | how the resume reaches the next batch |
|---|---|
| a `DataLoader` with a batch sampler | the sampler draws its ids again, and no data is read |
| a loader that has a state, such as `StatefulDataLoader` | by that state |
| a single loader over a stream that names its shards | by the position of the session's stream |
| other streams, several loaders, other iterables | the batches are read again: `NotedStreams` |

Of several loaders, the shorter ones begin again within an epoch, and then draw from generators that
the model has used, too. So each such moment is noted, and the batches are read again from the same
states. A stream may draw at any batch, so one that does is refused: see `WatchedStreams`.

Samplers draw from random generators when an iteration begins. So the generators' states of that
moment are saved, and a resume sets them for a moment. Lightning itself starts the loader again from
the epoch's first batch, and counts on.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import repeat
from typing import Any, Final

import numpy as np
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from holdfast.contracts.disk.digests import RunningDigest
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.contracts.records.topology import FIXED, GLOBAL_BATCHES
from holdfast.trainer.frameworks import streamed
from holdfast.trainer.frameworks.data_generators import DataGenerators
from holdfast.trainer.frameworks.lightning import global_batch
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.state import rng, torchdata_loaders
from holdfast.trainer.streams.convert import is_streaming_dataset
from holdfast.trainer.streams.loader import EpochStream

# The states of generators by their place. `DATA` has those of datasets and collators.
Draws = dict[str, Any]
DATA: Final = "data"
# Bytes at each end of a tensor that count. Whole batches of images would take milliseconds.
_END_BYTES: Final = 4096
# Lightning fetches a batch ahead.
_KEPT: Final = 4


def can_be_stream(loader: Any) -> bool:
    """Return True for a loader that the session's own can replace."""
    return streamed.is_stream(loader) and streamed.has_shards(loader.dataset)


class FitEpochs:
    """The trainer's only training loader if it has shards, read by the session's own loader.

    The trainer iterates over it once for each of its epochs. Without a length, Lightning would
    fetch one batch ahead to learn which one is the last. The stream knows, so nothing is fetched
    ahead, and its state is that of the batches that were trained on.
    """

    def __init__(self, stream: EpochStream) -> None:
        self.stream = stream
        # The next iteration continues the restored epoch, even if nothing is left of it.
        self.continues = False

    def __iter__(self) -> Iterator[Any]:
        continues, self.continues = self.continues, False
        if not continues and self.stream.given and not self.stream.has_next():
            # The trainer does not ask for one more batch after the last.
            next(iter(self.stream), None)
        return iter(self.stream)


class StreamFetcher(_PrefetchDataFetcher):
    """Fetches no batch ahead, and knows which one is the last of the epoch."""

    def __init__(self, stream: EpochStream) -> None:
        super().__init__(prefetch_batches=0)
        self._stream = stream

    def __iter__(self) -> StreamFetcher:
        super().__iter__()
        self.done = not self._stream.has_next()
        return self

    def __next__(self) -> Any:
        batch = super().__next__()
        self.done = not self._stream.has_next()
        return batch


class TrainingStream:
    """The stream of a `fit`, if its training data is one. A run keeps its global batch."""

    def __init__(self) -> None:
        self.epochs: FitEpochs | None = None
        # True if the trainer made its loaders before the session was open.
        self.is_waiting = False
        self._batch = self._global_batch = 0
        self._saved: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if self.epochs is None:
            return {}
        return {"batch": self._batch, "global_batch": self._global_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = state

    def rank_limits(self) -> dict[str, Any]:
        return {GLOBAL_BATCHES: [self._global_batch]}

    def replace(self, combined: Any, session: FrameworkSession | None) -> None:
        """Replace a single loader over a stream in the trainer's combined loader.

        Raises `SpecError` for a stream that no resume could continue.
        """
        loaders = combined.flattened
        if len(loaders) != 1 or not can_be_stream(loaders[0]):
            return
        self.is_waiting = session is None
        if session is None:
            return
        source, options = streamed.stream_arguments(loaders[0])
        if self.epochs is None:
            self.epochs = FitEpochs(self._make(session, source, options))
        elif not self.epochs.stream.reads(source):
            raise SpecError(
                "reload_dataloaders_every_n_epochs gives the trainer a stream with other shards; "
                "expected the same ones, whose position each checkpoint has"
            )
        # The loader's length is that of another batch size, if the number of ranks has changed.
        if combined.limits == [sized_len(loaders[0])]:
            combined.limits = [float("inf")]
        combined.flattened = [self.epochs]

    def _make(self, session: FrameworkSession, source: Any, options: dict[str, Any]) -> Any:
        self._batch = options.pop("batch_size")
        self._global_batch = self._batch * session.world_size
        # A program that gives the loader another size than before has the last word.
        if self._saved.get("batch") == self._batch:
            self._global_batch = int(self._saved["global_batch"])
        return session.stream_of_loader(source, global_batch=self._global_batch, **options)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Around the creation of the trainer's fetcher, which a stream replaces."""
        module: Any = fit_loop
        select: Callable[..., Any] = module._select_data_fetcher

        def of_stream(*given: Any) -> Any:
            found = select(*given)
            if self.epochs is None or type(found) is not _PrefetchDataFetcher:
                return found
            return StreamFetcher(self.epochs.stream)

        module._select_data_fetcher = of_stream
        try:
            yield
        finally:
            module._select_data_fetcher = select


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


class DrawLog:
    """The random states from which the samplers of several loaders draw in an epoch, in order."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []
        self.states: list[Draws] = []
        self._at = 0

    def begin(self, loaders: list[Any], states: list[Draws]) -> None:
        """Begin an epoch, or the restored one with its `states`."""
        self._loaders, self.states, self._at = loaders, states, 0

    def meet(self) -> None:
        """Set the next state that the restored epoch noted, or note a new one."""
        if self._at < len(self.states):
            _set_draws(self._loaders, self.states[self._at])
        else:
            self.states.append(_draws(self._loaders))
        self._at += 1


class NotedSampler:
    """A batch sampler whose draws are noted: when an iteration begins, and at its first batch."""

    def __init__(self, batches: Any, log: DrawLog) -> None:
        self.batches, self._log = batches, log

    def __iter__(self) -> Iterator[Any]:
        self._log.meet()
        return self._iterate(iter(self.batches))

    def _iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._log.meet()
        yield from batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


class TrainingData:
    """The training loaders of a `fit`, and where training stands in them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaders: list[Any] = []
        # The random states before the epoch's iterator was created, and before its first batch.
        self._start: Draws = {}
        self._first: Draws = {}
        self._start_states: list[Any] = []
        self._log = DrawLog()
        # The streams of which a resume reads the epoch's batches again.
        self._noted: NotedStreams | None = None
        self.stream = TrainingStream()
        # The datasets of the training.
        self._read: list[Any] = []
        # What the checkpoint contains, until it is used.
        self._saved: Mapping[str, Any] = {}
        self._saved_rank: Mapping[str, Any] = {}
        self._resumes_inside = self._is_loading = False
        self._remaining: list[Remaining] = []
        # How many loaders this load has created, and the batch sizes as the program gave them.
        self._created = 0
        self._given: list[int | None] = []
        process = trainer.strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            return self._continued(process(loader)) if self._is_loading else process(loader)

        trainer.strategy.process_dataloader = process_dataloader

    # --- what a checkpoint contains -------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Return how the order is made, which is the same on all ranks."""
        return {
            "world_size": self._trainer.world_size,
            "shares": [asdict(each) for each in self._shares()],
            "has_states": any(map(_has_state, self._loaders)),
            "stream": self.stream.state_dict(),
        }

    def rank_state(self) -> dict[str, Any]:
        """Return the random states of the epoch, and the states of this rank's loaders."""
        return {
            "start": self._start,
            "first": self._first,
            "now": _generators(self._loaders),
            "loaders": _states_of(self._loaders),
            "loaders_at_start": self._start_states,
            "draws": self._log.states,
            "batches": "" if self._noted is None else self._noted.digests.get(self._trained, ""),
        }

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` if the loaders cannot continue at this number of ranks."""
        self._saved = state
        self.stream.load_state_dict(state.get("stream", {}))
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
            with self.stream.fetching():
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
        if self._is_loading:
            self._use_stream(combined)
        self._loaders = list(combined.flattened)
        for loader in filter(_has_state, self._loaders):
            torchdata_loaders.check_kept_workers(loader)
            torchdata_loaders.check_stream_of_datasets(loader)
            torchdata_loaders.prepare_workers(loader)
        self._prepare_to_read_again(combined)
        if self._resumes_inside:
            self._log.begin(self._loaders, list(self._saved_rank.get("draws", ())))
            self._prepare_skip()
            return
        self._log.begin(self._loaders, [])
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
        if self.stream.epochs is not None:
            return False
        if all(map(_has_state, self._loaders)):
            return not all(map(_has_length, self._loaders))
        return len(self._loaders) != 1 or not global_batch.has_order(self._loaders[0])

    def _prepare_to_read_again(self, combined: Any) -> None:
        """Note the draws of loaders whose batches a resume reads again, and watch streams."""
        self._noted = None
        if not self._reads_again:
            return
        for loader in filter(global_batch.has_order, self._loaders):
            if not isinstance(loader.batch_sampler, NotedSampler):
                noted = NotedSampler(loader.batch_sampler, self._log)
                # A DataLoader refuses assignments to its parts.
                object.__setattr__(loader, "batch_sampler", noted)
        if type(combined) is CombinedLoader and not any(map(global_batch.has_order, self._loaders)):
            is_here = not any(getattr(each, "num_workers", 0) for each in self._loaders)
            combined.__class__ = WatchedStreams if is_here else NotedStreams
        self._noted = combined if isinstance(combined, NotedStreams) else None
        if self._noted is not None:
            self._noted.begin_epoch()

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
        if self.stream.epochs is not None:
            self.stream.epochs.continues = True
        elif not self._reads_again and not any(map(_has_state, self._loaders)):
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
            if self._noted is not None:
                self._noted.require_same(self._trained, self._saved_rank.get("batches", ""))
        _set_draws(self._loaders, self._saved_rank.get("now", {}))
        self._saved_rank = {}

    # --- another number of ranks ----------------------------------------------------------

    def _continued(self, loader: Any) -> Any:
        """Return a loader that keeps the run's order and global batch at this number of ranks.

        Raises `CheckpointError` if it cannot.
        """
        saved, trainer = self._saved.get("shares", ()), self._trainer
        number, self._created = self._created, self._created + 1
        self._given[number:] = [global_batch.batch_size(loader)]
        if number < len(saved) and not can_be_stream(loader):
            former = global_batch.SampleShare(**saved[number])
            global_batch.continue_share(
                loader, former, rank=trainer.global_rank, ranks=trainer.world_size
            )
        return loader

    def _use_stream(self, combined: Any) -> None:
        """Let the session read a single loader over a stream. Check the streams among several."""
        self._read = [getattr(loader, "dataset", None) for loader in combined.flattened]
        self.check_evaluation()
        self.stream.replace(combined, self._trainer.fit_loop.holdfast.session)
        saved, trainer = self._saved.get("shares", ()), self._trainer
        for loader, former in zip(combined.flattened, saved, strict=False):
            if can_be_stream(loader) and not self.stream.is_waiting:
                share = global_batch.SampleShare(**former)
                global_batch.continue_share(
                    loader, share, rank=trainer.global_rank, ranks=trainer.world_size
                )

    def check_evaluation(self) -> None:
        """Raise `SpecError` for an evaluation that would move the place of the training."""
        evaluation = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        for loader in () if evaluation is None else evaluation.flattened:
            dataset = getattr(loader, "dataset", None)
            if is_streaming_dataset(dataset) and any(dataset is each for each in self._read):
                raise SpecError(streamed.EVALUATED)

    def rank_limits(self) -> dict[str, Any]:
        if self.stream.epochs is not None:
            return self.stream.rank_limits()
        if any(map(_has_state, self._loaders)):
            return {FIXED: "each rank's loader has a state of its own share of the data"}
        return global_batch.limits_of(self._shares())

    def _shares(self) -> list[global_batch.SampleShare]:
        ranks = self._trainer.world_size
        given = [*self._given, *(None for _ in self._loaders)]
        return [
            global_batch.SampleShare.of(*each)
            for each in zip(self._loaders, repeat(ranks), given, strict=False)
        ]


def _draws(loaders: list[Any]) -> Draws:
    """Return the state of every generator that a sampler may draw from."""
    return rng.capture() | _generators(loaders)


def _generators(loaders: list[Any]) -> Draws:
    """Return the states of the generators of the loaders and of their data, by their place."""
    states: Draws = {name: one.get_state() for name, one in _named_generators(loaders)}
    return states | {DATA: _of_data(loaders).state_dict()}


def _set_draws(loaders: list[Any], states: Draws) -> None:
    rng.restore(states)
    for name, one in _named_generators(loaders):
        if name in states:
            one.set_state(states[name])
    _of_data(loaders).load_state_dict(states.get(DATA, {}))


def _of_data(loaders: list[Any]) -> DataGenerators:
    found = DataGenerators()
    found.watch(*loaders)
    return found


def _named_generators(loaders: list[Any]) -> Iterator[tuple[str, torch.Generator]]:
    for number, loader in enumerate(loaders):
        sampler = global_batch.sampler_of(loader)
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
    sampler = global_batch.sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and not hasattr(sampler, "state_dict"):
        return False
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _states_of(loaders: list[Any]) -> list[Any]:
    return [each.state_dict() if _has_state(each) else None for each in loaders]


def _load_states(loaders: list[Any], states: list[Any]) -> None:
    for loader, state in zip(loaders, states, strict=False):
        if state is not None and _has_state(loader):
            torchdata_loaders.check_workers(loader, state)
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


def _skip_batches(loader: Any, count: int) -> Remaining:
    """Make the loader's next iterator begin after `count` batches."""
    remaining = Remaining(loader.batch_sampler, count)
    # A DataLoader refuses assignments to its parts. Persistent workers keep the sampler, too.
    object.__setattr__(loader, "batch_sampler", remaining)
    if loader._iterator is not None:
        loader._iterator._index_sampler = remaining
    return remaining


class NotedStreams(CombinedLoader):
    """Streams whose batches are noted, so that a resume knows whether it reads the same ones.

    `digests` has the digest of an epoch's batches up to each of the last ones, by their number.
    """

    digests: dict[int, str]

    def begin_epoch(self) -> None:
        """Forget the batches of the epoch before."""
        self.digests = {0: ""}

    def __next__(self) -> Any:
        found = super().__next__()
        number, before = list(self.digests.items())[-1]
        self.digests[number + 1] = digest_of_batch(before, found[0])
        self.digests.pop(number + 1 - _KEPT, None)
        return found

    def require_same(self, trained: int, saved: str) -> None:
        """Raise `CheckpointError` if the first `trained` batches are not those of the digest."""
        if saved and self.digests.get(trained) != saved:
            names = ", ".join(sorted({data_name(each) for each in self.flattened}))
            raise CheckpointError(
                f"the training stream {names} gave other samples when the first {trained} batches "
                f"of the epoch were read again, so no resume can continue in it; {streamed.WAY_OUT}"
            )


class WatchedStreams(NotedStreams):
    """Streams that this process reads, and that must not draw from the global generators.

    The model draws from them between two batches, so batches that are read again would differ.
    """

    def __next__(self) -> Any:
        before = _global_states()
        batch = super().__next__()
        if _global_states() != before:
            names = ", ".join(sorted({data_name(each) for each in self.flattened}))
            raise SpecError(
                f"the training stream {names} draws from the global random generators while its "
                "samples are read, and the model draws from them in between, so no resume could "
                "read the same samples again. Give the stream its own generator, as an "
                "attribute of the dataset, or read it in worker processes (num_workers=1 or more)"
            )
        return batch


def digest_of_batch(before: str, batch: Any) -> str:
    """Return a digest of a batch and of those before it. Of a large tensor, the ends count."""
    running = RunningDigest(before.encode())
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            running.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if leaf.device.type == "cpu" and leaf.layout == torch.strided:
                flat = leaf.detach().reshape(-1)
                ends = max(1, _END_BYTES // leaf.element_size())
                for part in (flat[:ends], flat[-ends:]):
                    running.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float | None):
            running.update(repr(leaf).encode())
        else:
            running.update(type(leaf).__name__.encode())
    return str(running.hexdigest())


def data_name(loader: Any) -> str:
    """Return the name of a loader's dataset, or of another iterable."""
    return type(getattr(loader, "dataset", loader)).__qualname__


def _global_states() -> tuple[Any, ...]:
    """Return the states of the global generators of the CPU, from which streams draw."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), pickle.dumps(np.random.get_state())
