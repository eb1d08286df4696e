"""FSDP1 without a device mesh: its ShardedTensors are saved, resumed and resharded exactly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process import flat_program
from tests.process.flat_program import CASES, LAUNCHES, PARTS, WHOLE
from tests.support import forked
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.format.metadata import open_checkpoint

WAIT_S = 150.0

pytestmark = pytest.mark.timeout(200)
MARKS: dict[str, Any] = {"flat": pytest.mark.more}


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=MARKS.get(case, ())) for case in CASES]
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("flat")
    done = forked.run(
        [sys.executable, "-W", "ignore", "-m", flat_program.__name__, made, case],
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def saw(folder: Path, case: str, run: str, launch: int) -> dict[str, Any]:
    """Rank 0's state at the start and the end of one launch."""
    seen: dict[str, Any] = torch.load(folder / f"{case}-{run}-{launch}-0.pt")
    return seen


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        is_same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
        assert is_same, (key, value, other[key])


@pytest.mark.more
def test_resumed_state_is_bit_identical(folder: Path, case: str) -> None:
    whole, stopped, resumed = (
        saw(folder, case, run, launch) for run, launch in ((WHOLE, 0), (PARTS, 0), (PARTS, 1))
    )
    assert [seen["step"] for seen in (whole, stopped, resumed)] == [4, 2, 4]
    assert_same(resumed["began"], stopped["ended"])
    assert_same(resumed["ended"], whole["ended"])
    assert any(key.endswith(".exp_avg") for key in whole["ended"])


@pytest.mark.parametrize("launch", [2, 3])
def test_resume_on_another_number_of_ranks_has_the_same_state(
    folder: Path, case: str, launch: int
) -> None:
    assert LAUNCHES[PARTS][launch][0] != LAUNCHES[PARTS][1][0]
    began = saw(folder, case, PARTS, launch)["began"]
    assert_same(began, saw(folder, case, PARTS, 1)["ended"])


def test_stock_dcp_loads_the_checkpoint(folder: Path, case: str) -> None:
    expected = saw(folder, case, PARTS, 1)["ended"]
    newest = RunPaths(folder / f"{case}-{PARTS}").list_checkpoints()[-1]
    saved = open_checkpoint(newest).metadata.state_dict_metadata
    assert expected.keys() == {k for k in saved if not k.startswith("rng.")}
    state = {
        key: torch.full_like(value, -1) if torch.is_tensor(value) else None
        for key, value in expected.items()
    }
    load(state, storage_reader=FileSystemReader(newest), no_dist=True)
    assert_same(state, expected)
