"""Programs' loaders over streams, as arguments of a session's stream: what is taken and refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.streamed import has_shards, is_stream, stream_arguments
from holdfast.trainer.streams import Counted, StreamDataset

SOURCE = Counted(["a", "b"], lambda name: [name] * 3)


class Bare(IterableDataset[int]):
    """A stream that names no shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class StreamingDataset(IterableDataset[int]):
    """A dataset with the name of the one of MosaicML Streaming."""

    __module__ = "streaming.base.dataset"

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Drawing(IterableDataset[Any]):
    """A stream with its own generator."""

    def __init__(self) -> None:
        self._own = random.Random(3)

    def __iter__(self) -> Iterator[float]:
        return iter([self._own.random()])

    def shards(self) -> list[str]:
        return ["a"]

    def open(self, shard: str, position: Any) -> Iterator[tuple[float, int]]:
        return iter([(self._own.random(), 1)])


class Masking:
    """A collator that makes a generator with its seed, at its first batch."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.generator = seed, None

    def __call__(self, samples: list[Any]) -> list[Any]:
        return samples


def test_a_loader_over_a_stream_becomes_the_arguments_of_a_stream() -> None:
    data = StreamDataset(SOURCE, transform=str.upper, shuffle=True, buffer=7, open_shards=2, seed=4)
    loader: Any = DataLoader(data, batch_size=3, num_workers=2, drop_last=True, collate_fn=list)
    source, options = stream_arguments(loader)
    assert source is SOURCE
    assert options == {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": list,
        "drop_last": True,
        "transform": str.upper,
        "shuffle": True,
        "buffer": 7,
        "open_shards": 2,
        "seed": 4,
        "pin_memory": False,
        "prefetch_factor": 2,
        "timeout": 0,
    }
    assert stream_arguments(loader, batch="global_batch")[1]["global_batch"] == 3


def test_only_streams_with_shards_are_taken() -> None:
    assert is_stream(DataLoader(Bare()))
    assert not is_stream(DataLoader(range(3)))  # type: ignore[arg-type]
    assert not has_shards(Bare())
    assert has_shards(StreamDataset(SOURCE))
    assert has_shards(Drawing())
    with pytest.raises(SpecError, match=r"the stream Bare names no shards.*StreamDataset"):
        stream_arguments(DataLoader(Bare()))


def test_a_streaming_dataset_is_taken_itself_and_not_as_a_source() -> None:
    data = StreamingDataset()
    assert has_shards(data)
    assert stream_arguments(DataLoader(data, batch_size=3))[0] is data
    with pytest.raises(SpecError, match=r"as the dataset of a framework's loader, without Stream"):
        stream_arguments(DataLoader(StreamDataset(data)))


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (DataLoader(StreamDataset(SOURCE), batch_size=None), "batch_size=None"),
        (DataLoader(Drawing()), "Drawing has its own random generator"),
        (DataLoader(StreamDataset(SOURCE), collate_fn=Masking(3)), "Masking has its own random"),
    ],
    ids=["batch", "dataset", "collator"],
)
def test_what_no_resume_could_continue_is_refused(loader: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        stream_arguments(loader)


def test_generators_are_found_in_collators_that_others_wrap() -> None:
    wrapped = SimpleNamespace(data_collator=SimpleNamespace(own=torch.Generator()))
    loader = DataLoader(StreamDataset(SOURCE))
    loader.collate_fn = wrapped  # type: ignore[assignment]
    with pytest.raises(SpecError, match="its own random generator"):
        stream_arguments(loader)
    loader.collate_fn = Masking(None)
    stream_arguments(loader)
