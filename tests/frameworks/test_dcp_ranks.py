"""The DCP drop-in on several ranks: both directions, other numbers of ranks, errors, kills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.frameworks.dcp_states import is_same
from tests.support.rank_programs import run_program

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer import dcp

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dcp" / "train.py"
RANKS_S = 240.0
ON_TWO_RANKS = (
    *("fails", "damaged", "own_keys", "shards", "groups", "renewed_group", "trains_on"),
    *("lowest_rank", "links"),
)


def run_ranks(scenarios: str, world_size: int, folder: Path) -> str:
    return run_program("frameworks.dcp_program", scenarios, world_size, folder, timeout_s=RANKS_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of Holdfast and stock DCP by two ranks, after all checks on two ranks passed."""
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(",".join(("saves", *ON_TWO_RANKS)), 2, folder)
    return folder


def test_two_ranks_save_load_and_fail_together(saved: Path) -> None:
    assert (saved / "whole-2.pt").exists()


@pytest.mark.more
@pytest.mark.parametrize("name", ["ours", "stock"])
def test_one_process_loads_what_two_ranks_saved(saved: Path, name: str) -> None:
    expected = torch.load(saved / "whole-2.pt")
    state = {
        f"app.{key}": torch.zeros_like(v) if torch.is_tensor(v) else 0
        for key, v in expected.items()
    }
    dcp.load(state, checkpoint_id=saved / name)
    assert is_same(state, {f"app.{key}": value for key, value in expected.items()})


@pytest.mark.more
def test_two_ranks_load_what_one_saved(saved: Path, tmp_path: Path) -> None:
    expected = torch.load(saved / "whole-2.pt")
    state = {f"app.{key}": value for key, value in expected.items()}
    for name in ("ours", "stock"):
        dcp.save(state, checkpoint_id=tmp_path / name)
    run_ranks("loads", 2, tmp_path)
    assert is_same(torch.load(tmp_path / "ours-at-2.pt"), expected)


@pytest.mark.more
def test_kills_at_many_moments_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    found = run_program("frameworks.dcp_program", "kill_saves", 8, tmp_path, timeout_s=RANKS_S)
    assert "8 kills, each left a whole checkpoint" in found


@pytest.mark.slow
def test_kills_at_very_many_moments_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    found = run_program("frameworks.dcp_program", "kill_saves", 150, tmp_path, timeout_s=900)
    assert "150 kills, each left a whole checkpoint" in found


@pytest.mark.slow
def test_three_ranks_load_what_two_saved(saved: Path) -> None:
    run_ranks("loads", 3, saved)
    expected = torch.load(saved / "whole-2.pt")
    for name in ("ours", "stock"):
        assert is_same(torch.load(saved / f"{name}-at-3.pt"), expected)


def run_example(folder: Path, ranks: int, steps: int) -> str:
    """Run the example under torchrun and return its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(EXAMPLE), str(folder)],
        env={**os.environ, "STEPS": str(steps), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RANKS_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_resumes_at_the_same_and_at_another_size(tmp_path: Path) -> None:
    whole = run_example(tmp_path / "whole", 2, 80)
    begun = run_example(tmp_path / "parts", 2, 50)
    resumed = run_example(tmp_path / "parts", 2, 80)
    assert (begun + resumed).splitlines() == whole.splitlines()
    alone = run_example(tmp_path / "parts", 1, 120)
    assert [line.split()[1] for line in alone.splitlines()] == ["100", "120"]
    manifest = read_manifest(tmp_path / "parts" / "step-000120")
    assert manifest is not None
    assert manifest.world_size == 1
    assert manifest.parent == str(tmp_path / "parts" / "step-000100")
