"""What the packages of sources test about a resume, run through a `Session`.

The tables have the properties that `datasets` tests for its streams (each step that a stream may
have, at several places, twice in a row, with loader workers), and torchdata for its nodes. A run is
stopped after some samples, and a new session gives the next ones.
All together must be the samples of a run that nothing stopped. What cannot be so is refused before
the first step, see the second half.

These properties of the packages do not apply:

- `datasets`: an epoch that the program sets with `set_epoch`, because the session counts epochs.
  Steps in tables for a caller that asks for a whole table, because a loader asks for samples.
- torchdata: `in_order=False`, in which chance decides the order. `PinMemory` needs an accelerator.
  `ParallelMapper` in processes has the state that it has in threads, and their start takes seconds.
  `Cycler`, `Filter`, `Header` and the round robin came after the newest release, 0.11.
- Streaming is in `test_streaming.py`, in an environment with its package. Loaders of torchdata are
  in `test_streams.py` and `unit/test_node_shards.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, cast

import datasets
import datasets.distributed
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.contracts.errors import SpecError
from holdfast.trainer import Session
from holdfast.trainer.streams import NodeShards

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

ROWS, SHARDS, SIZE = 24, 3, 10
# The samples after which a launch ends. The last one reads the rest.
STOPS: Final = (1, 2, 7)
REST: Final = 10_000
Make = Callable[[], Any]


def texts(samples: list[Any]) -> list[str]:
    """Make a batch of what any format gives."""
    return [str(sample) for sample in samples]


def launch(
    folder: Path, until: int, stream: Make | None = None, loader: Make | None = None, **more: Any
) -> list[Any]:
    """Train up to step `until` on a stream, or on a loader of this rank. Return the batches."""
    made: Any = None if loader is None else loader()
    own: dict[str, Any] = {} if loader is None else {"per_rank": {"loader": made}}
    model, found, epochs = torch.nn.Linear(1, 1), [], more.pop("epochs", 1)
    options: dict[str, Any] = {"directory": folder, "interval": REST, "snapshots": "off"}
    random.seed(1)
    with Session(model, seed=3, **options, **own) as session:
        if stream is not None:
            made = session.stream(stream(), 1, collate_fn=texts, **more)
        for _ in session.epochs(epochs):
            for batch in session.batches(made):
                found.append(str(batch) if stream is None else batch)
                if session.step + 1 == until:
                    return found
    return found


def check(folder: Path, stops: tuple[int, ...] = STOPS, **given: Any) -> list[Any]:
    """Compare a run in several launches with one launch. Return the batches."""
    whole = launch(folder / "whole", REST, **given)
    places = [0, *(stop for stop in stops if stop < len(whole)), len(whole)]
    for begin, end in pairwise(places):
        until = end if end < len(whole) else REST
        assert launch(folder / "run", until, **given) == whole[begin:end], (begin, end)
    return whole


# --- datasets -----------------------------------------------------------------------------------


@cache
def table(count: int, name: str = "n") -> Any:
    return datasets.Dataset.from_dict({name: list(range(count))})


def rows(count: int = ROWS, shards: int = SHARDS, name: str = "n") -> Any:
    return table(count, name).to_iterable_dataset(num_shards=shards)


def generated(files: list[str], count: int = 8) -> Iterator[dict[str, Any]]:
    for name in files:
        yield from ({"n": number, "file": name} for number in range(count))


def written(files: int = SHARDS, **more: Any) -> Any:
    """A stream whose samples a function of the program gives."""
    given = {"files": [f"file-{number}" for number in range(files)], **more}
    return datasets.IterableDataset.from_generator(generated, gen_kwargs=given)


def plus(row: dict[str, Any], *_: Any, by: int = 1) -> dict[str, Any]:
    return {"m": row["n"] + by}


def of_value(value: int) -> dict[str, int]:
    return {"m": value + 1}


def of_place(row: dict[str, Any], place: int) -> dict[str, Any]:
    return {"m": row["n"] + place}


def each(batch: dict[str, list[Any]], *_: Any) -> dict[str, list[Any]]:
    return {"m": [number + 1 for number in batch["n"]]}


def doubled(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: values * 2 for name, values in batch.items()}


def shrunk(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"m": [sum(batch["n"])]}


def kept(row: dict[str, Any], *_: Any) -> bool:
    return bool(row["n"] % 3)


def kept_value(value: int) -> bool:
    return bool(value % 3)


def kept_place(_: dict[str, Any], place: int) -> bool:
    return bool(place % 2)


def all_kept(batch: dict[str, list[Any]]) -> list[bool]:
    return [bool(number % 3) for number in batch["n"]]


def positive(row: dict[str, Any]) -> bool:
    return bool(row["n"])


async def later(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return plus(row)


async def kept_later(row: dict[str, Any]) -> bool:
    await asyncio.sleep(0.001)
    return kept(row)


def of_table(found: Any) -> Any:
    return found.append_column("m", [[number + 1 for number in found["n"].to_pylist()]])


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"m": row["n"] + random.random()}


def interleaved(**more: Any) -> Any:
    return datasets.interleave_datasets([rows(), rows(9).map(plus), written()], **more)


def side_by_side() -> Any:
    return datasets.concatenate_datasets([rows(), rows(name="k")], axis=1)


STREAMS: Final[dict[str, Make]] = {
    # Samples of a function, of tables, in one shard and in several.
    "function": written,
    "function, one file": partial(written, 1),
    "function with arguments": partial(written, count=5),
    "tables": rows,
    "tables, one shard": partial(rows, shards=1),
    "function, shuffled": lambda: written().shuffle(seed=4, buffer_size=5),
    "tables, shuffled": lambda: rows().shuffle(seed=4, buffer_size=5),
    "tables, shuffled twice": lambda: rows().shuffle(seed=4).map(plus).shuffle(seed=2),
    "buffer above the data": lambda: rows().shuffle(seed=4, buffer_size=1000),
    # map
    "map": lambda: written().map(plus),
    "map of tables": lambda: rows().map(plus),
    "map by batches of 1": lambda: written().map(each, batched=True, batch_size=1),
    "map by batches": lambda: written().map(each, batched=True, batch_size=3),
    "map by batches above the data": lambda: written().map(each, batched=True, batch_size=50),
    "map of all": lambda: written().map(each, batched=True, batch_size=None),
    "map of all, too": lambda: written().map(each, batched=True, batch_size=-1),
    "map to more": lambda: written().map(doubled, batched=True, batch_size=3),
    "map to fewer": lambda: written().map(
        shrunk, batched=True, batch_size=3, remove_columns=["n", "file"]
    ),
    "map without the last batch": lambda: written().map(
        each, batched=True, batch_size=3, drop_last_batch=True
    ),
    "map with places": lambda: written().map(of_place, with_indices=True),
    "map with places by batches": lambda: written().map(
        each, with_indices=True, batched=True, batch_size=3
    ),
    "map with arguments": lambda: written().map(plus, fn_kwargs={"by": 7}),
    "map of a column": lambda: written().map(of_value, input_columns=["n"]),
    "map without columns": lambda: written().map(plus, remove_columns=["n"]),
    "map that waits": lambda: written().map(later),
    "map of tables by a table": lambda: rows()
    .with_format("arrow")
    .map(of_table, batched=True, batch_size=3),
    "map that draws": lambda: written().map(noisy),
    "map of map": lambda: rows().map(plus).map(of_value, input_columns=["m"]).map(noisy),
    # filter
    "filter": lambda: written().filter(kept),
    "filter of tables": lambda: rows().filter(kept),
    "filter by batches": lambda: rows().filter(all_kept, batched=True, batch_size=4),
    "filter with places": lambda: written().filter(kept_place, with_indices=True),
    "filter by a column": lambda: written().filter(kept_value, input_columns=["n"]),
    "filter that waits": lambda: written().filter(kept_later),
    "filter and map": lambda: rows().filter(kept).map(plus).filter(kept),
    # skip, take, repeat
    "skip": lambda: rows().skip(4),
    "skip in a table": lambda: rows(shards=1).map(plus).skip(5),
    "skip of a function": lambda: written().skip(2),
    "take": lambda: rows().take(10),
    "take of a function": lambda: written().take(5),
    "take of more than there is": lambda: rows().take(1000),
    "skip and take": lambda: rows().skip(3).take(12).map(plus),
    "repeat": lambda: written().repeat(2),
    "repeat of tables": lambda: rows(9).repeat(3),
    "repeat once": lambda: rows().repeat(1),
    # several datasets
    "concatenated": lambda: datasets.concatenate_datasets([rows(), written().map(plus)]),
    "concatenated and shuffled": lambda: datasets.concatenate_datasets([rows(), rows(9)]).shuffle(
        seed=3, buffer_size=4
    ),
    "side by side": side_by_side,
    "interleaved": interleaved,
    "interleaved until all end": lambda: interleaved(stopping_strategy="all_exhausted"),
    "interleaved without repeats": lambda: interleaved(
        stopping_strategy="all_exhausted_without_replacement"
    ),
    "interleaved at random": lambda: interleaved(probabilities=[0.5, 0.2, 0.3], seed=5),
    "at random until all end": lambda: interleaved(
        probabilities=[0.1, 0.1, 0.8], seed=5, stopping_strategy="all_exhausted"
    ),
    "interleaved and mapped": lambda: interleaved().map(plus).filter(kept),
    # batches and columns
    "batches": lambda: rows().batch(3),
    "batches without the last": lambda: rows().batch(5, drop_last_batch=True),
    "batches of a function": lambda: written().batch(3),
    "columns": lambda: rows().map(plus).rename_column("m", "k").select_columns(["k"]),
    "cast": lambda: rows().cast_column("n", datasets.Value("float32")).remove_columns([]),
    # formats
    "numpy": lambda: rows().with_format("numpy"),
    "torch": lambda: rows().with_format("torch").map(plus),
    "torch, filtered": lambda: rows().with_format("torch").filter(kept),
    "arrow": lambda: rows().with_format("arrow"),
    "pandas": lambda: rows().with_format("pandas"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_of_datasets_continues_after_each_step_that_it_may_have(
    kind: str, tmp_path: Path
) -> None:
    whole = check(tmp_path, stream=STREAMS[kind])
    assert len(whole) >= 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["tables", "map by batches", "interleaved", "filter and map"])
def test_a_stream_of_datasets_continues_twice_with_workers(
    kind: str, workers: int, tmp_path: Path
) -> None:
    check(tmp_path, (2, 4), stream=STREAMS[kind], num_workers=workers)


@pytest.mark.parametrize("consumed", [1, 500, 1500])
def test_a_filter_of_a_long_table_leaves_no_row_out(consumed: int, tmp_path: Path) -> None:
    """Tables of 1,000 rows are read at once, so a place within one counts."""
    whole = check(tmp_path, (consumed,), stream=lambda: rows(2000, 1).filter(positive))
    assert [text for (text,) in whole] == [str({"n": number}) for number in range(1, 2000)]


KEEPING: Final = (
    "map to more",
    "filter by batches",
    "repeat of tables",
    "side by side",
    "concatenated",
)


@pytest.mark.parametrize("kind", KEEPING)
def test_an_epoch_has_the_samples_that_the_dataset_itself_gives(kind: str, tmp_path: Path) -> None:
    """Steps that count or group samples do so in each shard, as in the workers of a loader."""
    whole = launch(tmp_path / "run", REST, stream=STREAMS[kind])
    assert sorted(chain(*whole)) == sorted(map(str, STREAMS[kind]()))


# --- torchdata.nodes ----------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    """Numbers of a dataset that has a state."""

    def __init__(self, first: int = 0, count: int = SIZE) -> None:
        self.first, self.count, self.next, self.is_restored = first, count, 0, False

    def __iter__(self) -> Iterator[int]:
        self.next, self.is_restored = self.next * self.is_restored, False
        return self._rest()

    def _rest(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        step, begin = (1, 0) if info is None else (info.num_workers, info.id)
        while self.next < self.count:
            self.next += 1
            if (self.next - 1) % step == begin:
                yield self.first + self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.is_restored = state["next"], True


class Pairs:
    """An iterable without a state."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((number, number + 1) for number in range(SIZE))


class Updated:
    """Makes the order of the next epoch of a sampler's node."""

    def __call__(self, epoch: int) -> int:
        return epoch + 1


def numbered(name: str) -> Any:
    return nodes.IterableWrapper(Numbers(100 * int(name)))


def weighted(name: str, criterion: str) -> Any:
    parts = {key: numbered(key) for key in ("1", "2", "3")}
    weights = {"1": 0.2, "2": 0.3, "3": 0.5}
    more: Any = {"seed": int(name), "rank": 0, "world_size": 1, "stop_criteria": criterion}
    return nodes.MultiNodeWeightedSampler(parts, weights, **more)


def parallel(name: str, **more: Any) -> Any:
    return nodes.ParallelMapper(numbered(name), str, num_workers=2, **more)


PIPELINES: Final[dict[str, Callable[[str], Any]]] = {
    "an iterable with a state": numbered,
    "an iterable without one": lambda _: nodes.IterableWrapper(Pairs()),
    "a generator's list": lambda name: nodes.IterableWrapper([name, *range(SIZE)]),
    "a table by a sampler": lambda _: nodes.MapStyleWrapper(
        list("abcdefghij"), SequentialSampler(range(SIZE))
    ),
    "a dict by keys": lambda _: nodes.MapStyleWrapper({"a": 1, "b": 2, "c": 3}, ["c", "a", "b"]),
    "a sampler": lambda _: nodes.SamplerWrapper(SequentialSampler(range(SIZE))),
    "a sampler with epochs": lambda _: nodes.SamplerWrapper(
        DistributedSampler(cast(Any, range(SIZE)), num_replicas=1, rank=0, seed=2),
        epoch_updater=Updated(),
    ),
    "a sampler of batches": lambda _: nodes.SamplerWrapper(
        BatchSampler(SequentialSampler(range(SIZE)), 3, drop_last=False)
    ),
    "batches": lambda name: nodes.Batcher(numbered(name), 3, drop_last=False),
    "batches without the last": lambda name: nodes.Batcher(numbered(name), 3, drop_last=True),
    "batches taken apart": lambda name: nodes.Unbatcher(
        nodes.Batcher(numbered(name), 3, drop_last=False)
    ),
    "a function": lambda name: nodes.Mapper(numbered(name), str),
    "a function in threads": partial(parallel, method="thread"),
    "a function for some at once": partial(parallel, method="thread", prebatch=3),
    "a function with rare states": partial(parallel, method="thread", snapshot_frequency=4),
    "read ahead": lambda name: nodes.Prefetcher(numbered(name), prefetch_factor=4),
    "read ahead with rare states": lambda name: nodes.Prefetcher(
        nodes.Batcher(numbered(name), 2, drop_last=False), prefetch_factor=3, snapshot_frequency=3
    ),
    "weights": partial(weighted, criterion="CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED"),
    "weights until all end": partial(weighted, criterion="ALL_DATASETS_EXHAUSTED"),
    "weights until one ends": partial(weighted, criterion="FIRST_DATASET_EXHAUSTED"),
    "weights, read ahead": lambda name: nodes.Prefetcher(
        weighted(name, "ALL_DATASETS_EXHAUSTED"), prefetch_factor=3
    ),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_shard_s_pipeline_continues_in_each_of_its_nodes(kind: str, tmp_path: Path) -> None:
    """Over two epochs, as torchdata tests it: the second one begins a new pipeline."""
    check(tmp_path, (1, 2, 7), stream=lambda: NodeShards(["4", "5"], PIPELINES[kind]), epochs=2)


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_whole_pipeline_continues_in_each_of_its_nodes(kind: str, tmp_path: Path) -> None:
    """The last stops are at an epoch's end, and after the first sample of the next one."""
    given: Any = {"loader": lambda: nodes.Loader(PIPELINES[kind]("4")), "epochs": 2}
    half = len(check(tmp_path / "early", (1, 2, 7), **given)) // 2
    check(tmp_path / "late", (half, half + 1), **given)


# --- what is refused ----------------------------------------------------------------------------


REFUSED: Final[dict[str, tuple[Make, type[Exception], str]]] = {
    "a dataset of one node": (
        lambda: datasets.distributed.split_dataset_by_node(rows(), 0, 2), SpecError,
        "divided by split_dataset_by_node; expected the whole dataset",
    ),
    "a shuffle without a seed": (
        lambda: rows().shuffle(), SpecError, r"has no seed.*as in shuffle\(seed=0\)",
    ),
    "a dataset with an index": (
        lambda: table(ROWS), TypeError, "has an index, so give it to a DataLoader",
    ),
    "a whole pipeline": (
        lambda: nodes.Loader(numbered("1")), TypeError, "pass it to Session as per_rank",
    ),
    "a stateful loader": (
        lambda: StatefulDataLoader(Numbers()), TypeError, "pass it to Session as per_rank",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_source_that_cannot_continue_is_refused_before_the_first_step(
    kind: str, tmp_path: Path
) -> None:
    make, error, problem = REFUSED[kind]
    with pytest.raises(error, match=problem):
        launch(tmp_path / "run", 1, stream=make)


def test_a_stream_of_datasets_with_other_workers_gives_each_sample_once(tmp_path: Path) -> None:
    given = launch(tmp_path / "run", 4, stream=rows, num_workers=2)
    given += launch(tmp_path / "run", REST, stream=rows, num_workers=0)
    assert sorted(chain(*given)) == sorted(map(str, rows()))


def test_a_draw_of_numpy_in_a_stream_continues(tmp_path: Path) -> None:
    check(tmp_path, stream=lambda: written().map(lambda row: {"m": row["n"] + np.random.rand()}))
