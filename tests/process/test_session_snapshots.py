"""Sessions with killed processes: the snapshot in memory is committed; at most a step is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.process.test_session import (
    STEPS,
    Launch,
    committed_steps,
    ends_of,
    events_of,
    kill,
    steps_of,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest


@pytest.mark.more
def test_killed_ranks_lose_one_step_and_resume_bit_identical(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings: dict[str, Any] = {"ranks": 2, "interval": "1000", "snapshots": "1", "dropout": 0.2}
    with Launch(directory, **settings, sleep_s=0.1) as launch:
        launch.wait_until(12)
        kill(launch.rank_pids())
        assert launch.wait() != 0
    done = min(max(line["step"] for line in steps_of(launch.run, rank)) for rank in range(2))
    with Launch(directory, **settings) as launch:
        assert launch.wait() == 0, launch.output
    (kept,) = (step for step in committed_steps(launch.run) if step < STEPS)
    # A recorded step may have been killed at its very end, before its snapshot.
    assert done - 1 <= kept <= done + 1
    manifest = read_manifest(launch.run.list_checkpoints()[0])
    assert manifest is not None
    assert manifest.reason == "crash"
    first, second = events_of(launch.run, EventKind.RESUMED)
    assert (first.data["step"], second.data["step"]) == (0, kept)
    assert second.data["checkpoint"] == manifest.id
    notes = [e.data["text"] for e in events_of(launch.run, EventKind.NOTE)]
    assert any("was only in memory when the ranks died" in text for text in notes)
    with Launch(tmp_path / "whole", **settings) as whole:
        assert whole.wait() == 0, whole.output
    for rank in range(2):
        redone = {line["step"]: line for line in steps_of(launch.run, rank)}
        assert [redone[line["step"]] for line in steps_of(whole.run, rank)] == steps_of(
            whole.run, rank
        )
        assert ends_of(launch.run, rank) == ends_of(whole.run, rank)
    # A normal end leaves one last checkpoint, and no snapshot is committed after it.
    assert committed_steps(whole.run) == [STEPS]


@pytest.mark.slow
def test_auto_snapshots_stay_within_the_budget_and_are_reported(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ranks": 2, "interval": "auto", "snapshots": "auto"}
    with Launch(tmp_path / "run", **settings, sleep_s=0.2) as launch:
        launch.wait_until(30)
        kill(launch.rank_pids())
        assert launch.wait() != 0
    notes = [e.data for e in events_of(launch.run, EventKind.NOTE)]
    chosen = [data["snapshots_every"] for data in notes if "snapshots_every" in data]
    assert chosen, notes
    assert 1 <= chosen[-1] <= 30
    with Launch(tmp_path / "run", **settings) as launch:
        assert launch.wait() == 0, launch.output
    _, second = events_of(launch.run, EventKind.RESUMED)
    assert 30 - 2 * chosen[-1] <= second.data["step"] < STEPS
    assert json.loads((launch.run.list_checkpoints()[-1] / "manifest.json").read_text())
