"""A sample that makes the loss NaN, under the real agent: rollback, then other data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun
from tests.support.agent_ranks import committed

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.records.history import excluded_checkpoints
from holdfast.contracts.states import AttemptState, Cause
from holdfast.trainer.data.order import DataOrder, SkipWindow
from holdfast.workers.decisions.policy import decide

PROGRAM = Path(__file__).with_name("poisoned_program.py")
ORDER = DataOrder(samples=4096, global_batch=8, seed=5)
STEPS, BAD_STEP, INTERVAL = 60, 33, 10
MARGIN, SKIPPED = 4, 6
# The skipped data window; the checkpoint of step 20 is the newest one before the margin.
WINDOW = [BAD_STEP - SKIPPED // 2, SKIPPED]
GOOD_STEP = 20


def poisoned(root: Path, on_nan: str, **settings: Any) -> LocalRun:
    """A run whose rank 1 trains on a poisoned sample in step `BAD_STEP`."""
    ids = [int(ORDER.rank_ids(BAD_STEP, 1, 2)[0])]
    numerics: dict[str, Any] = {"on_nan": on_nan}
    if on_nan in {"rollback", "skip"}:
        numerics["skip_steps"] = SKIPPED
    if on_nan == "rollback":
        numerics["margin_steps"] = MARGIN
    return LocalRun(
        root,
        program=PROGRAM,
        checkpoint={"interval": INTERVAL},
        supervision={"numerics": numerics},
        **{"steps": STEPS, "sleep_s": 0.05, "poison": ids, "window": WINDOW, **settings},
    )


def ids_of(run: LocalRun) -> dict[tuple[int, int], list[int]]:
    """The sample ids of each (rank, step), as trained last."""
    found = {}
    for path in sorted(run.paths.directory.glob("ids-*.jsonl")):
        rank = int(path.stem.rpartition("rank")[2])
        for line in path.read_text().splitlines():
            step = json.loads(line)
            found[rank, step["step"]] = step["ids"]
    return found


def test_rollback_equals_a_run_that_skipped_the_bad_data(tmp_path: Path) -> None:
    """The weights are bit-identical. One of the two ranks saw the NaN first, and both exited."""
    run = poisoned(tmp_path / "a", "rollback")
    attempt = run.submit()
    try:
        view = run.wait_for_end()
    finally:
        run.end_all()
    assert (view.state, view.last_step) == (AttemptState.COMPLETED, STEPS)
    for rank in range(2):
        weights = json.loads((run.paths.directory / f"weights{rank}.json").read_text())
        assert weights["own"] == weights["spared"]
    skipping = replace(ORDER, skips=(SkipWindow(*WINDOW),))
    assert ids_of(run) == {
        (rank, step): skipping.rank_ids(step, rank, 2).tolist()
        for rank in range(2)
        for step in range(1, STEPS + 1)
    }

    lives = run.outcome(attempt).launches
    assert [life.ending for life in lives] == ["crashed", "completed"]
    assert lives[1].first_step == GOOD_STEP + 1
    (told,) = run.events(EventKind.NUMERICS)
    assert told.data["action"] == "rollback"
    assert (told.data["step"], told.data["rank"], told.data["loss"]) == (BAD_STEP, 1, "nan")
    assert len(told.data["window"]) > 0
    (back,) = run.events(EventKind.ROLLED_BACK)
    assert CheckpointName.parse(back.data["to"]) == CheckpointName(GOOD_STEP, 1, 1)
    assert back.data["skip"] == [WINDOW]
    # The abandoned branch stays on disk, marked; the new one repeats its steps.
    excluded = excluded_checkpoints(run.history().events)
    assert excluded == {str(CheckpointName(30, 1, 1))}
    kept = committed(run)
    assert sorted(kept) == [10, 20, 30, 40, 50, 60]
    assert kept[60].launch == 2


@pytest.mark.slow
def test_on_nan_stop_excludes_checkpoints_near_the_bad_step(tmp_path: Path) -> None:
    """A checkpoint right after the bad loss is excluded, and the policy does not relaunch."""
    run = poisoned(tmp_path / "a", "stop")
    run.submit()
    try:
        view = run.wait_for_end()
    finally:
        run.end_all()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.NUMERICS)
    assert "the loss of step 33 is nan" in view.evidence[0]
    history = run.history()
    assert decide(history, None, now=view.ended_at or 0.0).action == "stop"
    believed = set(map(str, (CheckpointName(s, 1, 1) for s in committed(run))))
    steps = [CheckpointName.parse(n) for n in believed - excluded_checkpoints(history.events)]
    assert max(name.step for name in steps if name) == 30


@pytest.mark.slow
def test_second_nan_at_the_same_step_stops_the_run(tmp_path: Path) -> None:
    """Every sample is poisoned from some step on, so skipping data does not help."""
    every = [int(i) for step in range(BAD_STEP, STEPS + 20) for i in ORDER.step_ids(step)]
    run = poisoned(tmp_path / "a", "rollback", poison=every)
    run.submit()
    try:
        view = run.wait_for_end()
    finally:
        run.end_all()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.NUMERICS)
    actions = [event.data["action"] for event in run.events(EventKind.NUMERICS)]
    assert actions == ["rollback", "stop"]
    assert decide(run.history(), None, now=view.ended_at or 0.0).action == "stop"
