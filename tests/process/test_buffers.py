"""Buffers that differ between the ranks of DDP: which values a resume restores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process import buffers_program
from tests.process.buffers_program import RANKS
from tests.support import forked

PROGRAM = buffers_program.__name__
WAIT_S = 150.0

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("buffers")
    done = forked.run([sys.executable, "-m", PROGRAM, made], timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def saw(folder: Path, case: str, run: str, rank: int) -> Any:
    return torch.load(folder / f"{case}-{run}-{rank}.pt")


def differing(one: Any, other: Any) -> list[str]:
    return [key for key, value in one.items() if not torch.equal(value, other[key])]


@pytest.mark.more
@pytest.mark.parametrize("case", ["broadcast", "apart", "own"])
def test_resumed_weights_and_momentum_are_bit_identical(folder: Path, case: str) -> None:
    for rank in range(RANKS):
        whole, parts = saw(folder, case, "whole", rank), saw(folder, case, "parts", rank)
        weights = [key for key in differing(whole["state"], parts["state"]) if "running" not in key]
        assert weights == []
        assert all(map(torch.equal, whole["momentum"], parts["momentum"]))


@pytest.mark.more
def test_broadcast_buffers_are_restored_from_the_broadcasting_rank(folder: Path) -> None:
    whole, parts = (saw(folder, "broadcast", run, 0) for run in ("whole", "parts"))
    assert differing(whole["state"], parts["state"]) == []
    for rank in range(RANKS):
        validation = saw(folder, "broadcast", "parts", rank)["validation"]
        assert torch.equal(validation, whole["validation"])


def test_differing_buffers_are_those_of_rank_0_unless_saved_per_rank(
    folder: Path,
) -> None:
    whole = [saw(folder, "apart", "whole", rank)["state"] for rank in range(RANKS)]
    assert differing(whole[0], whole[1])
    assert differing(whole[0], saw(folder, "apart", "parts", 0)["state"]) == []
    for rank in range(RANKS):
        own = saw(folder, "own", "parts", rank)["state"]
        assert differing(own, saw(folder, "own", "whole", rank)["state"]) == []
