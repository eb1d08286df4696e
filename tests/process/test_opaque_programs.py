"""Programs without a Session: the agent signals them, and records the checkpoints they write."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, processes_of, send, wait_until

from holdfast.contracts.account.timeline import goodput_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.parameters import load_spec
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries.pages import list_checkpoints
from holdfast.workers.checkpoints import retention, verification
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator

PROGRAM = Path(__file__).with_name("opaque_program.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "opaque"
STEPS = 1000
Make = Callable[..., LocalRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Creates runs of the program, without torchrun, and ends their processes afterwards."""
    made: list[LocalRun] = []

    def make_run(*, own: dict[str, Any] | None = None, **settings: Any) -> LocalRun:
        table = {
            "checkpoints": f"{tmp_path}/out/checkpoint-{{step}}",
            "complete": ["state.json"],
            "settle_s": 0.5,
            "progress": r"\| step (?P<step>\d+) \|",
            "launcher": "none",
            **(own or {}),
        }
        given = {
            "gpus": 1,
            "steps": STEPS,
            "every": 20,
            "sleep_s": 0.05,
            "out": str(tmp_path / "out"),
            "hurry": str(tmp_path / "hurry"),
            **settings,
        }
        config = {"steps": given["steps"]}
        made.append(LocalRun(tmp_path / "root", program=PROGRAM, own=table, config=config, **given))
        return made[-1]

    yield make_run
    for run in made:
        run.end_all()


def test_a_program_is_preempted_killed_and_finished(make: Make, tmp_path: Path) -> None:
    run = make()
    attempt = run.submit()
    wait_until(lambda: len(committed_checkpoints(run.paths)) >= 1, "a recorded checkpoint")
    send(run.claim(attempt).pid, signal.SIGTERM)
    first = run.wait_for_end()
    assert (first.state, first.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert "rank 0 was told to end" in _output(attempt)
    last = committed_checkpoints(run.paths)[-1]
    assert (last.step, last.reason, last.attempt) == (first.last_step, "final", 1)
    assert last.source == str(tmp_path / "out" / f"checkpoint-{last.step}")
    assert {entry.path for entry in last.files} == {"state.json", "weights/part-0.bin"}
    assert run.outcome(attempt).committed_step == last.step
    assert decide(run.history(), None, now=time.time()).action == "relaunch"

    attempt = run.submit()
    run.wait_for_step(attempt, last.step + 5)
    wait_until(lambda: committed_checkpoints(run.paths)[-1].attempt == 2, "another checkpoint")
    (beat,) = run.beats(attempt)
    send(beat.ranks[0].pid, signal.SIGKILL)
    wait_until(lambda: "starts after" in _output(attempt, 2), "another launch")
    (tmp_path / "hurry").touch()
    second = run.wait_for_end()
    assert (second.state, second.cause, second.evidence) == (AttemptState.COMPLETED, None, ())
    assert (second.first_step, second.last_step) == (last.step + 1, STEPS)
    assert [one.ending for one in run.outcome(attempt).launches] == ["crashed", "completed"]
    _check_lineage(run, last.id)
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


def _check_lineage(run: LocalRun, resumed: str) -> None:
    """Each checkpoint has its parent, verifies, and counts as safe for the account of time."""
    manifests = committed_checkpoints(run.paths)
    assert manifests[-1].step == STEPS
    assert len({one.command_digest for one in manifests}) == 1
    second = [one for one in manifests if (one.attempt, one.launch) == (2, 1)]
    third = [one for one in manifests if (one.attempt, one.launch) == (2, 2)]
    assert second[0].parent == resumed
    assert third[0].parent == second[-1].id
    assert [one.parent for one in third[1:]] == [one.id for one in third[:-1]]
    for one in manifests[-3:]:
        facts = verification.verify(run.paths.checkpoint(one.name))
        assert (facts["ok"], facts["damaged"]) == (True, [])
    assert {row["state"] for row in _indexed(run).values()} == {"committed"}
    goodput = goodput_of(run.history(), until=time.time())
    assert goodput.training_s > 0
    assert goodput.steps_lost < STEPS


@pytest.mark.more
def test_a_program_that_ignores_the_signal_is_killed_at_the_deadline(make: Make) -> None:
    run = make(heeds_signals=False, grace_s=5.0)
    attempt = run.submit()
    wait_until(lambda: committed_checkpoints(run.paths), "a recorded checkpoint")
    began = time.monotonic()
    send(run.claim(attempt).pid, signal.SIGTERM)
    view = run.wait_for_end()
    assert time.monotonic() - began < 30
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert any("killed" in line for line in view.evidence)
    newest = committed_checkpoints(run.paths)[-1]
    assert 0 < newest.step <= (view.last_step or 0)
    assert newest.step % 20 == 0
    assert verification.verify(run.paths.checkpoint(newest.name))["ok"]
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_a_checkpoint_that_the_program_deletes_is_recorded_as_deleted(
    make: Make, tmp_path: Path
) -> None:
    run = make(keep=2, steps=200)
    attempt = run.submit()
    wait_until(lambda: run.events(EventKind.CHECKPOINT_DELETED), "a deletion")
    (tmp_path / "hurry").touch()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED
    there = sorted(path.name for path in (tmp_path / "out").iterdir())
    kept = committed_checkpoints(run.paths)
    assert sorted(Path(one.source or "").name for one in kept) == there
    deleted = run.events(EventKind.CHECKPOINT_DELETED)
    assert {(e.data["reason"], e.data["by"]) for e in deleted} == {
        ("the program deleted its files", "the program")
    }
    for event in deleted:
        assert run.paths.tombstone(event.data["checkpoint"]).is_file()
    rows = _indexed(run)
    assert {rows[e.data["checkpoint"]]["state"] for e in deleted} == {"deleted"}
    assert all(verdict.is_kept for verdict in retention.plan_run(run.paths))
    assert "all steps are done" in _output(attempt)


@pytest.mark.more
def test_a_program_that_completes_no_checkpoint_is_told_why(make: Make, tmp_path: Path) -> None:
    run = make(completes=False, steps=60, sleep_s=0.01)
    run.submit()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED
    (line,) = view.evidence
    assert "completed no checkpoint in this launch" in line
    assert "checkpoint-60: state.json is missing" in line
    assert committed_checkpoints(run.paths) == []
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert any(event.data["text"] == line for event in run.events(EventKind.NOTE))


@pytest.mark.more
def test_a_program_that_ends_before_its_last_step_is_incomplete(make: Make) -> None:
    run = make(steps=40, sleep_s=0.01)
    run.spec = run.spec.model_copy(update={"config": {"steps": 50}})
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
    assert view.evidence[0].startswith(
        "incomplete: the program ended with exit status 0 after step 40, although the spec's "
        "[config] sets 50 steps"
    )


@pytest.mark.more
def test_torchrun_survives_the_signal_that_its_ranks_get(make: Make) -> None:
    run = make(gpus=2, own={"launcher": "torchrun", "complete": []})
    attempt = run.submit()
    wait_until(lambda: committed_checkpoints(run.paths), "a recorded checkpoint")
    operator.request(run.paths, "pause", by="tester")
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    for rank in (0, 1):
        assert f"rank {rank} was told to end" in _output(attempt, rank=rank)
    (launch,) = run.outcome(attempt).launches
    assert (launch.ending, launch.exit_code) == ("stopped", 0)
    assert committed_checkpoints(run.paths)[-1].step == view.last_step
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_processes_below_a_shell_get_the_signal_too(make: Make) -> None:
    run = make(own={"signal_to": "all"})
    program = shlex.join(run.spec.command)
    script = ("bash", "-c", f"trap : TERM; {program}; echo the shell ends")
    run.spec = run.spec.model_copy(update={"command": script})
    attempt = run.submit()
    wait_until(lambda: committed_checkpoints(run.paths), "a recorded checkpoint")
    send(run.claim(attempt).pid, signal.SIGTERM)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert _output(attempt).endswith("rank 0 was told to end\nthe shell ends\n")
    assert committed_checkpoints(run.paths)[-1].step == view.last_step


@pytest.mark.more
def test_the_example_runs_as_its_spec_says(tmp_path: Path) -> None:
    example = tmp_path / "opaque"
    shutil.copytree(EXAMPLE, example)
    changes = [f'command=["{sys.executable}", "train.py", "--step-s", "0.01"]']
    run = LocalRun(tmp_path / "root", spec=load_spec(example / "run.toml", changes))
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.evidence) == (AttemptState.COMPLETED, ())
    steps = [one.step for one in committed_checkpoints(run.paths)]
    assert steps == list(range(50, 401, 50))


def _indexed(run: LocalRun) -> dict[str, Any]:
    """The run's checkpoints in a new index, by directory name."""
    with open_database(f"sqlite:///{run.paths.directory.parent / 'index.db'}") as database:
        ingest_run(database, run.paths)
        rows = list_checkpoints(database, run.paths.name, limit=None).items
    return {row["id"].partition(":")[2]: row for row in rows}


def _output(attempt: AttemptPaths, launch: int = 1, rank: int = 0) -> str:
    log = attempt.rank_log(0, launch, rank)
    return log.read_text() if log.exists() else ""
