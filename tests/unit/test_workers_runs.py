"""Runs, attempts, operator requests and preflight on real folders; no process is started."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import spec_of

from holdfast.contracts.disk import filesystems
from holdfast.contracts.disk.filesystems import FileSystem
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import (
    NotFoundError,
    PreflightError,
    RunConflictError,
    SchedulerUnavailableError,
    SpecError,
)
from holdfast.contracts.records.documents import (
    Outcome,
    RunRecord,
    StopFile,
    Submission,
    read_document,
    write_document,
)
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import Cost
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor import carry
from holdfast.workers import schedulers
from holdfast.workers.agent.claim import quarantine_stale_outcome
from holdfast.workers.runs import attempts, operator, preflight, run_folders
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers import Executor, JobStatus, executor_for


def end_run(paths: RunPaths, cause: Cause | None, *, decision: bool = True) -> None:
    """Give the run an attempt that ended, and the decision to stop."""
    attempt = attempts.reserve(paths, len(paths.list_attempts()) + 1)
    assert attempt is not None
    state = AttemptState.COMPLETED if cause is None else AttemptState.FAILED
    with JournalWriter(paths.journal_of("flow")) as journal:
        journal.append(
            EventKind.ATTEMPT_ENDED, attempt=attempt.number, state=state.value, cause=cause
        )
        if decision:
            journal.append(EventKind.DECISION, after_attempt=attempt.number, action="stop")


# --- runs -------------------------------------------------------------------------------------


def test_the_same_spec_attaches_to_its_live_run(tmp_path: Path) -> None:
    spec = spec_of()
    first, created = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    assert created
    again, created = run_folders.attach_or_create(spec, tmp_path, created_by="bob")
    assert (again, created) == (first, False)
    record = run_folders.read_record(first)
    assert (record.created_by, record.spec_digest) == ("ann", spec.digest)


def test_a_key_added_by_an_upgrade_does_not_change_a_runs_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = spec_of(config={"a": 1})
    paths, _ = run_folders.attach_or_create(before, tmp_path, created_by="ann")
    upgraded: Any = type(
        "RunSpec", (RunSpec,), {"__annotations__": {"priority": int}, "priority": 5}
    )
    monkeypatch.setattr(run_folders, "RunSpec", upgraded)
    monkeypatch.setattr(carry, "RunSpec", upgraded)
    after = upgraded.model_validate(before.given)
    assert after.digest != before.digest
    assert run_folders.attach_or_create(after, tmp_path, created_by="ann") == (paths, False)
    # The recorded spec that the flow gets when it takes up the run again.
    recorded = upgraded.model_validate(run_folders.read_record(paths).spec)
    assert carry.take_up(recorded, tmp_path, paths.name) == paths
    other = upgraded.model_validate({**before.given, "priority": 6})
    with pytest.raises(RunConflictError, match="another spec"):
        run_folders.attach_or_create(other, tmp_path, created_by="ann")
    with pytest.raises(RunConflictError, match="another spec"):
        carry.take_up(other, tmp_path, paths.name)


def test_a_default_changed_by_an_upgrade_does_not_change_a_runs_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    cost = Cost(currency="EUR")
    upgraded: Any = type("RunSpec", (RunSpec,), {"__annotations__": {"cost": Cost}, "cost": cost})
    monkeypatch.setattr(run_folders, "RunSpec", upgraded)
    after = upgraded.model_validate(spec_of().given)
    assert after.digest != spec_of().digest
    assert run_folders.attach_or_create(after, tmp_path, created_by="ann") == (paths, False)


def test_another_spec_under_a_live_name_is_refused(tmp_path: Path) -> None:
    run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    with pytest.raises(RunConflictError, match=r"spec of a live run cannot change.*fork"):
        run_folders.attach_or_create(spec_of(config={"a": 1}), tmp_path, created_by="ann")


def test_a_completed_run_of_the_same_spec_is_returned(tmp_path: Path) -> None:
    paths, _ = run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    end_run(paths, None)
    assert run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann") == (paths, False)


def test_a_failed_run_of_the_same_spec_needs_a_relaunch(tmp_path: Path) -> None:
    paths, _ = run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    end_run(paths, Cause.USER_ERROR)
    with pytest.raises(
        RunConflictError, match=r"holdfast relaunch r.*continues it from its newest checkpoint"
    ):
        run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")


def test_another_spec_after_the_end_is_a_new_generation(tmp_path: Path) -> None:
    names = []
    for seed in range(3):
        paths, created = run_folders.attach_or_create(
            spec_of(config={"seed": seed}), tmp_path, created_by="ann"
        )
        assert created
        end_run(paths, None)
        names.append(paths.name)
    assert names == ["r", "r.r2", "r.r3"]
    assert run_folders.newest_generation(tmp_path, "r") == paths
    assert run_folders.find_run(tmp_path, "r.r2").name == "r.r2"
    assert run_folders.find_run(tmp_path, "r").name == "r"


def test_one_of_many_concurrent_creations_succeeds(tmp_path: Path) -> None:
    spec, results = spec_of(), []
    barrier = threading.Barrier(6)

    def create() -> None:
        barrier.wait(10)
        try:
            run_folders.create_run(spec, tmp_path, created_by="ann")
            results.append("created")
        except RunConflictError:
            results.append("refused")

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == ["created"] + ["refused"] * 5


def test_an_empty_folder_left_by_a_crash_is_reused(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    paths, created = run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    assert created
    assert read_document(RunRecord, paths.spec) is not None


def test_the_error_for_an_unknown_run_suggests_similar_names(tmp_path: Path) -> None:
    run_folders.attach_or_create(
        RunSpec(name="gpt-small", command=("t",)), tmp_path, created_by="ann"
    )
    with pytest.raises(NotFoundError, match="did you mean gpt-small"):
        run_folders.find_run(tmp_path, "gpt-smal")
    with pytest.raises(NotFoundError):
        run_folders.find_run(tmp_path, "../etc")


# --- attempts ---------------------------------------------------------------------------------


class Scheduler(Executor):
    """A fake scheduler: it remembers job names, and may be unavailable."""

    kind = "fake"

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.is_silent = False
        self.loses_answers = False

    def submit(self, paths: AttemptPaths, request: Any) -> Submission:
        self.jobs[request.job_name] = str(100 + len(self.jobs))
        if self.loses_answers:
            raise SchedulerUnavailableError("the answer was lost")
        return Submission(job_id=self.jobs[request.job_name], executor="fake", submitted_at=1)

    def find(self, request: Any) -> Submission | None:
        if self.is_silent:
            raise SchedulerUnavailableError("no answer")
        job = self.jobs.get(request.job_name)
        return Submission(job_id=job, executor="fake", submitted_at=1) if job else None

    def status(self, request: Any, submission: Submission | None, **_: float) -> JobStatus:
        if self.is_silent:
            raise SchedulerUnavailableError("no answer")
        return JobStatus(state=AttemptState.PENDING, raw="PENDING")

    def is_pending(self, request: Any, submission: Submission) -> bool:
        if self.is_silent:
            raise SchedulerUnavailableError("no answer")
        return request.job_name in self.jobs

    def cancel(self, request: Any, submission: Submission) -> None:
        self.jobs.clear()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    one = Scheduler()
    monkeypatch.setitem(schedulers._KINDS, "local", lambda: one)
    monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: one)
    return one


def submit(paths: RunPaths, spec: RunSpec) -> AttemptPaths:
    with JournalWriter(paths.journal_of("flow")) as journal:
        return attempts.submit_attempt(
            paths, spec, run_folders.read_record(paths), gpus=spec.gpus, reason="x", journal=journal
        )


def resume(paths: RunPaths) -> AttemptPaths | None:
    with JournalWriter(paths.journal_of("flow")) as journal:
        return attempts.resume_submission(paths, journal)


def test_an_attempt_is_reserved_by_one_process_alone(tmp_path: Path) -> None:
    paths, _ = run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    assert attempts.reserve(paths, 1) is not None
    assert attempts.reserve(paths, 1) is None


def test_a_lost_scheduler_answer_does_not_submit_the_job_twice(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    scheduler.loses_answers = True
    with pytest.raises(SchedulerUnavailableError):
        submit(paths, spec)
    scheduler.is_silent = True
    with pytest.raises(SchedulerUnavailableError):
        resume(paths)
    scheduler.is_silent = False
    attempt = resume(paths)
    assert attempt is not None
    found = read_document(Submission, attempt.submission)
    assert found is not None
    assert found.job_id == "100"
    assert len(scheduler.jobs) == 1
    assert resume(paths) is None


def test_a_reservation_without_a_job_is_submitted_later(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    attempt = attempts.reserve(paths, 1)
    assert attempt is not None
    record = run_folders.read_record(paths)
    write_document(attempt.request, build_request(record, spec, attempt=1, gpus=4, reason="x"))
    assert resume(paths) == attempt
    assert len(scheduler.jobs) == 1
    kinds = [event.kind for event in load_history(paths).events]
    assert kinds == [EventKind.ATTEMPT_SUBMITTED]


def test_a_reservation_without_a_request_is_abandoned(tmp_path: Path) -> None:
    paths, _ = run_folders.attach_or_create(spec_of(), tmp_path, created_by="ann")
    attempt = attempts.reserve(paths, 1)
    assert attempt is not None
    with pytest.raises(NotFoundError, match="abandon_reservation"):
        resume(paths)
    with JournalWriter(paths.journal_of("flow")) as journal:
        attempts.abandon_reservation(attempt, journal)
    assert load_history(paths).attempts[0].state is AttemptState.LOST


def test_an_unavailable_scheduler_changes_no_state(tmp_path: Path, scheduler: Scheduler) -> None:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    submit(paths, spec)
    scheduler.is_silent = True
    assert reconcile(paths).attempts[0].state is AttemptState.SUBMITTED
    scheduler.is_silent = False
    assert reconcile(paths).attempts[0].state is AttemptState.PENDING


def test_concurrent_reconciles_write_one_ending(tmp_path: Path, scheduler: Scheduler) -> None:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    attempt = submit(paths, spec)
    outcome = Outcome(
        state=AttemptState.COMPLETED, job_id="100", world_size=4, started_at=1, ended_at=2
    )
    write_document(attempt.outcome, outcome)
    threads = [
        threading.Thread(target=reconcile, args=(paths,), kwargs={"writer": f"w{n}"})
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    endings = [e for e in load_history(paths).events if e.kind is EventKind.ATTEMPT_ENDED]
    assert len(endings) == 1
    assert load_history(paths).state == "completed"


def test_an_outcome_of_an_older_attempt_is_quarantined(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    attempt = submit(paths, spec)
    stale = Outcome(
        attempt=attempt.number - 1,
        state=AttemptState.COMPLETED,
        job_id="99",
        world_size=4,
        last_step=1_000,
        started_at=1,
        ended_at=2,
    )
    write_document(attempt.outcome, stale)
    view = reconcile(paths).attempts[0]
    assert not view.state.is_terminal
    assert (view.outcome, view.last_step) == (None, None)
    with JournalWriter(attempt.node_journal(0)) as journal:
        quarantine_stale_outcome(attempt, journal)
        quarantine_stale_outcome(attempt, journal)
    assert not attempt.outcome.exists()
    (note,) = (e for e in load_history(paths).events if e.kind is EventKind.NOTE)
    assert "outcome.json belonged to attempt 0, not to 1" in note.data["text"]
    own = stale.model_copy(update={"attempt": attempt.number})
    write_document(attempt.outcome, own)
    assert reconcile(paths).attempts[0].state is AttemptState.COMPLETED


def test_a_queued_job_is_cancelled_at_the_scheduler(tmp_path: Path, scheduler: Scheduler) -> None:
    spec = spec_of(resources={"executor": "slurm", "gpus_per_node": 4})
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    attempt = submit(paths, spec)
    assert "still queued and is cancelled" in operator.request(paths, "cancel", by="ann")
    assert not scheduler.jobs
    stop = read_document(StopFile, attempt.stop)
    assert stop is not None
    assert stop.action == "cancel"


# --- operators --------------------------------------------------------------------------------


def test_only_cancel_can_leave_out_the_last_checkpoint(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    attempt = submit(paths, spec)
    with pytest.raises(SpecError, match="pause always saves a last checkpoint"):
        operator.request(paths, "pause", by="ann", now=True)
    operator.request(paths, "cancel", by="ann")
    before = json.loads(attempt.stop.read_text())
    # The first request is pending, and this one does not wait for it.
    message = operator.request(paths, "cancel", by="ann", now=True, alone=True)
    after = json.loads(attempt.stop.read_text())
    assert (before["deadline_s"], after["deadline_s"]) == (None, 0.0)
    assert "ends now, without a last checkpoint" in message
    asked = [e for e in load_history(paths).events if e.kind is EventKind.OPERATOR_REQUEST]
    assert [e.data.get("now") for e in asked] == [None, True]


@pytest.mark.parametrize(
    ("ending", "action", "gpus", "words"),
    [
        (None, "relaunch", None, "is completed, so there is nothing to relaunch"),
        (None, "stop", None, "is completed"),
        (Cause.USER_ERROR, "stop", None, "has failed, so there is nothing to stop"),
        (Cause.USER_ERROR, "resume", None, "not paused"),
        (Cause.USER_ERROR, "relaunch", 3, "not among elastic.choices; allowed"),
        (Cause.USER_ERROR, "relaunch", 8, "outside elastic"),
        (Cause.USER_ERROR, "jump", None, "expected one of"),
    ],
)
def test_invalid_operator_requests_are_refused(
    tmp_path: Path, ending: Cause | None, action: Any, gpus: int | None, words: str
) -> None:
    spec = spec_of(elastic={"choices": [2, 4]})
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    end_run(paths, ending)
    before = len(load_history(paths).events)
    with pytest.raises(SpecError, match=words):
        operator.request(paths, action, by="ann", gpus=gpus)
    assert len(load_history(paths).events) == before


def test_a_failed_run_may_be_relaunched_at_another_size(tmp_path: Path) -> None:
    spec = spec_of(elastic={"choices": [2, 4]})
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="ann")
    end_run(paths, Cause.USER_ERROR)
    assert "2 GPUs" in operator.request(paths, "relaunch", by="ann", gpus=2)
    history = load_history(paths)
    assert history.state == "waiting"
    assert history.pending_request is not None
    assert history.pending_request["gpus"] == 2


# --- preflight --------------------------------------------------------------------------------


def test_preflight_reports_every_problem_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = spec_of(launch={"working_directory": str(tmp_path), "python": "/no/such/python"})
    with pytest.raises(PreflightError) as caught:
        preflight.check(spec, tmp_path / "file" / "root")
    text = "\n".join(caught.value.problems)
    assert "cannot write there" in text
    assert "/no/such/python: no such interpreter" in text
    assert len(caught.value.problems) == 2


def test_preflight_finds_a_missing_wrapper_of_this_machine(tmp_path: Path) -> None:
    launch = {"working_directory": str(tmp_path), "wrapper": ["no-such-numactl"]}
    with pytest.raises(PreflightError, match=r"launch\.wrapper no-such-numactl: no such command"):
        preflight.check(spec_of(launch=launch), tmp_path / "root")
    preflight.check(spec_of(launch={**launch, "wrapper": ["env"]}), tmp_path / "root")


def test_preflight_finds_a_missing_program_and_module(tmp_path: Path) -> None:
    spec = spec_of(launch={"working_directory": str(tmp_path)})
    with pytest.raises(PreflightError, match=r"t\.py is not a file under"):
        preflight.check(spec, tmp_path / "root")
    named = RunSpec(
        name="r", command=("-m", "no_such_module"), launch={"working_directory": str(tmp_path)}
    )
    with pytest.raises(PreflightError, match="module no_such_module is missing"):
        preflight.check(named, tmp_path / "root")


def test_preflight_passes_a_run_that_can_start(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    preflight.check(spec_of(launch={"working_directory": str(tmp_path)}), tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_the_error_for_an_unknown_executor_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="expected one of local, slurm"):
        executor_for("kubernetes")


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [(os, "link", "has no hard links"), (fcntl, "flock", "has no file locks")],
)
def test_preflight_refuses_a_root_without_hard_links_or_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, words: str
) -> None:
    (tmp_path / "t.py").write_text("")

    def not_implemented(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(module, name, not_implemented)
    with pytest.raises(PreflightError, match=words):
        preflight.check(spec_of(launch={"working_directory": str(tmp_path)}), tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "options", "local"),
    [
        ("lustre", "rw,localflock", "localflock"),
        ("lustre", "rw,flock", ""),
        ("nfs", "rw,vers=3,nolock,local_lock=all", "nolock"),
        ("nfs4", "rw,vers=4.2,local_lock=none", ""),
        ("ext4", "rw", ""),
    ],
)
def test_preflight_refuses_file_locks_that_work_on_one_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, local: str
) -> None:
    monkeypatch.setattr(filesystems, "filesystem_of", lambda _: FileSystem(kind, options))
    (root,) = preflight._places(spec_of(), tmp_path)
    problems = preflight._place_problems(root)
    assert [local in problem for problem in problems] == [True] * bool(local)
    assert all("a run could have two supervisors" in problem for problem in problems)
