"""Submissions with lost answers, refusals, and jobs and outcomes that appear late."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.histories import spec_of

from holdfast.contracts.disk import filesystems, reading
from holdfast.contracts.disk.filesystems import CACHE_MARGIN_S, CACHE_S, FileSystem
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import (
    SchedulerUnavailableError,
    SubmissionRefusedError,
)
from holdfast.contracts.records import documents
from holdfast.contracts.records.documents import (
    AttemptDocuments,
    Claim,
    Outcome,
    Request,
    Submission,
    create_document,
    read_claim,
    read_document,
    read_documents,
    write_document,
)
from holdfast.contracts.records.history import RunHistory, load_history
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.workers import schedulers
from holdfast.workers.agent.claim import claim
from holdfast.workers.agent.context import load_context
from holdfast.workers.nodes import heartbeats
from holdfast.workers.runs import attempts, endings, run_folders
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.schedulers import Executor, JobStatus
from holdfast.workers.schedulers.slurm import ABSENCE_S

SPEC = spec_of(resources={"executor": "slurm", "gpus_per_node": 4})


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Slurm(Executor):
    """A fake scheduler that can lose an answer and show a job late."""

    kind = "slurm"
    absence_s = ABSENCE_S

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.shown_at: dict[str, float] = {}
        self.states: dict[str, AttemptState] = {}
        self.loses_answer = False
        self.refuses = ""
        self.late_s = 0.0
        self.is_empty = False

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        if self.refuses:
            raise SubmissionRefusedError(self.refuses, may_pass=True)
        job = str(100 + len(self.states))
        self.states[job] = AttemptState.PENDING
        self.shown_at[job] = self.clock.now + self.late_s
        if self.loses_answer:
            raise SchedulerUnavailableError("Socket timed out on send/recv operation")
        return self._named(job)

    def find(self, request: Request) -> Submission | None:
        shown = [job for job, at in self.shown_at.items() if at <= self.clock.now]
        return self._named(shown[0]) if shown else None

    def live_jobs(self, request: Request) -> tuple[Submission, ...]:
        shown = [job for job, at in self.shown_at.items() if at <= self.clock.now]
        return tuple(self._named(job) for job in shown if not self.states[job].is_terminal)

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        job = submission or self.find(request)
        if job is None or self.is_empty:
            return JobStatus(state=AttemptState.LOST, is_absent=True, evidence=("no such job",))
        state = self.states[job.job_id]
        ended_at = self.clock.now - 3600 if state.is_terminal else None
        return JobStatus(state=state, raw=state.value.upper(), ended_at=ended_at)

    def withdraw(self, request: Request, submission: Submission) -> None:
        if self.states[submission.job_id] is AttemptState.PENDING:
            self.states[submission.job_id] = AttemptState.CANCELLED

    def cancel(self, request: Request, submission: Submission) -> None:
        self.states[submission.job_id] = AttemptState.CANCELLED

    def _named(self, job: str) -> Submission:
        return Submission(job_id=job, executor="slurm", submitted_at=self.clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    for module in (attempts, endings):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=one.time, monotonic=one.monotonic))
    return one


@pytest.fixture
def slurm(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    one = Slurm(clock)
    monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: one)
    return one


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return run_folders.attach_or_create(SPEC, tmp_path, created_by="ann")[0]


class Flow:
    """What the supervisor does with the attempts of a run."""

    def __init__(self, paths: RunPaths, clock: Clock) -> None:
        self.paths = paths
        self.absences = attempts.Absences(clock.monotonic)

    def submit(self) -> None:
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            record = run_folders.read_record(self.paths)
            attempts.submit_attempt(self.paths, SPEC, record, gpus=4, reason="x", journal=journal)

    def resume(self) -> None:
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            attempts.resume_submission(self.paths, journal, self.absences)

    def end_duplicates(self) -> list[str]:
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            return attempts.end_duplicates(self.attempt, journal)

    def reconcile(self) -> RunHistory:
        return reconcile(self.paths)

    @property
    def attempt(self) -> AttemptPaths:
        return self.paths.list_attempts()[-1]

    @property
    def job(self) -> str | None:
        return load_history(self.paths).attempts[-1].job_id


@pytest.fixture
def flow(run: RunPaths, clock: Clock) -> Flow:
    return Flow(run, clock)


def claim_as(attempt: AttemptPaths, job: str) -> bool:
    """Claim the attempt as node 0's agent of the job."""
    os.environ["SLURM_JOB_ID"] = job
    with JournalWriter(attempt.node_journal(0)) as journal:
        return claim(load_context(attempt.request), journal)


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "0")


# --- lost answers -------------------------------------------------------------------


def test_a_job_that_appears_late_is_found_and_not_submitted_again(
    flow: Flow, slurm: Slurm, clock: Clock
) -> None:
    slurm.loses_answer, slurm.late_s = True, 200.0
    with pytest.raises(SchedulerUnavailableError):
        flow.submit()
    slurm.loses_answer = False
    for _ in range(39):
        with pytest.raises(SchedulerUnavailableError, match="submitted again"):
            flow.resume()
        clock.now += 5.0
    clock.now += 5.0
    flow.resume()
    assert (flow.job, len(slurm.states)) == ("100", 1)


def test_a_restarted_flow_waits_the_whole_time_again(
    flow: Flow, slurm: Slurm, clock: Clock
) -> None:
    slurm.loses_answer, slurm.late_s = True, 10**9
    with pytest.raises(SchedulerUnavailableError):
        flow.submit()
    with pytest.raises(SchedulerUnavailableError):
        flow.resume()
    clock.now += ABSENCE_S
    later = Flow(flow.paths, clock)
    with pytest.raises(SchedulerUnavailableError, match="submitted again"):
        later.resume()
    slurm.loses_answer, slurm.late_s = False, 0.0
    clock.now += ABSENCE_S
    later.resume()
    assert later.job == "101"


@pytest.mark.parametrize("claimant", ["", "100", "101"])
def test_of_two_jobs_of_an_attempt_one_is_cancelled(
    flow: Flow, slurm: Slurm, clock: Clock, claimant: str
) -> None:
    slurm.loses_answer, slurm.late_s = True, ABSENCE_S + 100.0
    with pytest.raises(SchedulerUnavailableError):
        flow.submit()
    with pytest.raises(SchedulerUnavailableError):
        flow.resume()
    slurm.loses_answer, slurm.late_s = False, 0.0
    clock.now += ABSENCE_S
    flow.resume()
    assert flow.job == "101"
    assert flow.end_duplicates() == []
    clock.now += 100.0
    if claimant:
        slurm.states[claimant] = AttemptState.RUNNING
        assert claim_as(flow.attempt, claimant)
    (said,) = flow.end_duplicates()
    kept = claimant or "101"
    assert f"duplicates job {kept} of attempt" in said
    states = {job: state.is_terminal for job, state in slurm.states.items()}
    assert states == {job: job != kept for job in ("100", "101")}
    assert flow.job == kept
    assert not flow.reconcile().attempts[0].state.is_terminal


def test_the_end_of_a_job_that_did_not_claim_does_not_end_the_attempt(
    flow: Flow, slurm: Slurm, clock: Clock
) -> None:
    flow.submit()
    slurm.states = {"100": AttemptState.FAILED, "200": AttemptState.RUNNING}
    assert claim_as(flow.attempt, "200")
    for _ in range(3):
        assert not flow.reconcile().attempts[0].state.is_terminal
        clock.now += 1000.0
    assert flow.job == "200"


def test_an_attempt_that_ended_unclaimed_is_never_claimed(
    flow: Flow, slurm: Slurm, clock: Clock
) -> None:
    flow.submit()
    slurm.states["100"] = AttemptState.FAILED
    flow.reconcile()
    clock.now += 1000.0
    assert flow.reconcile().attempts[0].state.is_terminal
    assert not claim_as(flow.attempt, "200")
    assert load_history(flow.paths).attempts[0].job_id == "100"


def test_a_job_that_claims_at_the_last_moment_keeps_the_attempt(
    flow: Flow, slurm: Slurm, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow.submit()
    slurm.states["100"] = AttemptState.FAILED
    flow.reconcile()
    clock.now += 1000.0

    def claimed_meanwhile(directory: Path) -> None:
        slurm.states["200"] = AttemptState.RUNNING
        assert claim_as(flow.attempt, "200")

    monkeypatch.setattr(filesystems, "revalidate", claimed_meanwhile)

    def without_claim(attempt: AttemptPaths) -> AttemptDocuments:
        return replace(read_documents(attempt), claim=None)

    monkeypatch.setattr(documents, "read_documents", without_claim)
    assert not flow.reconcile().attempts[0].state.is_terminal


def test_an_abandoned_reservation_cannot_be_claimed(flow: Flow, run: RunPaths) -> None:
    attempt = attempts.reserve(run, 1)
    assert attempt is not None
    with JournalWriter(run.journal_of("flow")) as journal:
        attempts.abandon_reservation(attempt, journal)
    own = Claim(job_id="1", pid=1, process_start_s=0, boot_id="", host="h", claimed_at=time.time())
    assert not create_document(attempt.claim, own)
    assert read_claim(attempt) is None


# --- jobs that the scheduler does not know ----------------------------------------------------


def test_a_job_is_lost_only_after_a_long_absence(flow: Flow, slurm: Slurm, clock: Clock) -> None:
    flow.submit()
    clock.now += 10 * ABSENCE_S
    slurm.is_empty = True
    assert not flow.reconcile().attempts[0].state.is_terminal
    clock.now += ABSENCE_S - 1
    assert not flow.reconcile().attempts[0].state.is_terminal
    slurm.is_empty = False
    flow.reconcile()
    slurm.is_empty = True
    assert not flow.reconcile().attempts[0].state.is_terminal
    clock.now += ABSENCE_S
    assert flow.reconcile().attempts[0].state is AttemptState.LOST


@pytest.mark.parametrize("skew_s", [-5.0, 3600.0, -3600.0], ids=["right", "ahead", "behind"])
def test_a_job_whose_agents_write_heartbeats_is_not_lost(
    skew_s: float, flow: Flow, slurm: Slurm, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow.submit()
    slurm.is_empty = True
    flow.reconcile()
    clock.now += ABSENCE_S
    beat = SimpleNamespace(time=clock.now + skew_s, host="n1", ranks=())
    with monkeypatch.context() as patch:
        patch.setattr(heartbeats, "read_heartbeats", lambda _: [beat])
        for _ in range(3):
            # The node's clock may be wrong by any time, but each heartbeat has another one.
            assert not flow.reconcile().attempts[0].state.is_terminal
            beat.time += 5.0
            clock.now += ABSENCE_S
        assert not flow.reconcile().attempts[0].state.is_terminal
        clock.now += ABSENCE_S
        assert flow.reconcile().attempts[0].state is AttemptState.LOST


# --- outcomes that a file system shows late ---------------------------------------------------


class CachedAbsence:
    """A file system client's cache: `name` does not exist for `seconds`, or
    until its directory is opened if the client then asks the server (`asks`)."""

    def __init__(
        self, patch: pytest.MonkeyPatch, clock: Clock, name: str, seconds: float, *, asks: bool
    ) -> None:
        self._clock, self._name, self._ends_at = clock, name, clock.now + seconds
        self._asks = asks
        patch.setattr(os, "open", self._wrap(os.open, 0))
        patch.setattr(reading, "_open_inside", self._wrap(reading._open_inside, 1))

    def _wrap(self, real: Any, at: int) -> Any:
        def opened(*arguments: Any, **options: Any) -> Any:
            path, flags = arguments[at], arguments[at + 1]
            if flags & os.O_DIRECTORY and not flags & os.O_PATH and self._asks:
                self._ends_at = 0.0
            if os.path.basename(path) == self._name and self._clock.now < self._ends_at:
                raise FileNotFoundError(2, "cached", str(path))
            return real(*arguments, **options)

        return opened


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "filesystem_of", lambda _: FileSystem("nfs4", "rw,vers=4.2"))


def completed(attempt: AttemptPaths, clock: Clock) -> None:
    outcome = Outcome(
        attempt=1,
        state=AttemptState.COMPLETED,
        job_id="100",
        world_size=4,
        last_step=70,
        started_at=clock.now - 100,
        ended_at=clock.now,
    )
    write_document(attempt.outcome, outcome)


@pytest.mark.usefixtures("on_nfs")
@pytest.mark.parametrize(
    ("seconds", "asks"), [(CACHE_S, False), (10**9, True)], ids=["no close-to-open", "nfs"]
)
def test_an_outcome_that_the_file_system_shows_late_is_waited_for(
    flow: Flow, slurm: Slurm, clock: Clock, seconds: float, asks: bool
) -> None:
    flow.submit()
    assert claim_as(flow.attempt, "100")
    slurm.states["100"] = AttemptState.NODE_FAILED
    completed(flow.attempt, clock)
    with pytest.MonkeyPatch.context() as patch:
        CachedAbsence(patch, clock, "outcome.json", seconds, asks=asks)
        for _ in range(6):
            assert flow.reconcile().attempts[0].state is not AttemptState.LOST
            clock.now += 9.0
        clock.now += CACHE_MARGIN_S + CACHE_S - 54.0
        history = flow.reconcile()
    assert history.attempts[0].state is AttemptState.COMPLETED
    assert history.state is RunState.COMPLETED


class CachedUntilChanged(CachedAbsence):
    """The same for a mount with `nocto`: only a new name in the directory refreshes the cache."""

    def __init__(self, patch: pytest.MonkeyPatch, clock: Clock, path: Path) -> None:
        self._directory = os.path.dirname(path)
        super().__init__(patch, clock, os.path.basename(path), 10**9, asks=False)

    def _wrap(self, real: Any, at: int) -> Any:
        looked = super()._wrap(real, at)

        def opened(*arguments: Any, **options: Any) -> Any:
            path, flags = arguments[at], arguments[at + 1]
            if flags & os.O_EXCL and os.path.dirname(path) == self._directory:
                self._ends_at = 0.0
            return looked(*arguments, **options)

        return opened


@pytest.mark.usefixtures("on_nfs")
def test_an_outcome_that_appears_late_is_found_by_the_last_check(
    flow: Flow, slurm: Slurm, clock: Clock
) -> None:
    flow.submit()
    assert claim_as(flow.attempt, "100")
    slurm.states["100"] = AttemptState.NODE_FAILED
    # Another supervisor checked before, and left its note and its lock.
    assert not flow.reconcile().attempts[0].state.is_terminal
    assert flow.attempt.missing.exists()
    flow.attempt.ending_lock.touch()
    completed(flow.attempt, clock)
    with pytest.MonkeyPatch.context() as patch:
        CachedUntilChanged(patch, clock, flow.attempt.outcome)
        clock.now += 9.0
        assert not flow.reconcile().attempts[0].state.is_terminal
        clock.now += CACHE_MARGIN_S + CACHE_S
        assert flow.reconcile().attempts[0].state is AttemptState.COMPLETED


@pytest.mark.usefixtures("on_nfs")
def test_a_visible_outcome_counts_at_once(flow: Flow, slurm: Slurm, clock: Clock) -> None:
    flow.submit()
    assert claim_as(flow.attempt, "100")
    completed(flow.attempt, clock)
    assert flow.reconcile().state is RunState.COMPLETED


# --- refusals ---------------------------------------------------------------------------------


def test_a_run_with_a_refused_submission_waits_and_shows_the_reason(
    flow: Flow, slurm: Slurm, clock: Clock
) -> None:
    slurm.refuses = "Slurm refused holdfast-r: QOSMaxSubmitJobPerUserLimit"
    with pytest.raises(SubmissionRefusedError):
        flow.submit()
    for _ in range(3):
        with pytest.raises(SubmissionRefusedError):
            flow.resume()
    history = load_history(flow.paths)
    assert history.state is RunState.WAITING
    assert history.attempts[0].waits_for == slurm.refuses
    journaled = [e for e in history.events if e.kind is EventKind.ATTEMPT_STATE]
    assert len(journaled) == 1
    slurm.refuses = ""
    flow.resume()
    history = load_history(flow.paths)
    assert (history.state, history.attempts[0].state) == ("queued", AttemptState.SUBMITTED)
    assert history.attempts[0].waits_for == ""
    assert len(slurm.states) == 1


def test_an_attempt_that_the_operator_ends_before_submission_is_closed(
    flow: Flow, slurm: Slurm, run: RunPaths
) -> None:
    flow.submit()
    assert claim_as(flow.attempt, "100")
    attempt = attempts.reserve(run, 2)
    assert attempt is not None
    assert attempts.has_no_job(attempt)
    with JournalWriter(run.journal_of("flow")) as journal:
        for one, ends in ((attempt, True), (flow.paths.attempt(1), False)):
            state, cause = AttemptState.CANCELLED, Cause.OPERATOR
            done = attempts.end_unsubmitted(one, journal, state=state, cause=cause, evidence="x")
            assert done is ends
    closed = read_document(Claim, attempt.claim)
    assert closed is not None
    assert closed.is_closed
