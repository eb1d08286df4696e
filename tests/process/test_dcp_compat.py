"""Stock DCP and Holdfast read each other's checkpoints, name by name, with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.dcp.program import names
from tests.flusher_keeper import Keeper

ROOT = Path(__file__).parents[2]
RANKS_S = 250.0
GROUPS = ("stock_reads", "stock_writes", "own_planners")

pytestmark = pytest.mark.timeout(300)


def run_ranks(groups: str, world_size: int, folder: Path) -> tuple[set[str], str]:
    """(checks that passed on all ranks, what the ranks said)."""
    keeper = Keeper(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", "tests.dcp.program", groups]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder), keeper.name],
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
        keeper.close()
    passed = [set((folder / f"passed-{rank}").read_text().split()) for rank in range(world_size)]
    return set.intersection(*passed), "\n".join(errors)[-6000:]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    return run_ranks(",".join(GROUPS), 2, tmp_path_factory.mktemp("dcp"))


@pytest.mark.parametrize("check", names(*GROUPS))
def test_two_ranks(outcome: tuple[set[str], str], check: str) -> None:
    passed, said = outcome
    assert check in passed, said
