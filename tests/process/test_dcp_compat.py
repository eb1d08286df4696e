"""Stock DCP and Holdfast read each other's checkpoints, checked function by function."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.dcp.program import names
from tests.dcp.testbed import assert_same, zeros
from tests.support.flusher_supervisor import SlotHolder

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.loading.reader import load_state

ROOT = Path(__file__).parents[2]
RANKS_S = 250.0
GROUPS = ("state_dicts", "stock_reads", "stock_writes", "own_planners")


def run_ranks(groups: str, world_size: int, folder: Path) -> tuple[set[str], str]:
    """(checks that passed on all ranks, the ranks' error output)."""
    flusher_supervisor = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", "tests.dcp.program", groups]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder), flusher_supervisor.name],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=RANKS_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        flusher_supervisor.close()
    notes = [folder / f"passed-{rank}" for rank in range(world_size)]
    passed = [set(note.read_text().split()) if note.exists() else set() for note in notes]
    return set.intersection(*passed), "\n".join(errors)[-6000:]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    return run_ranks(",".join(GROUPS), 2, tmp_path_factory.mktemp("dcp"))


@pytest.mark.more
def test_torch_format_utils_convert_holdfast_checkpoints(tmp_path: Path) -> None:
    """Convert with the commands `dcp_to_torch` and `torch_to_dcp`; Holdfast reads the result."""
    _, said = run_ranks("none", 1, tmp_path)
    (saved,) = RunPaths(tmp_path / "r").list_checkpoints()
    module = [sys.executable, "-W", "ignore", "-m", "torch.distributed.checkpoint.format_utils"]
    whole, back = tmp_path / "whole.pt", tmp_path / "back"
    for command in (["dcp_to_torch", saved, whole], ["torch_to_dcp", whole, back]):
        subprocess.run([*module, *map(str, command)], check=True, timeout=RANKS_S)
    expected = torch.load(whole)
    state = zeros(expected)
    load_state(back, state, group=None)
    assert_same(state, expected)
    assert expected["numbers"]["word"] == "w0", said


@pytest.mark.slow
def test_async_save_in_a_separate_process(tmp_path: Path) -> None:
    passed, said = run_ranks("stock_writes_slowly", 2, tmp_path)
    assert passed == set(names("stock_writes_slowly")), said


@pytest.mark.more
@pytest.mark.parametrize("check", names(*GROUPS))
def test_check_passes_on_two_ranks(outcome: tuple[set[str], str], check: str) -> None:
    passed, said = outcome
    assert check in passed, said
