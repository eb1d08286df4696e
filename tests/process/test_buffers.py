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


class Cases:
    """What the ranks saw in each case, which is trained at its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trained: set[str] = set()

    def saw(self, case: str, run: str, rank: int) -> Any:
        if case not in self._trained:
            command = [sys.executable, "-m", PROGRAM, self.folder, case]
            done = forked.run(command, timeout=WAIT_S)
            assert done.returncode == 0, done.stdout + done.stderr
            self._trained.add(case)
        return torch.load(self.folder / f"{case}-{run}-{rank}.pt")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("buffers"))


def differing(one: Any, other: Any) -> list[str]:
    return [key for key, value in one.items() if not torch.equal(value, other[key])]


@pytest.mark.more
@pytest.mark.parametrize("case", ["broadcast", "apart", "own"])
def test_resumed_weights_and_momentum_are_bit_identical(cases: Cases, case: str) -> None:
    for rank in range(RANKS):
        whole, parts = cases.saw(case, "whole", rank), cases.saw(case, "parts", rank)
        weights = [key for key in differing(whole["state"], parts["state"]) if "running" not in key]
        assert weights == []
        assert all(map(torch.equal, whole["momentum"], parts["momentum"]))


@pytest.mark.more
def test_broadcast_buffers_are_restored_from_the_broadcasting_rank(cases: Cases) -> None:
    whole, parts = (cases.saw("broadcast", run, 0) for run in ("whole", "parts"))
    assert differing(whole["state"], parts["state"]) == []
    for rank in range(RANKS):
        validation = cases.saw("broadcast", "parts", rank)["validation"]
        assert torch.equal(validation, whole["validation"])


def test_differing_buffers_are_those_of_rank_0_unless_saved_per_rank(
    cases: Cases,
) -> None:
    whole = [cases.saw("apart", "whole", rank)["state"] for rank in range(RANKS)]
    assert differing(whole[0], whole[1])
    assert differing(whole[0], cases.saw("apart", "parts", 0)["state"]) == []
    for rank in range(RANKS):
        own = cases.saw("own", "parts", rank)["state"]
        assert differing(own, cases.saw("own", "whole", rank)["state"]) == []
