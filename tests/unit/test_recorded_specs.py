"""Runs that an older or newer Holdfast recorded: they are read, and continue where it is safe."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import CliResult
from tests.support.histories import record_of, spec_of
from tests.unit.test_workers_runs import Scheduler, resume, submit
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import RunConflictError, SpecError, SubmissionRefusedError
from holdfast.contracts.records.documents import Request, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, RunState
from holdfast.flows.supervisor import carry
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers import schedulers
from holdfast.workers.checkpoints.deletion import location_of
from holdfast.workers.runs import operator, run_folders
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers.slurm import SlurmExecutor

pytestmark = pytest.mark.usefixtures("home")

LINES = "a\nsrun evil"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    one = Scheduler()
    monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: one)
    return one


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def older(document: dict[str, Any]) -> None:
    """Change a spec or request to one of an older version with fewer keys and rules."""
    document["resources"]["extra"] = {"exclude": "n1", "comment": "first\nsecond"}
    document["launch"]["srun"] = ["--het-group=0"]
    for key in ("join_timeout_s", "ports"):
        document["supervision"].pop(key)


def newer(document: dict[str, Any]) -> None:
    """Change a spec or request to one of a newer version with more keys, all at their defaults."""
    document["resources"]["topology"] = {"racks": None}
    document["supervision"]["numerics"]["on_zero"] = "warn"
    document["priority"] = 5


def make_run(
    root: Path, change: Callable[[dict[str, Any]], None], given: Mapping[str, Any] | None = None
) -> RunPaths:
    """A run with a live attempt and documents of another version."""
    spec = spec_of(resources={"executor": "slurm"})
    paths, _ = run_folders.attach_or_create(spec, root, created_by="ann")
    attempt = submit(paths, spec)

    def change_record(record: dict[str, Any]) -> None:
        change(record["spec"])
        record["given"] = given

    rewrite(paths.spec, change_record)
    rewrite(attempt.request, change)
    return paths


def call(*words: str) -> CliResult:
    outcome = CliRunner().invoke(app, list(words))
    if outcome.exception is not None:
        raise outcome.exception
    return CliResult(outcome.exit_code, outcome.stdout, outcome.stderr)


def supervise_once(paths: RunPaths) -> None:
    one = Supervisor(
        paths=paths,
        index=Index(),
        log=logging.getLogger(__name__),
        submit=submit_next,
        is_acting=True,
    )
    with JournalWriter(paths.journal_of("flow")) as journal:
        one._decide(load_history(paths), journal)


def end_attempt(paths: RunPaths, number: int) -> None:
    with JournalWriter(paths.journal_of("flow")) as journal:
        state = AttemptState.PREEMPTED.value
        journal.append(
            EventKind.ATTEMPT_ENDED, attempt=number, state=state, cause="preemption", ended_at=1.0
        )


@pytest.mark.parametrize("change", [older, newer])
@pytest.mark.usefixtures("scheduler")
def test_the_mirror_of_a_recorded_run_is_found(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    def mirrored(document: dict[str, Any]) -> None:
        change(document)
        document["checkpoint"]["mirror"] = "file:///mirror"

    paths = make_run(tmp_path / "runs", mirrored)
    assert str(location_of(paths)).startswith("file:///mirror/")


@pytest.mark.parametrize("change", [older, newer])
def test_a_run_of_another_version_can_be_shown_stopped_and_relaunched(
    change: Callable[[dict[str, Any]], None],
    tmp_path: Path,
    scheduler: Scheduler,
) -> None:
    given = spec_of(resources={"executor": "slurm"}).given
    paths = make_run(tmp_path / "runs", change, None if change is older else given)
    shown = call("show", str(paths.directory), "--json").json
    assert shown["state"] == RunState.QUEUED
    assert "attempt 1" in operator.request(paths, "stop", by="ann")
    end_attempt(paths, 1)
    assert "continues at" in operator.request(paths, "relaunch", by="ann")
    supervise_once(paths)
    second = load_history(paths).last_attempt
    assert second is not None
    assert second.request is not None
    assert (second.number, second.state) == (2, AttemptState.SUBMITTED)
    options = second.request.scheduler["additional_parameters"]
    assert options.get("exclude") == ("n1" if change is older else None)
    # Prefect's flow passes the recorded run, and a user submits the spec again.
    record = run_folders.read_record(paths)
    recorded = carry.given_spec(record.spec, (), paths.directory.parent, paths.name)
    assert carry.take_up(recorded, paths.directory.parent, paths.name) == paths
    if change is newer:
        same = RunSpec.model_validate(given)
        assert run_folders.attach_or_create(same, tmp_path / "runs", created_by="ann") == (
            paths,
            False,
        )


def test_a_request_of_an_older_version_is_submitted_unchanged(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    paths = make_run(tmp_path, older)
    attempt = paths.attempt(1)
    for document in (attempt.submission, attempt.submitting):
        document.unlink()
    scheduler.jobs.clear()
    assert resume(paths) is not None
    assert len(scheduler.jobs) == 1


def test_a_run_with_set_keys_of_a_newer_version_is_not_relaunched(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    given = {**spec_of(resources={"executor": "slurm"}).given, "priority": 6}
    paths = make_run(tmp_path, newer, given)
    with pytest.raises(RunConflictError):
        run_folders.attach_or_create(
            spec_of(resources={"executor": "slurm"}), tmp_path, created_by="ann"
        )
    assert "priority" in str(call("show", str(paths.directory), "--json").json["warnings"])
    assert "attempt 1" in operator.request(paths, "stop", by="ann")
    end_attempt(paths, 1)
    with pytest.raises(
        SpecError, match=r"newer version of Holdfast recorded.*: priority; relaunch"
    ):
        operator.request(paths, "relaunch", by="ann")


def test_a_supervisor_does_not_relaunch_a_run_with_newer_keys(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    given = {**spec_of(resources={"executor": "slurm"}).given, "priority": 6}
    paths = make_run(tmp_path, newer, given)
    end_attempt(paths, 1)
    supervise_once(paths)
    history = load_history(paths)
    assert (history.state, len(history.attempts)) == (RunState.WAITING, 1)
    assert history.last_decision is not None
    assert "priority" in history.last_decision["reason"]


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"resources": {"partition": LINES}}, "partition"),
        ({"resources": {"extra": {"comment": LINES}}}, "additional_parameters"),
        ({"resources": {"extra": {f"comment={LINES}": "x"}}}, "additional_parameters"),
        ({"launch": {"srun": [LINES]}}, "srun_args"),
        ({"launch": {"python": f"/bin/{LINES}"}}, "launch.python"),
        ({"resources": {"extra": {"job-name": "mine"}}}, "job-name"),
        ({"resources": {"extra": {"array": "0-3"}}}, "array"),
    ],
)
def test_unsafe_recorded_options_are_refused_before_sbatch(
    part: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = spec_of(resources={"executor": "slurm"})
    document = before.model_dump(mode="json")
    for key, value in part.items():
        document[key].update(value)
    record = record_of(before).model_copy(update={"spec": document})
    request = build_request(record, RunSpec.read(document), attempt=1, gpus=1, reason="x")
    (tmp_path / "request.json").write_text(request.model_dump_json())
    recorded = read_document(Request, tmp_path / "request.json")
    assert recorded == request
    with pytest.raises(SubmissionRefusedError, match=named) as refused:
        SlurmExecutor().submit(AttemptPaths(tmp_path / "0001"), request)
    assert "was not submitted: its recorded spec has values" in str(refused.value)
    assert not refused.value.may_pass
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    "part",
    [
        {"resources": {"nodes": 10**9}},
        {"supervision": {"heartbeat_s": 1e300}},
        {"checkpoint": {"mirror": "s3://key:secret@bucket/x"}},
        {"resources": {"partition": "a\x00b"}},
        {"supervision": {"attempts_max": 10**18}},
    ],
)
def test_bounds_also_apply_to_recorded_specs(part: dict[str, Any]) -> None:
    document = spec_of().model_dump(mode="json")
    for key, value in part.items():
        document[key].update(value)
    with pytest.raises(ValueError, match=next(iter(part))):
        RunSpec.read(document)
