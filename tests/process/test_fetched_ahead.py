"""Programs that prefetch a batch before the loop, as nanoGPT does: exact, or with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.contracts.errors import SpecError
from holdfast.trainer import Session

SAMPLES = 40
DRAWN = "random numbers (torch) were drawn between the resume and the first step"
TWICE = "were asked for before the loop and again within the step"


def open_session(directory: Path) -> Session:
    return Session(nn.Linear(1, 1), directory=directory, interval=3, snapshots="off", seed=1)


def train(directory: Path, stop_after: int, *, by: str) -> list[list[int]]:
    """The samples of each step up to `stop_after`, in a program that prefetches one batch."""
    session = open_session(directory)

    def fetch(ahead: int = 0) -> list[int]:
        if by == "draws":
            return list(map(int, torch.randint(SAMPLES, (12,))))
        return list(map(int, session.batch(SAMPLES, 4, ahead=ahead if by == "ahead" else 0)))

    seen, batch = [], fetch()
    for _ in session.steps(stop_after):
        seen.append(batch)
        batch = fetch(1)
    session.close()
    return seen


def test_batch_prefetched_by_the_session_is_the_same_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", 9, by="ahead")
    resumed = train(tmp_path / "run", 4, by="ahead") + train(tmp_path / "run", 9, by="ahead")
    assert resumed == whole
    said = capsys.readouterr().out
    assert DRAWN not in said
    assert TWICE not in said


@pytest.mark.parametrize(
    ("by", "words"), [("draws", DRAWN), pytest.param("ids", TWICE, marks=pytest.mark.more)]
)
def test_prefetch_that_a_resume_cannot_reproduce_gives_a_warning(
    by: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", 9, by=by)
    first = train(tmp_path / "run", 4, by=by)
    capsys.readouterr()
    second = train(tmp_path / "run", 9, by=by)
    assert first + second != whole
    assert words in capsys.readouterr().out


def test_loader_seeds_give_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for total in (2, 4):
        session = open_session(tmp_path / "run")
        loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.ones(8)))
        for _, _ in zip(session.steps(total), iter(loader), strict=False):
            torch.rand(3)
        session.close()
    assert DRAWN not in capsys.readouterr().out


def test_a_dataset_smaller_than_the_batch_is_refused(tmp_path: Path) -> None:
    session = open_session(tmp_path / "run")
    with pytest.raises(SpecError, match="Choose a global batch of 3 or less"):
        session.batch(3, 4)
    assert sorted(session.batch(4, 4)) == [0, 1, 2, 3]
    session.close()
