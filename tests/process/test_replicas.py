"""Buffers that differ between replicas: they are saved from the first rank only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.process import replicas_program
from tests.process.replicas_program import CASES, RANKS
from tests.support import forked

WAIT_S = 120.0

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("replicas")
    done = forked.run(
        [sys.executable, "-W", "ignore", "-m", replicas_program.__name__, made],
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def buffers(folder: Path, case: str, launch: int, when: str) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{case}-{launch}-{rank}.pt")[when] for rank in range(RANKS)]


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_every_rank_resumes_with_the_buffers_of_the_first_rank(folder: Path, case: str) -> None:
    ended, began = buffers(folder, case, 0, "ended"), buffers(folder, case, 1, "began")
    differing = {
        name.partition(".")[2]
        for each in ended[1:]
        for name, buffer in each.items()
        if not torch.equal(buffer, ended[0][name])
    }
    assert {"running_mean", "running_var"} <= differing
    for rank in range(RANKS):
        others = [n for n in ended[0] if not torch.equal(began[rank][n], ended[0][n])]
        assert others == [], f"rank {rank} has {others} of another rank"
