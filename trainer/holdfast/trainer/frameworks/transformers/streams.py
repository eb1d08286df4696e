"""Streams as the training data of a trainer: read by the session's loader, never skipped over.

A trainer's epoch is one of the stream. With gradient accumulation, a step has the same number of
batches everywhere: the last batches of an epoch that fill no step are completed by the first ones
of the next. So no gradient is ever left between two steps, where a checkpoint would lose it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from accelerate.data_loader import (
    DataLoaderDispatcher,
    IterableDatasetShard,
    prepare_data_loader,
)
from transformers import trainer as trainer_module

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.streamed import is_stream, stream_arguments, undivided
from holdfast.trainer.session.streaming import PASSED_ON
from holdfast.trainer.streams.convert import is_streaming_dataset
from holdfast.trainer.streams.loader import EpochStream

_OF_LOADER: Final = ("batch_size", "num_workers", "collate_fn", "drop_last", *PASSED_ON)


class StreamEpochs:
    """The loader that the trainer iterates over, once for each of its epochs."""

    def __init__(self, stream: EpochStream, accumulation: int) -> None:
        """`accumulation` is the number of batches of a step."""
        self._stream, self._accumulation, self._epoch = stream, accumulation, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which is empty if the stream is beyond it."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self._stream.epoch <= self._epoch:
            yield from self._next_step()

    def _next_step(self) -> list[Any]:
        """Return the batches of a step, or none if the epoch has ended after the step before."""
        batches: list[Any] = []
        while len(batches) < self._accumulation:
            try:
                batches.append(self._stream.next_of(self._stream.epoch))
            except StopIteration:
                if not batches:
                    break
        return batches


def stream_of(loader: Any, args: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the source and the arguments of a trainer's stream, or None for other data.

    Raises `SpecError` for a stream that no resume could continue.
    """
    if not is_stream(loader):
        return None
    base = getattr(loader, "base_dataloader", loader)
    dataset = base.dataset
    if args.accelerator_config.dispatch_batches is False and hasattr(dataset, "_distributed"):
        raise SpecError(
            "accelerator_config={'dispatch_batches': False} lets Accelerate divide the dataset, "
            "which the session does. Leave dispatch_batches out"
        )
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    given = {name: getattr(base, name, None) for name in _OF_LOADER}
    is_dealt = isinstance(loader, DataLoaderDispatcher) or is_streaming_dataset(dataset)
    is_global = is_dealt and args.accelerator_config.split_batches
    source, options = stream_arguments(
        SimpleNamespace(dataset=dataset, **given),
        batch="global_batch" if is_global else "batch_size",
    )
    return source, {**options, "drop_last": args.dataloader_drop_last}


def counted(args: Any, loader: Any) -> tuple[Any, Any]:
    """Return arguments and a loader from which the trainer learns the number of its steps.

    The epochs of a `StreamingDataset` end when the stream's do, as those of streams without a
    length. So the trainer gets the number of all steps in place of the length.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not is_streaming_dataset(dataset):
        return args, loader
    if args.max_steps <= 0:
        steps, rest = divmod(int(dataset.epoch_size), loader_batch(loader, args))
        steps += bool(rest) and not args.dataloader_drop_last
        args = copy.copy(args)
        args.max_steps = math.ceil(args.num_train_epochs * steps / args.gradient_accumulation_steps)
    return args, SimpleNamespace(dataset=dataset)


def loader_batch(loader: Any, args: Any) -> int:
    """Return the samples of a batch on all ranks together."""
    size = int(loader.base_dataloader.batch_size)
    return size if args.accelerator_config.split_batches else size * int(args.world_size)


@contextlib.contextmanager
def undivided_by(accelerator: Any) -> Iterator[None]:
    """Let an accelerator prepare loaders over a `StreamingDataset`, which divides itself."""
    accelerator.prepare_data_loader = functools.partial(_prepared, accelerator)
    try:
        yield
    finally:
        del accelerator.prepare_data_loader


def _prepared(accelerator: Any, loader: Any, **_: Any) -> Any:
    return undivided(prepare_data_loader, accelerator, loader)


@contextlib.contextmanager
def without_skips() -> Iterator[None]:
    """Let the trainer read on in a resumed stream, in place of a skip of its first batches."""
    module: Any = trainer_module
    kept, module.skip_first_batches = module.skip_first_batches, lambda loader, _: loader
    try:
        yield
    finally:
        module.skip_first_batches = kept
