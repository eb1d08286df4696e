"""Iterators of Grain: exact by their own state at one number of ranks, or refused with the way.

The classes have the names and the methods of those of the package, which is not installed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer import Session
from holdfast.trainer.streams.convert import as_source

COUNT = 9


class IterDataset:
    """Grain's dataset, which makes iterators."""

    __module__ = "grain._src.python.dataset.dataset"

    def __init__(self, *, is_json: bool = False) -> None:
        self.is_json = is_json

    def __iter__(self) -> Iterator[int]:
        return DatasetIterator(is_json=self.is_json)


class DatasetIterator:
    """An iterator whose state is the dict that it changes, or JSON as that of a DataLoader."""

    __module__ = "grain._src.python.dataset.dataset"

    def __init__(self, *, is_json: bool) -> None:
        self.state, self.is_json = {"next_index": 0}, is_json

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.state["next_index"] == COUNT:
            raise StopIteration
        self.state["next_index"] += 1
        return self.state["next_index"] - 1

    def get_state(self) -> Any:
        return json.dumps(self.state).encode() if self.is_json else self.state

    def set_state(self, state: Any) -> None:
        self.state = json.loads(state) if self.is_json else state


def launch(folder: Path, until: int, *, is_json: bool) -> list[int]:
    batches = iter(IterDataset(is_json=is_json))
    model, own = torch.nn.Linear(1, 1), {"batches": batches}
    with Session(model, directory=folder, interval=100, per_rank=own) as session:
        found = []
        for batch in session.batches(batches):
            found.append(batch)
            if session.step + 1 == until:
                break
        return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_json", [False, True])
def test_an_iterator_continues_by_its_own_state(tmp_path: Path, *, is_json: bool) -> None:
    given = [launch(tmp_path, until, is_json=is_json) for until in (2, 3, 7, 100)]
    assert given == [[0, 1], [2], [3, 4, 5, 6], [7, 8]]


@pytest.mark.timeout(120)
def test_a_loader_of_grain_is_refused_with_its_iterator_as_the_way(tmp_path: Path) -> None:
    model, data = torch.nn.Linear(1, 1), IterDataset()
    with pytest.raises(CheckpointError, match=r"only its iterator has one; .*batches = iter"):
        Session(model, directory=tmp_path / "loader", per_rank={"data": data})
    with pytest.raises(TypeError, match=r"of grain: its state belongs to one number of ranks"):
        as_source(data)
    with Session(model, directory=tmp_path / "run", interval=100) as session:
        for one in (data, iter(data)):
            with pytest.raises(SpecError, match=r"no checkpoint has the place of .* of grain"):
                next(iter(session.batches(one)))
