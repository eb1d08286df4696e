"""Hugging Face programs: killed, preempted, resized and misused, beside the bare `Trainer`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.process.local_runs import LocalRun, send
from tests.support.rank_programs import ROOT, run_program

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState
from holdfast.workers.runs.feasibility import Feasibility

PROGRAM: Final = Path(__file__).with_name("transformers_program.py")
CASES_S: Final = 600.0
# 37 samples in batches of 8 over two ranks.
STEPS_PER_EPOCH: Final = 5
EPOCHS: Final = 6
# Sums in another order: the relative difference of losses after a resize.
APART_MAX: Final = 1e-3
# Steps whose metrics a kill can lose.
LINES_LOST_MAX: Final = 6

Notes = dict[str, dict[str, Any]]


def interrupt(
    shape: str, folder: Path, *, ranks: int, interval: str, snapshots: str, stride: int
) -> dict[str, Any]:
    """The result of `transformers_cases`: the number of cases and those with differences."""
    arguments = (shape, ranks, interval, snapshots, stride, folder / "cases")
    said = run_program("frameworks.transformers_cases", *arguments, timeout_s=CASES_S)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def read_notes(folder: Path, rank: int) -> Notes:
    """The last note under each key."""
    lines = (folder / f"notes-{rank}.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def samples_of(notes: list[Notes], key: str) -> list[int]:
    """The samples of a step on all ranks, sorted."""
    parts = [part for one in notes if key in one for part in one[key]["parts"]]
    return sorted(sample for ids, _ in parts for sample in ids)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs import the tests' modules."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", search)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(
    params=["", pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow)], ids=["ddp", "fsdp2"]
)
def run(request: pytest.FixtureRequest, tmp_path: Path, environment: None) -> Iterator[LocalRun]:
    """A run of two ranks."""
    made = LocalRun(
        tmp_path / "root",
        program=PROGRAM,
        checkpoint={"interval": 4},
        notes=str(tmp_path / "notes"),
        steps=EPOCHS * STEPS_PER_EPOCH,
        logging_steps=1,
        # The last step of an epoch is then the same at every number of ranks.
        samples=40,
        sleep_s=0.2,
        fsdp=request.param,
    )
    yield made
    made.end_all()


@pytest.mark.more
@pytest.mark.parametrize(
    ("shape", "ranks", "stride"),
    [("epochs", 2, 37), pytest.param("steps", 1, 41, marks=pytest.mark.slow)],
)
def test_interrupted_trainers_end_bit_identical_to_the_bare_trainer(
    shape: str, ranks: int, stride: int, tmp_path: Path
) -> None:
    found = interrupt(shape, tmp_path, ranks=ranks, interval="4", snapshots="off", stride=stride)
    assert found["different"] == []
    assert found["cases"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", ["sharded", "whole_files"])
def test_interrupted_trainers_with_fsdp2_end_bit_identical(shape: str, tmp_path: Path) -> None:
    found = interrupt(shape, tmp_path, ranks=2, interval="4", snapshots="off", stride=11)
    assert found["different"] == []
    assert found["cases"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "interval", "snapshots"), [(1, "3", "off"), (2, "4", "1")])
@pytest.mark.parametrize("shape", ["epochs", "steps", "stops"])
def test_trainers_interrupted_at_many_points_end_bit_identical(
    shape: str, ranks: int, interval: str, snapshots: str, tmp_path: Path
) -> None:
    # A training that stops early has fewer points.
    stride = 5 if shape == "stops" else 7
    found = interrupt(
        shape, tmp_path, ranks=ranks, interval=interval, snapshots=snapshots, stride=stride
    )
    assert found["different"] == []
    assert found["cases"] >= 8


@pytest.mark.more
def test_a_run_is_killed_preempted_and_continued_on_one_rank(run: LocalRun, tmp_path: Path) -> None:
    attempt = run.submit()
    run.wait_for_step(attempt, 6)
    victim = next(rank.pid for beat in run.beats(attempt) for rank in beat.ranks if rank.rank == 1)
    send(victim, signal.SIGKILL)
    run.wait_for_step(attempt, 14)
    send(run.claim(attempt).pid, signal.SIGTERM)
    preempted = run.wait_for_end()
    assert preempted.state is AttemptState.PREEMPTED, preempted
    outcome = run.outcome(attempt)
    assert outcome.committed_step == outcome.last_step
    assert [launch.ending for launch in outcome.launches] == ["crashed", "stopped"]
    assert "cannot share its global batch" in str(Feasibility.of(run.history()).problem(6))

    run.submit(gpus=1)
    ended = run.wait_for_end()
    assert ended.state is AttemptState.COMPLETED, ended
    assert ended.last_step == EPOCHS * STEPS_PER_EPOCH
    (resumed,) = [e.data for e in run.events(EventKind.RESUMED) if e.data["world_size"] == 1]
    assert resumed["step"] == outcome.last_step
    check_notes(tmp_path / "notes", resumed["step"])
    logged = metrics_of(run)
    assert logged[resumed["step"] + 1]["loss"] > 0
    # The killed launch may lack the lines of its last second: a few steps of 0.2 s.
    (restarted, *_) = [e.data["step"] for e in run.events(EventKind.RESUMED) if e.data["step"]]
    missing = set(range(1, ended.last_step + 1)) - logged.keys()
    assert missing <= set(range(restarted - LINES_LOST_MAX + 1, restarted + 1))
    assert "eval_loss" in logged[ended.last_step]


@pytest.mark.slow
def test_training_that_a_callback_ends_is_incomplete_unless_that_is_allowed(
    tmp_path: Path, environment: None
) -> None:
    steps = 40
    for allowed, state in ((False, AttemptState.FAILED), (True, AttemptState.COMPLETED)):
        run = LocalRun(
            tmp_path / str(allowed),
            gpus=1,
            program=PROGRAM,
            supervision={"allow_early_exit": allowed},
            notes=str(tmp_path / f"notes-{allowed}"),
            steps=steps,
            samples=15,
            patience=1,
            learning_rate=0.3,
        )
        run.submit()
        try:
            ended = run.wait_for_end()
        finally:
            run.end_all()
        assert ended.state is state, ended
        assert ended.last_step is not None
        assert 0 < ended.last_step < steps
        assert re.search(rf"\b{ended.last_step}\b.*\b{steps}\b", " ".join(ended.evidence))


def check_notes(folder: Path, resized_at: int) -> None:
    """Each step saw the next samples of the same order, on two ranks and then on one."""
    notes = [read_notes(folder, rank) for rank in range(2)]
    after = [{k: v for k, v in notes[0].items() if k.startswith("step")}]
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for step in range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1):
            seen += samples_of(notes if step <= resized_at else after, f"step {step}")
        assert sorted(seen) == list(range(40)), f"epoch {epoch}"
    # The identical command keeps the global batch: one rank accumulates over two batches of four.
    assert [len(ids) for ids, _ in notes[0][f"step {resized_at + 1}"]["parts"]] == [4, 4]


def metrics_of(run: LocalRun) -> dict[int, dict[str, Any]]:
    """The logged metrics by step."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(run.paths.metrics_of(1, 1).parent.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["step"], {}).update(line)
    return found
