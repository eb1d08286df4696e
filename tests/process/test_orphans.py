"""No child process outlives its launch or the attempt, even if it hides."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.process.local_runs import LocalRun, send, wait_until
from tests.process.orphan_program import survivors

from holdfast.contracts.states import AttemptState

PROGRAM = Path(__file__).with_name("orphan_program.py")
KINDS = ("setsid", "daemon", "worker0", "worker1", "rank")
RANKS = 2


def names_of(launch: int) -> list[str]:
    return sorted(f"{launch}-{rank}-{kind}" for rank in range(RANKS) for kind in KINDS)


def test_orphans_of_ranks_are_killed_before_a_restart_and_at_the_end(
    tmp_path: Path,
) -> None:
    """First a rank is killed while all helpers live; later the ranks exit but their helpers not."""
    folder = tmp_path / "noted"
    folder.mkdir()
    run = LocalRun(tmp_path / "root", gpus=RANKS, program=PROGRAM, forks=False, folder=str(folder))
    run.submit()
    try:
        wait_until(lambda: survivors(folder, 1) == names_of(1), "ranks with all their helpers")
        victim = json.loads((folder / "1-1-rank.json").read_text())["pid"]
        send(victim, signal.SIGKILL)
        view = run.wait_for_end()
    finally:
        run.end_all()
    assert view.state is AttemptState.COMPLETED
    # The helpers of the first launch that a rank of the second one found at its start.
    assert [(folder / f"left-2-{rank}.txt").read_text() for rank in range(RANKS)] == ["", ""]
    noted = {path.stem for path in folder.glob("2-*.json")}
    assert noted == set(names_of(2))
    assert survivors(folder, 1) == []
    assert survivors(folder, 2) == []
