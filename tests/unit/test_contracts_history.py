"""A run's history: documents and journal lines give one state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.records.documents import (
    Claim,
    Outcome,
    Request,
    RunRecord,
    Submission,
    write_document,
)
from holdfast.contracts.records.history import (
    AttemptView,
    excluded_checkpoints,
    fold_run_state,
    load_history,
    pinned_checkpoints,
)
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause, RunState

A, R = AttemptState, RunState


def view(state: AttemptState, cause: Cause | None = None, number: int = 1) -> AttemptView:
    return AttemptView(number=number, state=state, request=None, job_id="7", cause=cause)


RELAUNCH = {"action": "relaunch", "gpus": 2}
STOP = {"action": "stop"}
WAIT = {"action": "wait"}


@pytest.mark.parametrize(
    ("last", "action", "decision", "expected"),
    [
        (None, None, None, R.QUEUED),
        (None, "cancel", None, R.CANCELLED),
        (None, "pause", None, R.PAUSED),
        (None, "relaunch", None, R.WAITING),
        (view(A.CREATED), None, None, R.QUEUED),
        (view(A.SUBMITTED), None, None, R.QUEUED),
        (view(A.PENDING), None, None, R.QUEUED),
        (view(A.RUNNING), None, None, R.RUNNING),
        (view(A.STOPPING), None, None, R.RUNNING),
        # While an attempt is live, the operator's request stops it and does not set the state yet.
        (view(A.STOPPING), "pause", None, R.RUNNING),
        (view(A.PENDING), "cancel", None, R.QUEUED),
        (view(A.COMPLETED), None, None, R.COMPLETED),
        # It completed before the request arrived.
        (view(A.COMPLETED), "cancel", None, R.COMPLETED),
        (view(A.COMPLETED), "pause", STOP, R.COMPLETED),
        (view(A.PREEMPTED, Cause.PREEMPTION), None, None, R.WAITING),
        (view(A.PREEMPTED, Cause.PREEMPTION), None, RELAUNCH, R.WAITING),
        (view(A.PREEMPTED, Cause.PREEMPTION), None, WAIT, R.WAITING),
        (view(A.PREEMPTED, Cause.PREEMPTION), "pause", None, R.PAUSED),
        (view(A.PREEMPTED, Cause.PREEMPTION), "stop", None, R.CANCELLED),
        (view(A.FAILED, Cause.USER_ERROR), None, STOP, R.FAILED),
        (view(A.FAILED, Cause.USER_ERROR), None, None, R.WAITING),
        (view(A.FAILED, Cause.USER_ERROR), "cancel", STOP, R.CANCELLED),
        (view(A.FAILED, Cause.USER_ERROR), "relaunch", STOP, R.WAITING),
        (view(A.HUNG, Cause.HANG), None, STOP, R.FAILED),
        (view(A.LOST, Cause.UNKNOWN), None, STOP, R.FAILED),
        (view(A.CANCELLED, Cause.OPERATOR), None, None, R.CANCELLED),
        (view(A.CANCELLED, Cause.OPERATOR), None, STOP, R.CANCELLED),
        (view(A.CANCELLED, Cause.OPERATOR), "pause", None, R.PAUSED),
        (view(A.CANCELLED, Cause.OPERATOR), "resume", None, R.WAITING),
    ],
)
def test_the_run_state_follows_from_attempt_request_and_decision(
    last: AttemptView | None,
    action: str | None,
    decision: dict[str, Any] | None,
    expected: RunState,
) -> None:
    request = {"action": action} if action else None
    assert fold_run_state([last] if last else [], request, decision) is expected


def test_a_relaunch_request_older_than_the_completion_is_ignored() -> None:
    last = view(A.COMPLETED)
    asked = {"action": "relaunch", "gpus": 4}
    assert fold_run_state([last], {**asked, "of_completed": False}, STOP) is R.COMPLETED
    assert fold_run_state([last], {**asked, "of_completed": True}, STOP) is R.WAITING
    assert fold_run_state([last], {"action": "stop", "of_completed": True}, STOP) is R.COMPLETED


def test_only_the_last_attempt_decides_the_run_state() -> None:
    first = view(A.FAILED, Cause.USER_ERROR)
    assert fold_run_state([first, view(A.RUNNING, number=2)], None, STOP) is R.RUNNING


def make_run(root: Path) -> RunPaths:
    run = RunPaths(root / "run")
    run.directory.mkdir()
    spec = RunSpec(name="run", command=("train.py",))
    record = RunRecord(
        uid="a" * 32,
        run="run",
        name="run",
        root=str(root),
        created_at=1.0,
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest,
    )
    write_document(run.spec, record)
    return run


def reserve(run: RunPaths, number: int) -> None:
    attempt = run.attempt(number)
    attempt.directory.mkdir(parents=True)
    spec = RunSpec(name="run", command=("train.py",))
    request = Request(
        run_uid="a" * 32,
        run="run",
        run_directory=str(run.directory),
        attempt=number,
        job_name=f"run-{number}",
        executor="local",
        nodes=2,
        gpus_per_node=4,
        command=spec.command,
        working_directory="/",
        environment={},
        config={},
        launch=spec.launch,
        resources=spec.resources,
        supervision=spec.supervision,
        command_digest="d",
        scheduler={},
        created_at=2.0,
        reason="first",
    )
    write_document(attempt.request, request)


def claim(run: RunPaths, number: int) -> None:
    document = Claim(job_id="7", pid=1, process_start_s=1.0, boot_id="b", host="n1", claimed_at=4.0)
    write_document(run.attempt(number).claim, document)


def append_event(run: RunPaths, kind: EventKind, **data: Any) -> None:
    with JournalWriter(run.journal_of("flow")) as writer:
        writer.append(kind, **data)


def test_a_claimed_job_that_the_scheduler_stops_is_stopping(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    reserve(run, 1)
    claim(run, 1)
    assert load_history(run).attempts[0].state is A.RUNNING
    for state in ("running", "stopping"):
        append_event(run, EventKind.ATTEMPT_STATE, attempt=1, state=state)
    assert load_history(run).attempts[0].state is A.STOPPING


def test_the_run_state_from_reservation_to_the_final_decision(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert load_history(run).state is R.QUEUED
    reserve(run, 1)
    assert load_history(run).attempts[0].state is A.CREATED
    submission = Submission(job_id="7", executor="local", submitted_at=3.0)
    write_document(run.attempt(1).submission, submission)
    assert load_history(run).attempts[0].state is A.SUBMITTED
    append_event(run, EventKind.ATTEMPT_STATE, attempt=1, state="pending")
    assert load_history(run).attempts[0].state is A.PENDING
    claim(run, 1)
    assert load_history(run).state is R.RUNNING
    with JournalWriter(run.attempt(1).journal / "rank0.jsonl") as rank0:
        rank0.append(EventKind.RESUMED, attempt=1, step=40, checkpoint="run:x", command_digest="dd")
    with JournalWriter(run.attempt(1).node_journal(0)) as agent:
        agent.append(EventKind.SIGNAL, attempt=1, source="slurm", name="SIGTERM")
    assert load_history(run).attempts[0].state is A.STOPPING
    outcome = Outcome(
        state=A.PREEMPTED,
        cause=Cause.PREEMPTION,
        job_id="7",
        hosts=("n1", "n2"),
        world_size=8,
        last_step=55,
        started_at=4.0,
        ended_at=9.0,
        traceback="boom",
    )
    write_document(run.attempt(1).outcome, outcome)
    append_event(run, EventKind.ATTEMPT_ENDED, attempt=1, state="preempted", cause="preemption")
    history = load_history(run)
    last = history.last_attempt
    assert last is not None
    assert (last.state, last.cause) == (A.PREEMPTED, Cause.PREEMPTION)
    assert (last.world_size, last.hosts, last.traceback) == (8, ("n1", "n2"), "boom")
    assert (last.resumed_from, last.command_digest) == ("run:x", "dd")
    assert (last.first_step, last.last_step) == (41, 55)
    assert (last.submitted_at, last.started_at, last.ended_at) == (3.0, 4.0, 9.0)
    assert history.state is R.WAITING
    append_event(run, EventKind.DECISION, after_attempt=1, action="stop", reason="no budget")
    assert load_history(run).state is R.FAILED


def test_an_operator_request_is_pending_until_the_next_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    reserve(run, 1)
    append_event(run, EventKind.ATTEMPT_ENDED, attempt=1, state="preempted", cause="operator")
    append_event(run, EventKind.OPERATOR_REQUEST, action="pause", by="me", after_attempt=1)
    assert load_history(run).state is R.PAUSED
    append_event(
        run, EventKind.OPERATOR_REQUEST, action="relaunch", by="me", after_attempt=1, gpus=2
    )
    history = load_history(run)
    assert history.state is R.WAITING
    assert (history.pending_request or {})["gpus"] == 2
    reserve(run, 2)
    claim(run, 2)
    history = load_history(run)
    assert (history.pending_request, history.state) == (None, R.RUNNING)


def test_a_decision_applies_only_to_the_attempt_that_it_names(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    reserve(run, 1)
    append_event(run, EventKind.DECISION, after_attempt=1, action="stop")
    reserve(run, 2)
    append_event(run, EventKind.ATTEMPT_ENDED, attempt=2, state="failed", cause="node_failure")
    history = load_history(run)
    assert history.last_decision is None
    assert history.state is R.WAITING


def test_an_attempt_that_was_reserved_but_not_submitted_is_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.attempt(1).directory.mkdir(parents=True)
    (attempt,) = load_history(run).attempts
    assert (attempt.state, attempt.request, attempt.world_size) == (A.CREATED, None, 0)


def test_pins_and_rollbacks_are_read_from_journal_events(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for kind, name in [
        (EventKind.PINNED, "a"),
        (EventKind.PINNED, "b"),
        (EventKind.UNPINNED, "a"),
        (EventKind.UNPINNED, "b"),
        (EventKind.PINNED, "b"),
    ]:
        append_event(run, kind, checkpoint=name, by="me")
    append_event(run, EventKind.ROLLED_BACK, to="x", excluded=["y", "z"])
    events = load_history(run).events
    assert pinned_checkpoints(events) == {"b"}
    assert excluded_checkpoints(events) == {"y", "z"}


def test_a_missing_run_error_says_what_to_do_next(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holdfast runs"):
        load_history(RunPaths(tmp_path / "none"))
