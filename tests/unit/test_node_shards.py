"""Pipelines of `torchdata.nodes`: exact as shards, and refused as a whole."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tests.unit.test_streams import alone, check_resumes, flat, read
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as samplers

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer import Session
from holdfast.trainer.state import plain
from holdfast.trainer.state.torchdata_loaders import prepare_workers
from holdfast.trainer.streams import NodeShards
from holdfast.trainer.streams.convert import as_source
from holdfast.trainer.streams.loader import StreamLoader

SIZES = {"a": 9, "b": 14, "c": 5, "d": 11}
STATE_BYTES_MAX = 64 * 1024
MORE = pytest.mark.more


class Numbers:
    """An iterable whose state is the very dict that it changes as it is read."""

    def __init__(self, shard: str) -> None:
        self.shard, self.state = shard, {"next": 0}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        while self.state["next"] < SIZES[self.shard]:
            self.state["next"] += 1
            yield self.shard, self.state["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def plainly(shard: str) -> Any:
    return nodes.IterableWrapper(Numbers(shard))


def ahead(shard: str) -> Any:
    listed = nodes.IterableWrapper([(shard, number) for number in range(SIZES[shard])])
    mapped = nodes.ParallelMapper(listed, tuple, num_workers=2, method="thread")
    return nodes.Prefetcher(mapped, prefetch_factor=3, snapshot_frequency=2)


def batched(shard: str) -> Any:
    """Batches in the pipeline, which are taken apart again."""
    listed = nodes.IterableWrapper([(shard, number) for number in range(SIZES[shard])])
    return nodes.Unbatcher(nodes.Batcher(listed, 4, drop_last=False))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("make", [plainly, ahead, batched])
def test_pipelines_of_shards_continue_at_any_step(make: Any) -> None:
    source = NodeShards(list(SIZES), make)
    more = {"shuffle": True, "buffer": 4, "batch": 3, "open_shards": 2}
    whole = list(alone(source, **more))
    assert flat([whole]) == sorted((shard, n) for shard, size in SIZES.items() for n in range(size))
    for steps in range(1, len(whole), 2):
        begun = alone(source, **more)
        given = [batch for _, batch in zip(range(steps), begun, strict=False)]
        row = plain.to_bytes(begun.state_dict(), "row")
        assert len(row) < STATE_BYTES_MAX
        resumed = alone(source, **more)
        assert resumed.resume(begun.facts(), [plain.from_bytes(row)]) == ""
        assert given + list(resumed) == whole


@pytest.mark.timeout(300)
def test_a_resized_run_reads_each_sample_once() -> None:
    source = NodeShards(list(SIZES), plainly)
    begun, saved = read(source, 2, steps=3)
    alone_, again = read(source, 1, saved=saved, steps=2)
    rest, _ = read(source, 3, saved=again)
    everything = sorted((shard, n) for shard, size in SIZES.items() for n in range(size))
    assert flat(begun + alone_ + rest) == everything


@pytest.mark.parametrize(
    "loader",
    [
        StatefulDataLoader(range(4)),
        nodes.Loader(nodes.IterableWrapper(range(4))),
        nodes.IterableWrapper(range(4)),
    ],
)
def test_a_whole_loader_is_refused_with_the_nearest_way(loader: Any) -> None:
    with pytest.raises(TypeError, match=r"one number of ranks and loader workers.*per_rank=\{"):
        as_source(loader)


def pipeline(sampler: Any) -> Any:
    """A loader of batches in the sampler's order, with random numbers of the training's generator.

    With restart_on_stop_iteration, its resume would draw before the first step.
    """
    mapped = nodes.Mapper(nodes.SamplerWrapper(sampler), lambda number: (number, random.random()))
    batches = nodes.Batcher(mapped, 3, drop_last=False)
    return nodes.Loader(batches, restart_on_stop_iteration=False)


@pytest.mark.timeout(120)
def test_a_whole_pipeline_continues_in_per_rank_over_several_epochs(tmp_path: Path) -> None:
    def launch(folder: str, total: int) -> list[Any]:
        random.seed(3)
        data: Any = range(10)
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=4)
        loader, found = pipeline(sampler), []
        own: Any = {"per_rank": {"loader": loader}, "interval": 100}
        with Session(torch.nn.Linear(1, 1), directory=tmp_path / folder, **own) as session:
            batches = chain.from_iterable(repeat(loader))
            for _, batch in zip(session.steps(total), batches, strict=False):
                found.append((batch, random.random()))
        return found

    whole = launch("whole", 11)
    assert [launch("run", total) for total in (2, 4, 7, 11)] == [
        whole[:2], whole[2:4], whole[4:7], whole[7:]
    ]  # fmt: skip


def of_ranks(data: Any) -> Any:
    return samplers.StatefulDistributedSampler(data, num_replicas=1, rank=0)


@pytest.mark.parametrize("kind", [RandomSampler, samplers.RandomSampler, of_ranks])
def test_a_pipeline_whose_order_is_not_in_its_state_is_refused(tmp_path: Path, kind: Any) -> None:
    sampler = BatchSampler(kind(range(10)), 2, drop_last=False)
    root = nodes.Prefetcher(nodes.SamplerWrapper(sampler), 2)
    weighted = nodes.MultiNodeWeightedSampler({"a": root}, {"a": 1.0})
    for node in (root, weighted):
        with pytest.raises(CheckpointError, match=r"Sampler draws an order .*torch's Dist"):
            Session(
                torch.nn.Linear(1, 1),
                directory=tmp_path / "run",
                per_rank={"loader": nodes.Loader(node)},
            )


def test_a_pipeline_with_an_order_in_its_state_is_accepted(tmp_path: Path) -> None:
    own = {"loader": pipeline(SequentialSampler(range(10)))}
    with Session(torch.nn.Linear(1, 1), directory=tmp_path / "run", per_rank=own) as session:
        assert (session.step, session.resumed_from) == (0, None)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_continues_in_the_epoch_that_the_program_sets(
    tmp_path: Path, workers: int
) -> None:
    def launch(total: int) -> list[Any]:
        data: Any = range(10)
        sampler = samplers.StatefulDistributedSampler(data, num_replicas=1, rank=0, seed=3)
        loader: Any = StatefulDataLoader(data, 3, sampler=sampler, num_workers=workers)
        own: Any = {"per_rank": {"loader": loader}, "interval": 100}
        found = []
        with Session(torch.nn.Linear(1, 1), directory=tmp_path / "run", **own) as session:
            for epoch in session.epochs(2):
                sampler.set_epoch(epoch)
                for batch in session.batches(loader):
                    found.append(batch.tolist())
                    if session.step + 1 == total:
                        return found
        return found

    # The epochs have four steps.
    given = launch(6) + launch(0)
    assert sorted(chain.from_iterable(given[4:])) == list(range(10))


PAIR: Any = [1, 2]


def drawn_nodes(_: str) -> Any:
    rows = list(range(13))
    random.shuffle(rows)
    return nodes.IterableWrapper(rows)


def test_a_pipeline_of_a_shard_whose_function_draws_an_order_gives_the_rest_of_it() -> None:
    def loader() -> StreamLoader:
        return alone(NodeShards(["0", "1"], drawn_nodes), batch=2)

    check_resumes(loader, list(loader()), every=4)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: nodes.MultiNodeWeightedSampler(
                {"a": nodes.IterableWrapper([1])}, {"a": 1.0}, rank=0, world_size=2
            ),
            "MultiNodeWeightedSampler with world_size=2, so each rank would read other samples",
        ),
        (
            lambda: nodes.SamplerWrapper(DistributedSampler(PAIR, num_replicas=2, rank=0)),
            "DistributedSampler with num_replicas=2, so each rank would read other samples",
        ),
        (
            lambda: nodes.Mapper(nodes.SamplerWrapper(RandomSampler(PAIR)), str),
            "RandomSampler, whose order its state does not determine",
        ),
    ],
)
def test_a_pipeline_of_a_shard_that_depends_on_the_rank_is_refused(
    make: Callable[[], Any], problem: str
) -> None:
    loader = alone(NodeShards(["0"], lambda _: make()))
    with pytest.raises(SpecError, match=problem):
        next(iter(loader))


def mixed(name: str) -> Any:
    parts = {str(k): nodes.IterableWrapper(range(10 * k, 10 * k + 9)) for k in (1, 2)}
    weights = {"1": 0.3, "2": 0.7}
    return nodes.MultiNodeWeightedSampler(parts, weights, seed=int(name), rank=0, world_size=1)


@pytest.mark.parametrize("buffer", [0, 12])
def test_a_pipeline_of_a_shard_that_mixes_by_weight_continues(buffer: int) -> None:
    def loader() -> StreamLoader:
        source = NodeShards(["0", "1"], mixed)
        return alone(source, batch=3, shuffle=buffer > 0, buffer=buffer)

    whole = list(loader())
    check_resumes(loader, whole, every=2)
    # A node changes the state that it got, and the loader still needs it.
    given: list[Any] = []
    saved: Any = None
    while len(given) < len(whole):
        one = loader()
        if saved is not None:
            assert one.resume(*saved) == ""
        given.append(next(iter(one)))
        saved = one.facts(), [one.state_dict()]
    assert given == whole


class Counting(torch.utils.data.IterableDataset[int]):
    """Numbers of a dataset that has its state itself, as many do."""

    def __init__(self) -> None:
        self.at, self.is_restored = 0, False

    def __iter__(self) -> Iterator[int]:
        self.at, self.is_restored = self.at * self.is_restored, False
        while self.at < 8:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.is_restored = state["at"], True


def test_persistent_workers_that_would_lose_samples_are_refused(tmp_path: Path) -> None:
    def launch(name: str, **more: Any) -> None:
        loader = StatefulDataLoader(Counting(), 2, num_workers=1, **more)
        model = torch.nn.Linear(1, 1)
        Session(model, directory=tmp_path / name, per_rank={"loader": loader}).close()

    with pytest.raises(CheckpointError, match="Leave persistent_workers out"):
        launch("kept", persistent_workers=True)
    launch("new")


class Drawn(torch.utils.data.IterableDataset[int]):
    """Numbers of a dataset without a state, by a generator."""

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Listed(torch.utils.data.IterableDataset[int]):
    """Numbers of a dataset without a state, by an iterator of a list."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(range(8)))


def of_datasets() -> Any:
    rows = datasets.Dataset.from_list([{"n": number} for number in range(8)])
    return rows.to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        (Drawn(), "reads Drawn, a stream without a state"),
        (Listed(), "reads Listed, a stream without a state"),
        (of_datasets(), "reads a stream of datasets.*Give the stream to session.stream"),
    ],
    ids=["a generator", "an iterator", "datasets"],
)
def test_streams_that_torchdata_does_not_continue_are_refused(
    dataset: Any, problem: str, workers: int, tmp_path: Path
) -> None:
    loader = StatefulDataLoader(dataset, 2, num_workers=workers)
    with pytest.raises(CheckpointError, match=problem):
        Session(torch.nn.Linear(1, 1), directory=tmp_path, per_rank={"loader": loader})


class Again(Counting):
    """Its state is that of a new epoch as soon as an epoch ends."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.at, self.is_restored = 0, False


@pytest.mark.parametrize("kind", [Counting, Again])
@pytest.mark.parametrize("size", [2, 3])
def test_a_dataset_with_a_state_continues_after_a_stop_at_the_end_of_an_epoch(
    kind: type[Counting], size: int, tmp_path: Path
) -> None:
    """Three samples do not divide the epoch, so its last batch is known to be the last."""

    def launch(name: str, until: int) -> list[Any]:
        loader, given = StatefulDataLoader(kind(), size), list[Any]()
        options: dict[str, Any] = {"directory": tmp_path / name, "per_rank": {"loader": loader}}
        with Session(torch.nn.Linear(1, 1), snapshots="off", **options) as session:
            for _ in session.epochs(3):
                for batch in session.batches(loader):
                    given.append(batch.tolist())
                    if session.step + 1 == until:
                        return given
        return given

    whole, steps = launch("whole", 100), -(-8 // size)
    for until in (steps - 1, steps, 2 * steps):
        name = f"until {until}"
        assert launch(name, until) + launch(name, 100) == whole


class Uneven(Counting):
    """The first worker has fewer samples. At its end, each sets its state back to the start."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        last = 8 if info is None or info.id else 3
        while self.at < last:
            self.at += 1
            yield self.at
        self.at = 0


def of_uneven(**more: Any) -> Any:
    return StatefulDataLoader(Uneven(), num_workers=2, **more)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(of_uneven, batch_size=2), id="batches"),
        pytest.param(partial(of_uneven, batch_size=None), id="samples", marks=MORE),
        pytest.param(
            partial(of_uneven, batch_size=2, snapshot_every_n_steps=3), id="rare states", marks=MORE
        ),
    ],
)
def test_a_worker_that_has_ended_gives_nothing_after_a_resume(make: Any, tmp_path: Path) -> None:
    whole = launches(make, tmp_path / "whole", [100])
    steps = len(whole) // 2
    assert launches(make, tmp_path / "run", [steps - 1, steps, 100]) == whole


def test_a_spawned_worker_gets_the_ends_of_the_saved_state() -> None:
    loader = of_uneven(batch_size=2)
    prepare_workers(loader)
    ended = {"fetcher_state": {"fetcher_ended": True}}
    loader.next_iter_state = {
        "_snapshot": {"_worker_snapshots": {"worker_0": {}, "worker_1": ended}}
    }
    assert vars(pickle.loads(pickle.dumps(loader.worker_init_fn)))["_ended"] == {1}


def launches(make: Any, folder: Path, stops: list[int]) -> list[Any]:
    """Train for two epochs, in a launch up to each of the stops. Return the batches."""
    given = list[Any]()
    for until in stops:
        loader = make()
        options: dict[str, Any] = {"directory": folder, "per_rank": {"loader": loader}}
        with Session(torch.nn.Linear(1, 1), snapshots="off", interval=100, **options) as session:
            given += batches_until(session, loader, until)
    return given


def batches_until(session: Session, loader: Any, until: int) -> Iterator[Any]:
    for _ in session.epochs(2):
        for batch in session.batches(loader):
            yield batch.tolist() if hasattr(batch, "tolist") else batch
            if session.step + 1 == until:
                return


class Prompt(Counting):
    """Begins again when it is iterated over, and not with the first sample."""

    def __iter__(self) -> Iterator[int]:
        self.at, self.is_restored = self.at * self.is_restored, False
        return self._rest()

    def _rest(self) -> Iterator[int]:
        while self.at < 8:
            self.at += 1
            yield self.at


def of_nodes(rare: int) -> Any:
    counted = nodes.IterableWrapper(Prompt())
    return nodes.Loader(nodes.Prefetcher(counted, 2, snapshot_frequency=rare))


@pytest.mark.parametrize("rare", [pytest.param(1, marks=MORE), 3])
def test_a_pipeline_continues_in_the_epoch_after_a_stop_between_epochs(
    rare: int, tmp_path: Path
) -> None:
    whole = launches(partial(of_nodes, rare), tmp_path / "whole", [100])
    assert whole == [*range(1, 9)] * 2
    assert launches(partial(of_nodes, rare), tmp_path / "run", [8, 9, 12, 100]) == whole


def weighted(wrapped: Any, criterion: str) -> Any:
    more: Any = {"rank": 0, "world_size": 1, "stop_criteria": criterion}
    return nodes.MultiNodeWeightedSampler({"a": wrapped}, {"a": 1.0}, **more)


@pytest.mark.parametrize(
    ("data", "make", "problem"),
    [
        (Counting(), lambda one: nodes.Prefetcher(one, 2, snapshot_frequency=3), "Prefetcher"),
        (Counting(), lambda one: weighted(one, "ALL_DATASETS_EXHAUSTED"), "WeightedSampler"),
        (of_datasets(), lambda one: nodes.Prefetcher(one, 2), "reads a stream of datasets"),
    ],
)  # fmt: skip
def test_a_pipeline_whose_state_has_no_start_of_an_epoch_is_refused(
    data: Any, make: Any, problem: str, tmp_path: Path
) -> None:
    loader = nodes.Loader(make(nodes.IterableWrapper(data)))
    with pytest.raises(CheckpointError, match=problem):
        Session(torch.nn.Linear(1, 1), directory=tmp_path, per_rank={"loader": loader})


@pytest.mark.parametrize(
    ("data", "make"),
    [
        (Counting, lambda one: nodes.Prefetcher(one, 2)),
        (Counting, lambda one: weighted(one, "CYCLE_FOREVER")),
        (Prompt, lambda one: nodes.Prefetcher(one, 2, snapshot_frequency=3)),
    ],
)
def test_other_pipelines_of_data_with_a_state_continue(
    data: Any, make: Any, tmp_path: Path
) -> None:
    def loader() -> Any:
        return nodes.Loader(make(nodes.IterableWrapper(data())))

    whole = launches(loader, tmp_path / "whole", [5])
    assert whole == [1, 2, 3, 4, 5]
    assert launches(loader, tmp_path / "run", [2, 5]) == whole


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(0, 2, marks=MORE), pytest.param(2, 1, marks=MORE), (1, 0)],
)
def test_another_number_of_workers_is_refused_with_the_nearest_way(
    before: int, after: int, tmp_path: Path
) -> None:
    def loader(workers: int) -> Any:
        return StatefulDataLoader(Counting(), 2, num_workers=workers)

    launches(partial(loader, before), tmp_path, [2])
    with pytest.raises(
        CheckpointError,
        match=rf"had num_workers={before}, and now has num_workers={after}.*set it back to",
    ):
        launches(partial(loader, after), tmp_path, [100])
