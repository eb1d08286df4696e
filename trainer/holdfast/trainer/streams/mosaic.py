"""A `StreamingDataset` of MosaicML Streaming, in its own order for any number of ranks.

Streaming computes the order of an epoch from its seed and its canonical nodes, and continues it
after a number of samples at any number of ranks. So the state is that number. Before each iteration
the dataset gets the place to begin by its own `load_state_dict`. This module never imports the
package, because only a program that has it can pass a dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.streams import lanes, seeds
from holdfast.trainer.streams.loader import (
    Ranks,
    SkippedBatches,
    StreamBatches,
    StreamOptions,
    TrainingPlace,
    new_generator,
    without_workers,
)

# Attributes of a dataset that decide its order. A resume must find them unchanged.
_FIXED: Final = (
    *("num_samples", "num_shards", "epoch_size", "num_canonical_nodes", "shuffle", "shuffle_algo"),
    *("shuffle_seed", "shuffle_block_size", "sampling_method", "sampling_granularity"),
    *("batching_method", "partition_algo", "replication"),
)
# The part of Streaming's state that is not a position.
_KEPT: Final = ("num_canonical_nodes", "shuffle_seed", "initial_physical_nodes")
# Ways to make batches that Streaming continues at any number of ranks, and after any batch.
_BATCHING: Final = "random"
# Datasets whose place belongs to a session's loader.
_READ: Final[WeakSet[Any]] = WeakSet()


def is_read(dataset: Any) -> bool:
    """Return True if a session's loader has begun to read a dataset."""
    return any(each is dataset for each in _READ)


class StreamingLoader:
    """Iterates over the batches of a `StreamingDataset`, an epoch at a time.

    `Session.stream` makes one. An iteration yields the rest of the current epoch, also after a
    `break`. Iterate in the thread that trains, on all ranks together.
    """

    # A note for people.
    note = ""
    # With gradient accumulation, the program sets this.
    batches_per_step = 1

    def __init__(
        self,
        dataset: Any,
        options: StreamOptions,
        *,
        parts: int,
        ranks: Ranks,
        place: TrainingPlace,
    ) -> None:
        """Raises `SpecError` for a dataset that cannot continue exactly."""
        self._dataset, self._options = dataset, options
        self._ranks, self._skipped = ranks, SkippedBatches(place)
        _check(dataset, options, parts)
        self._global_batch = options.batch * parts
        # Streaming fills in what was not given, so ask before it does.
        self._facts = _facts_of(dataset)
        self._kept: dict[str, Any] = {}
        self._reader: Iterator[Any] | None = None
        # The next batch, as a tuple, if it has been read already.
        self._ahead: Any = None
        # The position: the epoch, its samples on all ranks together, and its batches.
        self.epoch, self._samples, self.given = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        return StreamBatches(self)

    def close(self) -> None:
        """Stop the workers. An iteration continues with new ones."""
        self._reader = self._ahead = None

    def next_of(self, epoch: int) -> Any:
        """Return the next batch of an epoch. Raises `StopIteration` if the epoch is over."""
        skipping = self._skipped.before_step(self.batches_per_step)
        while self._options.repeat or self.epoch == epoch:
            found = self._await_next()
            if found is None:
                self._end_epoch()
                continue
            self._ahead = None
            self._samples += self._global_batch
            self.given += 1
            if not skipping:
                return found[0]
            skipping -= 1
        raise StopIteration

    def has_next(self) -> bool:
        """Return whether the epoch has another batch, which is read now and given later.

        All ranks call this together. The state is still that of the batches that were given.
        """
        return self._await_next() is not None

    def reads(self, source: Any) -> bool:
        """Return whether a dataset has the order of this one."""
        return source is self._dataset or _facts_of(source) == self._facts

    def _await_next(self) -> Any:
        if self._ahead is None:
            self._ahead = next(self._open(), None)
        return self._ahead

    def _end_epoch(self) -> None:
        self.close()
        if self.given == 0:
            raise SpecError(
                f"epoch {self.epoch} of the stream has no batch: with drop_last, it has fewer "
                f"samples than the {self._global_batch} of a step; use a smaller batch_size"
            )
        self.epoch, self._samples, self.given = self.epoch + 1, 0, 0

    def _open(self) -> Iterator[Any]:
        if self._reader is None:
            self._seek()
            options, epoch = self._options, self.epoch
            loader = DataLoader(
                _Samples(self._dataset, options.transform, options.seed, epoch),
                batch_size=options.batch,
                num_workers=options.num_workers,
                drop_last=options.drop_last,
                collate_fn=_Collate(options.collate, options.seed, epoch),
                # The seed of the workers, which would otherwise be drawn from the program's
                # generator.
                generator=new_generator(),
                **(options.loader if options.num_workers else without_workers(options.loader)),
            )
            self._reader = iter(loader)
        return self._reader

    def _seek(self) -> None:
        """Tell the dataset where its next iteration begins. All ranks call this together."""
        dataset = self._dataset
        _READ.add(dataset)
        state = {"epoch": self.epoch, "sample_in_epoch": self._samples, **self._streaming_state()}
        # The ranks of a node share the memory that the next call writes and the last one has read.
        self._ranks.largest([0])
        dataset.load_state_dict(state)
        # Its counter of epochs, in shared memory, is past this epoch after an early end.
        dataset.next_epoch = self.epoch
        # No rank begins before the others have written this, too.
        self._ranks.largest([0])

    def _streaming_state(self) -> dict[str, Any]:
        if not self._kept:
            state = self._dataset.state_dict(0, True)
            self._kept = {name: _plain(state[name]) for name in _KEPT}
        return self._kept

    # --- state ----------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what is the same on all ranks and decides how a resume continues."""
        return {**self._facts, "global_batch": self._global_batch}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were given, the same on all ranks."""
        return {
            "epoch": self.epoch,
            "samples": self._samples,
            "given": self.given,
            **self._streaming_state(),
        }

    def resume(self, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
        """Continue after the saved state. All ranks call this together, each with its `rows`.

        Returns a line for people if the global batch has changed, or "". Raises `CheckpointError`
        if the dataset has.
        """
        now = self.facts()
        if changed := [name for name in _FIXED if facts.get(name) != now[name]]:
            what = ", ".join(f"{name} {facts.get(name)} → {now[name]}" for name in changed)
            raise CheckpointError(
                f"the StreamingDataset is not the one of the checkpoint ({what}), so its order is "
                "another one. Give it the former values, or begin it afresh with exclude or "
                "another name"
            )
        # At another size, some ranks have read no row.
        row = next(row for each in self._ranks.gather(lambda: rows) for row in each)
        self.epoch, self._samples = int(row["epoch"]), int(row["samples"])
        self.given = int(row["given"])
        self._kept = {name: row[name] for name in _KEPT}
        before = facts.get("global_batch")
        if before == self._global_batch:
            return ""
        return (
            f"the global batch of the StreamingDataset changed ({before} → {self._global_batch}); "
            "it continues from the same sample of its order"
        )


class _Samples(IterableDataset[Any]):
    """The numbers and samples that a dataset gives this worker. It seeds before each of them."""

    def __init__(
        self, dataset: Any, transform: Callable[[Any], Any] | None, seed: int, epoch: int
    ) -> None:
        super().__init__()
        self._dataset, self._transform = dataset, transform
        self._seed, self._epoch = seed, epoch

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        dataset, read = self._dataset, self._dataset.__getitem__
        is_rank = get_worker_info() is None

        def seeded(number: int) -> tuple[int, Any]:
            with lanes.kept_generators() if is_rank else nullcontext():
                seeds.seed_all(seeds.key_of(seeds.READ, self._seed, self._epoch, int(number)))
                sample = read(number)
                if self._transform is not None:
                    sample = self._transform(sample)
            return int(number), sample

        # The dataset's own iteration calls this for each number of its order.
        dataset.__getitem__ = seeded
        try:
            yield from dataset
        finally:
            del dataset.__getitem__


@dataclass(frozen=True)
class _Collate:
    """Makes a batch, with the seed of its first sample. A tuple keeps it whole."""

    collate: Callable[[list[Any]], Any]
    seed: int
    epoch: int

    def __call__(self, found: list[tuple[int, Any]]) -> tuple[Any]:
        with lanes.kept_generators() if get_worker_info() is None else nullcontext():
            seeds.seed_all(seeds.key_of(seeds.COLLATE, self.seed, self.epoch, found[0][0]))
            return (self.collate([sample for _, sample in found]),)


def check_arguments(dataset: Any, given: Mapping[str, Any], usual: Mapping[str, Any]) -> int:
    """Return the batch size of a dataset.

    Raises `SpecError` if it has none, or if an argument of `Session.stream` is not the usual one
    although the dataset decides it.
    """
    for name, value in given.items():
        if value != usual[name]:
            raise SpecError(
                f"{name}={value!r} with a StreamingDataset, which has its own order; give "
                "shuffle, shuffle_algo and shuffle_block_size to the dataset, and leave "
                f"{name} out here"
            )
    if not isinstance(size := dataset.batch_size, int):
        raise SpecError(
            f"a StreamingDataset with batch_size={size!r}: expected the samples of each rank and "
            "step, which its order depends on; pass batch_size to the dataset"
        )
    return size


def _check(dataset: Any, options: StreamOptions, parts: int) -> None:
    size, readers = dataset.batch_size, int(dataset._parallel_rank_world.num_ranks)
    if size != options.batch:
        raise SpecError(
            f"{options.batch} samples of each rank and step, and a StreamingDataset with "
            f"batch_size={size}: expected the same number; pass it to the dataset, and leave it "
            "out here"
        )
    if readers != parts:
        raise SpecError(
            f"the StreamingDataset divides its samples over {readers} ranks, and the session over "
            f"{parts}; ranks that work on the same samples need replication= in the dataset and "
            "mesh= in the Session, and both must fit"
        )
    if dataset.batching_method != _BATCHING:
        raise SpecError(
            f"a StreamingDataset with batching_method={dataset.batching_method!r}, which is not "
            "known to continue exactly; use batching_method='random', or give session.stream "
            "MdsShards(folder)"
        )


def _facts_of(dataset: Any) -> dict[str, Any]:
    return {name: _plain(getattr(dataset, name)) for name in _FIXED}


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python."""
    return value.item() if hasattr(value, "item") else value
