"""torchdata's loaders as objects of one rank: what of their state a resume can use.

Their states are those of torchdata 0.11. Decision 122 has what they do not continue exactly.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from torch.utils.data import IterableDataset, Sampler
from torch.utils.data._utils import fetch

from holdfast.contracts.errors import CheckpointError

# Keys of the state of a loader, or of one of its workers.
_FETCHER: Final = "fetcher_state"
_DATASET: Final = "dataset_state"
_OF_ITERATOR: Final = "dataset_iter_state"
_ENDED: Final = "fetcher_ended"
_SNAPSHOT: Final = "_snapshot"
_FINISHED: Final = "_iterator_finished"
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


class _Fetcher(fetch._IterableDatasetFetcher):
    """What a worker reads its samples by. Once it has ended, it stays so.

    After a resume, torchdata 0.11 asks a worker that had read all its samples once more. A dataset
    that sets its state back at the end of `__iter__` would give them again. Without a batch size,
    torch does not note the end.
    """

    def __init__(self, had_ended: list[bool], *arguments: Any) -> None:
        """`had_ended` has an item for the first iteration after a resume."""
        self._has_ended = had_ended.pop() if had_ended else False
        super().__init__(*arguments)

    @property
    def ended(self) -> bool:
        return self._has_ended

    @ended.setter
    def ended(self, value: bool) -> None:
        self._has_ended = self._has_ended or value

    def fetch(self, possibly_batched_index: Any) -> Any:
        try:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        except StopIteration:
            self.ended = True
            raise


class _KeptEnds:
    """A `worker_init_fn` after which a worker that had read all its samples gives no more."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._inner = loader, loader.worker_init_fn
        self._ended: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned. Others are forked with the loader."""
        return {"_loader": None, "_inner": self._inner, "_ended": self._ended_workers()}

    def __call__(self, worker: int) -> None:
        ended = self._ended if self._loader is None else self._ended_workers()
        package: Any = fetch
        package._IterableDatasetFetcher = partial(_Fetcher, [worker in ended])
        if self._inner is not None:
            self._inner(worker)

    def _ended_workers(self) -> set[int]:
        states = _worker_states(self._loader.next_iter_state)
        return {
            int(name.rpartition("_")[2])
            for name, state in states.items()
            if (state.get(_FETCHER) or {}).get(_ENDED)
        }


def prepare_workers(loader: Any) -> None:
    """Let the workers of torchdata's loader send states from which they can continue.

    A worker reads on while a state is sent, and compares it with the one before. A dataset may
    return its own lists, as those of torchtitan do, so both would have changed by then.
    """
    dataset = getattr(loader, "dataset", None)
    method = getattr(dataset, "state_dict", None)
    if callable(method) and not isinstance(method, _CopiedState) and hasattr(dataset, "__dict__"):
        vars(dataset)["state_dict"] = _CopiedState(method)
    is_read_by_workers = (
        isinstance(dataset, IterableDataset) and getattr(loader, "num_workers", 0) > 0
    )
    if is_read_by_workers and not isinstance(loader.worker_init_fn, _KeptEnds):
        loader.worker_init_fn = _KeptEnds(loader)


def _worker_states(state: Any) -> Mapping[str, Any]:
    """Return the states of the workers by name, from the state of torchdata's loader."""
    if not isinstance(state, Mapping):
        return {}
    found: Mapping[str, Any] = state.get(_SNAPSHOT, {}).get("_worker_snapshots", {})
    return found


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
        and _begins_late(dataset)
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
    nodes = pipeline_parts(getattr(loader, "root", None))
    for dataset in (getattr(loader, "dataset", None), *(_iterable_of(node) for node in nodes)):
        if isinstance(dataset, IterableDataset) and any(
            kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__
        ):
            raise CheckpointError(
                f"this {type(loader).__name__} reads a stream of datasets. After a resume, the "
                "next epoch would begin at the place of the resume, and the samples of a shuffle "
                "buffer would be left out. Give the stream to session.stream, or under Lightning "
                "to torch's DataLoader"
            )


def place_of(item: Any, state: Any) -> Any:
    """Return what an object continues from, which is its saved state but for one case.

    With no workers, torchdata 0.11 does not let a dataset that has its state itself run to the end
    of an epoch whose last batch was saved. Many such datasets would then end the next epoch at
    once. So the dataset runs to that end here. It may have begun again there by itself, and then
    has the state of a new one. Raises `CheckpointError` for another number of workers.
    """
    if hasattr(item, "restart_on_stop_iteration"):
        # A loader of nodes would begin again within the epoch at whose end the checkpoint was
        # made. torchdata 0.11 would then return the state of that end throughout the next one.
        item.restart_on_stop_iteration = False
    check_workers(item, state)
    if not is_stateful_loader(item) or not isinstance(state, Mapping):
        return state
    dataset, fetcher = item.dataset, state.get(_FETCHER) or {}
    saved, has_ended = state.get(_DATASET), fetcher.get(_ENDED) or state.get(_FINISHED)
    if saved is None or fetcher.get(_OF_ITERATOR) is not None or not has_ended:
        return state
    if not _is_same(saved, dataset.state_dict()):
        dataset.load_state_dict(saved)
        for _ in dataset:
            pass
    return {**state, _DATASET: None}


def check_workers(loader: Any, state: Any) -> None:
    """Raise `CheckpointError` if torchdata's loader had another number of workers in `state`."""
    if not is_stateful_loader(loader) or not isinstance(state, Mapping) or not state:
        return
    before = state.get(_SNAPSHOT, {}).get("_main_snapshot", {}).get("_num_workers", 0)
    if loader.num_workers != before:
        raise CheckpointError(
            f"it had num_workers={before}, and now has num_workers={loader.num_workers}. Each "
            "worker has a separate place, so expected the same number; set it back to "
            f"{before}, or give the stream or the dataset to a loader that continues with any "
            "number: session.stream, or a DataLoader with session.sampler"
        )


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
    parts = list(_worker_states(state).values()) or [state]
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
    """Raise `CheckpointError` if a loader of torchdata's nodes has a state without its place.

    Such a loader would resume by reading on from the same number of samples of a new order, or from
    the end of an epoch in place of the next one's start.
    """
    if type(item).__module__.partition(".")[0] != "torchdata":
        return
    nodes = list(pipeline_parts(getattr(item, "root", None)))
    for node in nodes:
        if draws_unsaved_order(node):
            raise CheckpointError(
                f"extra {name!r}: its {type(node).__name__} draws an order that its state does not "
                "determine, so a resume would repeat and lose samples; use torch's "
                "DistributedSampler, with num_replicas=1 for one rank"
            )
    late = next((node for node in map(_iterable_of, nodes) if _begins_late(node)), None)
    early = next(filter(_saves_start, nodes), None)
    if late is not None and early is not None:
        raise CheckpointError(
            f"extra {name!r}: the __iter__ of {type(late).__name__} is a generator, so its state "
            "at the start of an epoch is still that of the end of the one before. "
            f"{type(early).__name__} saves it, and a resume would lose samples. Let __iter__ set "
            "the state to the start and return an iterator"
        )


def _iterable_of(node: Any) -> Any:
    """Return what a node wraps, or None."""
    return getattr(node, "iterable", None)


def _begins_late(iterable: Any) -> bool:
    """Return True if an iterable with a state begins again with the first sample of an epoch."""
    return hasattr(iterable, "load_state_dict") and inspect.isgeneratorfunction(
        type(iterable).__iter__
    )


def _saves_start(node: Any) -> bool:
    """Return True if the state of a node may have that of another one that has given nothing."""
    if type(node).__name__ == "MultiNodeWeightedSampler":
        return str(node.stop_criteria) != "CYCLE_FOREVER"
    return getattr(node, "snapshot_frequency", 1) != 1


def pipeline_parts(root: Any) -> Iterator[Any]:
    """Yield the nodes and samplers of a pipeline of `torchdata.nodes`, from its last node on."""
    waiting, seen = [root], set[int]()
    while waiting:
        node: Any = waiting.pop()
        if id(node) in seen or not (isinstance(node, Sampler) or hasattr(node, "get_state")):
            continue
        seen.add(id(node))
        yield node
        # A generator of torch has a state and no attributes.
        for value in getattr(node, "__dict__", {}).values():
            waiting += value.values() if isinstance(value, dict) else [value]


def draws_unsaved_order(node: Any) -> bool:
    """Return True for a sampler that draws an order which its state does not determine."""
    return type(node).__name__ in _DRAWING and not _saves_epoch(node)


def _saves_epoch(sampler: Any) -> bool:
    """Return True if the state of a sampler has its epoch, as in versions after torchdata 0.11."""
    saved = sampler.state_dict() if hasattr(sampler, "state_dict") else ()
    return any("epoch" in str(key) for key in saved)
