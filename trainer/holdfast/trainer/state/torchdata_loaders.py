"""torchdata's loaders as objects of one rank: what of their state a resume can use.

Their states are those of torchdata 0.11. Decision 122 has what they do not continue exactly.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch.utils.data import IterableDataset, Sampler

from holdfast.contracts.errors import CheckpointError

# Keys of the state of a loader, or of one of its workers.
_FETCHER: Final = "fetcher_state"
_DATASET: Final = "dataset_state"
_OF_ITERATOR: Final = "dataset_iter_state"
# Samplers of torch and torchdata that draw an order when their iteration begins. That of torchdata
# 0.11 for several ranks does not save the epoch: https://github.com/meta-pytorch/data/issues/1513
_DRAWING: Final = (
    *("RandomSampler", "StatefulDistributedSampler", "SubsetRandomSampler"),
    "WeightedRandomSampler",
)


def is_stateful_loader(item: object) -> bool:
    """Return True for torchdata's `StatefulDataLoader`."""
    return hasattr(item, "next_iter_state")


class _CopiedState:
    """A dataset's `state_dict` whose result does not change later."""

    def __init__(self, method: Callable[[], Any]) -> None:
        self._method = method

    def __call__(self) -> Any:
        return copy.deepcopy(self._method())


def copy_states_of(loader: Any) -> None:
    """Let the workers of torchdata's loader send copies of its dataset's state.

    A worker reads on while the state is sent, and compares it with the one before. A dataset may
    return its own lists, as those of torchtitan do, so both would have changed by then.
    """
    dataset = getattr(loader, "dataset", None)
    method = getattr(dataset, "state_dict", None)
    if callable(method) and not isinstance(method, _CopiedState) and hasattr(dataset, "__dict__"):
        vars(dataset)["state_dict"] = _CopiedState(method)


def check_kept_workers(loader: Any) -> None:
    """Raise `CheckpointError` if a loader's state has the end of an epoch at the next one's start.

    With persistent workers, torchdata takes a dataset's state before it iterates. If `__iter__` is
    a generator, the dataset begins again only with the first sample. A resume would then leave out
    the samples of each worker that had given none.
    """
    dataset = getattr(loader, "dataset", None)
    if (
        getattr(loader, "persistent_workers", False)
        and isinstance(dataset, IterableDataset)
        and hasattr(dataset, "state_dict")
        and inspect.isgeneratorfunction(type(dataset).__iter__)
    ):
        raise CheckpointError(
            f"this {type(loader).__name__} has persistent_workers, and {type(dataset).__name__} "
            "has its state itself while __iter__ is a generator. At the start of an epoch, the "
            "loader would save the state of the one before, and a resume leave out samples. Leave "
            "persistent_workers out, or let __iter__ return an iterator that has the state"
        )


def check_stream_of_datasets(loader: Any) -> None:
    """Raise `CheckpointError` if a loader with a state reads a stream of `datasets`.

    Such a stream begins at the restored place whenever it is iterated, until `set_epoch` is called
    with another number. Its state does not have what is in a shuffle buffer.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) and any(
        kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__
    ):
        raise CheckpointError(
            f"this {type(loader).__name__} reads a stream of datasets. After a resume, the next "
            "epoch would begin at the place of the resume, and the samples of a shuffle buffer "
            "would be left out. Give the stream to session.stream, or under Lightning to torch's "
            "DataLoader"
        )


def place_of(item: Any, state: Any) -> Any:
    """Return what an object continues from, which is its saved state but for one case.

    With no workers, torchdata 0.11 does not let a dataset that has its state itself run to the end
    of an epoch whose last batch was saved. Many such datasets would then end the next epoch at
    once. So the dataset runs to that end here. It may have begun again there by itself, and then
    has the state of a new one.
    """
    if not is_stateful_loader(item) or not isinstance(state, Mapping):
        return state
    dataset, fetcher = item.dataset, state.get(_FETCHER) or {}
    saved = state.get(_DATASET)
    if saved is None or fetcher.get(_OF_ITERATOR) is not None or not fetcher.get("fetcher_ended"):
        return state
    if not _is_same(saved, dataset.state_dict()):
        dataset.load_state_dict(saved)
        for _ in dataset:
            pass
    return {**state, _DATASET: None}


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        # Tensors and arrays of several numbers have no truth.
        return False


def _has_no_place(state: Any) -> bool:
    """Return True if the state of torchdata's loader has no state of the stream that it reads.

    At a resume, torchdata 0.11 reads the samples again and counts them twice. So a second resume in
    the same epoch would read on too far.
    """
    if not isinstance(state, Mapping):
        return False
    workers = state.get("_snapshot", {}).get("_worker_snapshots", {})
    parts = list(workers.values()) or [state]
    return any(part.get(_FETCHER) for part in parts) and not any(
        part.get(_DATASET) is not None or (part.get(_FETCHER) or {}).get(_OF_ITERATOR) is not None
        for part in parts
    )


def state_of(item: Any) -> Any:
    """Return the state of an object of one rank.

    A `StatefulDataLoader` begins its iteration when it is asked for its state. After a resume, its
    workers would get the order of an epoch before the program calls `set_epoch`. Raises
    `CheckpointError` for one over a stream without a state.
    """
    loaded = getattr(item, "next_iter_state", None)
    if loaded is not None and getattr(item, "_iterator", item) is None:
        return loaded
    state = item.state_dict()
    if is_stateful_loader(item) and _has_no_place(state):
        raise CheckpointError(
            f"this {type(item).__name__} reads {type(item.dataset).__name__}, a stream without a "
            "state, and after a second resume in one epoch torchdata would leave out samples. Give "
            "the stream, or the iterator that its __iter__ returns, state_dict and "
            "load_state_dict, or give session.stream a source that names its shards"
        )
    return state


def check_samplers(name: str, item: Any) -> None:
    """Raise `CheckpointError` if a loader of torchdata's nodes draws an order that it cannot save.

    Such a loader resumes by reading on from the same number of samples of a new order.
    """
    if type(item).__module__.partition(".")[0] != "torchdata":
        return
    for node in pipeline_parts(getattr(item, "root", None)):
        if draws_unsaved_order(node):
            raise CheckpointError(
                f"extra {name!r}: its {type(node).__name__} draws an order that its state does not "
                "determine, so a resume would repeat and lose samples; use torch's "
                "DistributedSampler, with num_replicas=1 for one rank"
            )


def pipeline_parts(root: Any) -> Iterator[Any]:
    """Yield the nodes and samplers of a pipeline of `torchdata.nodes`, from its last node on."""
    waiting, seen = [root], set[int]()
    while waiting:
        node: Any = waiting.pop()
        if id(node) in seen or not (isinstance(node, Sampler) or hasattr(node, "get_state")):
            continue
        seen.add(id(node))
        yield node
        for value in vars(node).values():
            waiting += value.values() if isinstance(value, dict) else [value]


def draws_unsaved_order(node: Any) -> bool:
    """Return True for a sampler that draws an order which its state does not determine."""
    return type(node).__name__ in _DRAWING and not _saves_epoch(node)


def _saves_epoch(sampler: Any) -> bool:
    """Return True if the state of a sampler has its epoch, as in versions after torchdata 0.11."""
    saved = sampler.state_dict() if hasattr(sampler, "state_dict") else ()
    return any("epoch" in str(key) for key in saved)
