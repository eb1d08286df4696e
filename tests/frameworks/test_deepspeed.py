"""DeepSpeed programs: preempted, killed, resized, and compared with uninterrupted ones."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.process.local_runs import LocalRun, send

from holdfast.contracts.journal import EventKind
from holdfast.contracts.manifest import read_manifest
from holdfast.contracts.states import AttemptState

PROGRAM: Final = Path(__file__).with_name("deepspeed_program.py")
CASES_S: Final = 240.0
STEPS: Final = 16
INTERVAL: Final = 5

Record = dict[int, dict[str, Any]]


def read_record(folder: Path, rank: int) -> Record:
    """The last line of each step: a step that was repeated counts once."""
    path = folder / f"rank{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    made: list[LocalRun] = []

    def begin(name: str, **settings: Any) -> LocalRun:
        folder = tmp_path / name
        folder.mkdir()
        run = LocalRun(
            folder / "root",
            program=PROGRAM,
            checkpoint={"interval": INTERVAL},
            folder=str(folder),
            **{"steps": STEPS, "sleep_s": 0.0, "stage": 2, **settings},
        )
        made.append(run)
        return run

    yield begin
    for run in made:
        run.end_all()


def test_a_run_is_killed_preempted_and_resized_like_an_uninterrupted_one(
    tmp_path: Path, start: Callable[..., LocalRun]
) -> None:
    run = start("broken", sleep_s=0.15, kill=[1, 7])
    attempt = run.submit()
    # The rank was killed at step 7, and the next launch of the same job resumes after step 5.
    run.wait_for_step(attempt, 9)
    send(run.claim(attempt).pid, signal.SIGTERM)
    preempted = run.wait_for_end()
    assert preempted.state is AttemptState.PREEMPTED, preempted
    stopped_at = run.outcome(attempt).step
    assert stopped_at is not None
    assert 9 <= stopped_at < STEPS
    resumed = [event.data for event in run.events(EventKind.RESUMED)]
    assert [event["step"] for event in resumed] == [0, 5]

    run.submit(gpus=1)
    ended = run.wait_for_end()
    assert ended.state is AttemptState.COMPLETED, ended
    (found,) = [e.data for e in run.events(EventKind.RESUMED) if e.data["world_size"] == 1]
    assert found["step"] == stopped_at
    assert "universal format" in found["notes"][0]
    assert not run.paths.converted.exists()
    newest = run.paths.list_checkpoints()[-1]
    manifest = read_manifest(newest)
    assert manifest is not None
    assert manifest.step == STEPS
    assert {"latest", f"global_step{STEPS}/mp_rank_00_model_states.pt"} <= {
        entry.path for entry in manifest.files
    }

    whole = start("whole")
    whole.submit()
    assert whole.wait_for_end().state is AttemptState.COMPLETED
    compare(tmp_path / "broken", tmp_path / "whole", until=stopped_at)


def compare(broken: Path, whole: Path, *, until: int) -> None:
    """Both runs are equal to the bit until step `until`; then `broken` goes on with one rank."""
    expected = [read_record(whole, rank) for rank in range(2)]
    found = [read_record(broken, rank) for rank in range(2)]
    for rank in range(2):
        for step in range(1, until + 1):
            assert found[rank][step] == expected[rank][step], (rank, step)
    for step in range(until + 1, STEPS + 1):
        alone, both = found[0][step], [record[step] for record in expected]
        assert sorted(alone["ids"]) == sorted(both[0]["ids"] + both[1]["ids"])
        assert (alone["lr"], alone["seen"]) == (both[0]["lr"], both[0]["seen"])
        assert alone["engine_step"] == step
        assert math.isclose(alone["loss"], (both[0]["loss"] + both[1]["loss"]) / 2, rel_tol=0.2)
