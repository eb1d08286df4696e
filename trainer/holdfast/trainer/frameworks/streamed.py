"""A program's `DataLoader` over a stream, as arguments of `Session.stream`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from torch.utils.data import IterableDataset

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.data_generators import DataGenerators, owners_of
from holdfast.trainer.session.streaming import PASSED_ON
from holdfast.trainer.streams.convert import StreamDataset, as_source, is_streaming_dataset
from holdfast.trainer.streams.mosaic import is_read

WAY_OUT: Final = (
    "give the dataset the methods shards() and open(shard, position), wrap a source of "
    "holdfast.trainer.streams as StreamDataset(source), or use a datasets.IterableDataset"
)

EVALUATED: Final = (
    "evaluation over the StreamingDataset that is trained on, whose place it would move; make "
    "another StreamingDataset for it"
)
_ADAPTED: Final = ("datasets", "webdataset")


def check_evaluated(dataset: Any) -> None:
    """Raise `SpecError` for an evaluation over a dataset that a session reads for training."""
    if is_read(dataset):
        raise SpecError(EVALUATED)


def is_stream(loader: Any) -> bool:
    """Return True for a loader over a dataset without an index."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def has_shards(dataset: Any) -> bool:
    """Return True for a dataset without an index that can be a session's stream."""
    if is_streaming_dataset(dataset):
        return True
    data = dataset.source if isinstance(dataset, StreamDataset) else dataset
    try:
        as_source(data)
    except TypeError:
        return False
    except SpecError:
        # `stream_arguments` says why.
        return True
    return True


def stream_arguments(loader: Any, *, batch: str = "batch_size") -> tuple[Any, dict[str, Any]]:
    """Return the source of a loader over a stream, and further arguments of `Session.stream`.

    `batch` is "global_batch" if the loader's batch size is that of all ranks together. Raises
    `SpecError` for a loader whose samples no resume could continue, with a way that works.
    """
    dataset = loader.dataset
    is_ours = isinstance(dataset, StreamDataset)
    data = dataset.source if is_ours else dataset
    try:
        source = dataset if is_streaming_dataset(dataset) else as_source(data)
    except TypeError as error:
        raise SpecError(
            f"the stream {type(data).__name__} names no shards, so no resume could find its "
            f"position in it ({error}); {WAY_OUT}"
        ) from error
    if loader.batch_size is None:
        raise SpecError(
            f"a DataLoader over the stream {type(data).__name__} with batch_size=None, whose "
            "batches the dataset makes itself; give the DataLoader a batch_size and a collate_fn, "
            "and let the dataset give single samples"
        )
    transform = dataset.transform if is_ours else None
    if found := _generator_below(data, transform, loader.collate_fn):
        raise SpecError(
            f"{found} has its own random generator, whose state no checkpoint of a stream "
            "has; leave its seed out, and draw from the global generators, which are seeded for "
            "each sample and batch"
        )
    passed = {name: getattr(loader, name, None) for name in PASSED_ON}
    return source, {
        batch: loader.batch_size,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "drop_last": loader.drop_last,
        **({**dataset.options, "transform": transform} if is_ours else {}),
        **{name: value for name, value in passed.items() if value is not None},
    }


def undivided(prepare: Callable[..., Any], accelerator: Any, loader: Any) -> Any:
    """Return a loader over a `StreamingDataset` as Accelerate prepares it for one process.

    The dataset divides its samples itself. Accelerate would divide each rank's share again, or let
    rank 0 alone iterate, which waits for the others. `prepare` is Accelerate's
    `prepare_data_loader`.
    """
    prepared = prepare(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
    # `gather_for_metrics` cuts off nothing, because the ranks have the same number of samples.
    prepared._drop_last = True
    return prepared


def _generator_below(data: Any, transform: Any, collate: Any) -> str:
    """Return the class of an object that has, or will make, its own generator, or ""."""
    # What these packages draw is replaced by the order and the seeds of the session's loader.
    own = None if type(data).__module__.partition(".")[0] in _ADAPTED else data
    for owner in owners_of(SimpleNamespace(dataset=own, collate_fn=transform)):
        if _has_generator(owner):
            return type(owner).__name__
    for owner in owners_of(SimpleNamespace(collate_fn=collate)):
        # Transformers' collators make a generator with their seed at the first batch.
        has_seed = hasattr(owner, "generator") and getattr(owner, "seed", None) is not None
        if has_seed or _has_generator(owner):
            return type(owner).__name__
    return ""


def _has_generator(owner: Any) -> bool:
    found = DataGenerators()
    found.watch(SimpleNamespace(dataset=owner))
    return bool(found.state_dict())
