"""Restarts by Slurm: what becomes of one, who may train in it, and which start of a job it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import record_of, spec_of

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import SchedulerUnavailableError
from holdfast.contracts.records.documents import Request, Submission, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers import schedulers
from holdfast.workers.agent.restart import find_attempt
from holdfast.workers.agent.stops.signals import judge
from holdfast.workers.decisions.policy import Decision
from holdfast.workers.decisions.restarts import ENDS_S_MAX, plan_restart
from holdfast.workers.runs import attempts, restarts, run_folders, successors
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers import Executor, JobStatus, slurm_client, slurm_restarts
from holdfast.workers.schedulers.base import JobStart
from holdfast.workers.schedulers.slurm import SlurmExecutor
from holdfast.workers.schedulers.slurm_client import JobLine

ON_SLURM = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, "standby": "expedite"}
PENDING, RUNNING = AttemptState.PENDING, AttemptState.RUNNING


def start(restarts: int, state: AttemptState, raw: str, **facts: Any) -> JobStart:
    return JobStart(restarts=restarts, state=state, raw=raw, **facts)


FIRST = start(0, RUNNING, "RUNNING", nodes=("n1", "n2"))
ENDING = start(1, AttemptState.STOPPING, "COMPLETING", is_ending=True)
EXPEDITED = start(1, PENDING, "EXPEDITING")
HELD = start(1, PENDING, "REQUEUE_HOLD", is_held=True)
QUEUED = start(1, PENDING, "PENDING")
AGAIN = start(1, RUNNING, "RUNNING", nodes=("n1", "n3"))
OVER = start(0, AttemptState.COMPLETED, "COMPLETED")


@pytest.mark.parametrize(
    ("found", "given", "action"),
    [
        (None, {}, "gone"),
        (OVER, {}, "gone"),
        (FIRST, {}, "wait"),
        (FIRST, {"waited_s": ENDS_S_MAX + 1}, "withdraw"),
        (ENDING, {}, "wait"),
        (EXPEDITED, {}, "wait"),
        # As long as it comes before all other jobs, nothing else could start sooner.
        (EXPEDITED, {"waited_s": 1e6}, "wait"),
        (EXPEDITED, {"differ": ["nodes"]}, "withdraw"),
        # But the run may continue sooner on fewer nodes, or elsewhere.
        (EXPEDITED, {"has_choice": True}, "wait"),
        (EXPEDITED, {"has_choice": True, "waited_s": ENDS_S_MAX + 1}, "withdraw"),
        (HELD, {}, "withdraw"),
        (QUEUED, {}, "withdraw"),
        (AGAIN, {}, "adopt"),
        (AGAIN, {"exclude": ("n2",)}, "adopt"),
        (AGAIN, {"exclude": ("n3",)}, "withdraw"),
        (AGAIN, {"differ": ["partition"]}, "withdraw"),
        # An attempt that ran in the second start is not continued by it.
        (AGAIN, {"restarts": 1}, "wait"),
    ],
)
def test_what_becomes_of_a_restart(
    found: JobStart | None, given: dict[str, Any], action: str
) -> None:
    facts: dict[str, Any] = {"restarts": 0, "differ": [], "exclude": (), "waited_s": 1.0}
    facts = {"has_choice": False, **facts, **given}
    assert plan_restart(found, **facts).action == action


@pytest.mark.parametrize(
    ("version", "parameters", "problem"),
    [
        ("26.05.5", "enable_expedited_requeue", ""),
        ("25.11.0", "enable_configless,enable_expedited_requeue", ""),
        ("26.05.5", "", "does not allow expedited requeue"),
        ("25.05.3", "enable_expedited_requeue", "25.11 added it"),
        ("22.05.8", "", "Slurm 22.05.8 has no expedited requeue"),
        ("", "", "unknown version"),
    ],
)
def test_the_version_and_the_site_allow_it(version: str, parameters: str, problem: str) -> None:
    settings = {"SLURM_VERSION": version, "SlurmctldParameters": parameters}
    found = slurm_restarts.problem_with_cluster(settings)
    assert problem in found
    assert bool(found) is bool(problem)


def test_only_an_allowed_job_is_requeued_and_ended_by_a_lost_node() -> None:
    spec = spec_of(resources=ON_SLURM)
    made = [
        build_request(record_of(spec), spec, attempt=1, gpus=8, reason="x", expedite=allowed)
        for allowed in (False, True)
    ]
    plain, expedited = (one.scheduler["additional_parameters"] for one in made)
    assert (plain["no-requeue"], plain["no-kill"]) == (True, True)
    assert expedited["requeue"] == "expedite"
    assert {"no-requeue", "no-kill"}.isdisjoint(expedited)


def line(state: str, restarts: int, nodes: str = "n[1-2]") -> JobLine:
    return JobLine("7", "job", state, nodes=nodes, fields={"Restarts": str(restarts)})


def test_the_starts_of_a_job_are_told_apart() -> None:
    recorded = [JobLine("7", "job", "NODE_FAIL", nodes="n[1-2]", ended_at=9.0), line("RUNNING", 1)]
    now = JobStatus(state=RUNNING, nodes=("n1", "n3"))
    ending = slurm_restarts.start_of(line("COMPLETING", 1))
    assert slurm_restarts.status_before(now, 0, ending, recorded).state is AttemptState.STOPPING
    again = slurm_restarts.start_of(line("RUNNING", 1))
    ended = slurm_restarts.status_before(now, 0, again, recorded)
    assert (ended.state, ended.raw, ended.ended_at) == (AttemptState.NODE_FAILED, "NODE_FAIL", 9.0)
    # Without accounting it has ended, too.
    unknown = slurm_restarts.status_before(now, 0, again, [])
    assert (unknown.state, unknown.raw) == (AttemptState.LOST, slurm_restarts.REQUEUED)


def test_slurm_is_asked_about_a_job_alone_only_once_it_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer about all jobs has the count, so no question is needed for each run."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    spec = spec_of(resources=ON_SLURM)
    request = build_request(
        record_of(spec), spec, attempt=1, gpus=8, reason="x", expedite=True, cluster=None
    )
    job = Submission(job_id="7", executor="slurm", submitted_at=1.0)
    began, name = "2026-03-01T10:00:00", request.job_name
    asked: list[str] = []
    restarted = 0

    def call(command: list[str], timeout_s: float = 0.0) -> str:
        asked.append(" ".join(command[:2]))
        if command[0] == "squeue":
            return f"7|RUNNING|None|n[1-2]|{began}|N/A|n1|{restarted}|{name}|\n8|odd\n"
        if command[0] == "sacct":
            times = f"{began}|{began}"
            return f"7|{name}|NODE_FAIL|{times}|n[1-2]|0:0\n7|{name}|RUNNING|{times}|n1|0:0\n"
        return f"JobId=7 JobName={name} JobState=RUNNING Restarts={restarted} NodeList=n[1-2]"

    monkeypatch.setattr(slurm_client, "call", call)
    executor = SlurmExecutor()
    found = executor.status(request, job)
    assert (found.state, found.nodes, found.is_leaderless) == (RUNNING, ("n1", "n2"), False)
    assert executor.status(request, job).state is RUNNING
    assert asked == ["squeue -h"]
    asked.clear()
    restarted = 1
    assert executor.status(request, job, since=time.time()).state is AttemptState.NODE_FAILED
    assert asked == ["squeue -h", "scontrol --all", "sacct -n"]


def test_a_signal_of_a_restart_is_no_cancellation() -> None:
    given: dict[str, Any] = {
        "on_slurm": True, "now": 100.0, "grace_s": 30.0, "end_at": None, "warning_s": 0.0
    }  # fmt: skip
    job = {"JobState": "COMPLETING", "Restarts": "1"}
    assert judge("SIGTERM", job=job, **given).cause is Cause.NODE_FAILURE
    assert judge("SIGTERM", job=job, restarts=1, **given).cause is Cause.OPERATOR
    preempted = {**job, "PreemptTime": "2026-11-27T20:30:51"}
    assert judge("SIGTERM", job=preempted, **given).cause is Cause.PREEMPTION


class Restarting(Executor):
    """A scheduler with one job, which it restarts."""

    kind = "slurm"
    absence_s = 300.0

    def __init__(self) -> None:
        self.jobs = 0
        self.start: JobStart | None = FIRST
        self.is_silent = False
        self.cancelled: list[int] = []

    def expedites(self) -> bool:
        return True

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        self.jobs += 1
        self.start = FIRST
        return Submission(job_id=str(100 + self.jobs), executor="slurm", submitted_at=1.0)

    def start_of(self, request: Request, submission: Submission) -> JobStart | None:
        if self.is_silent:
            raise SchedulerUnavailableError("silent")
        return self.start

    def end_restarts(self, request: Request, submission: Submission) -> bool:
        if self.is_silent:
            raise SchedulerUnavailableError("silent")
        self.cancelled.append(submission.restarts)
        return True

    def find(self, request: Request) -> Submission | None:
        return None

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        return JobStatus(state=RUNNING)

    def cancel(self, request: Request, submission: Submission) -> None:
        raise AssertionError("the job that runs an attempt is not cancelled")


class Flow:
    """A run whose first attempt has ended by a lost node."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slurm = Restarting()
        monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: self.slurm)
        self.spec = spec_of(resources=ON_SLURM, elastic={"choices": [4, 8]})
        self.paths = run_folders.attach_or_create(self.spec, root, created_by="ann")[0]
        self.submit(8)
        self.end(1)

    def submit(self, gpus: int) -> AttemptPaths:
        record = run_folders.read_record(self.paths)
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            return attempts.submit_attempt(
                self.paths, self.spec, record, gpus=gpus, reason="x", journal=journal
            )

    def end(self, number: int) -> None:
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            journal.append(
                EventKind.ATTEMPT_ENDED,
                attempt=number,
                state="node_failed",
                cause="node_failure",
                evidence=["n2: its agent is lost"],
                ended_at=time.time(),
                noticed_at=time.time(),
            )

    def prepare(self, gpus: int = 8, exclude: tuple[str, ...] = ()) -> str:
        decision = Decision(action="relaunch", reason="x", gpus=gpus, exclude=exclude)
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            history = load_history(self.paths)
            return restarts.prepare(history, decision, journal, time.time())

    def release(self) -> bool:
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            return restarts.release(load_history(self.paths), "the run is paused", journal)

    def first(self, number: int = 1) -> AttemptPaths:
        return self.paths.attempt(number)

    def verdict(self, number: int = 1) -> tuple[int, int]:
        one = restarts.read(self.first(number))
        assert one is not None
        assert one.verdict is not None
        return one.verdict.attempt, one.verdict.restarts

    def kinds(self) -> list[str]:
        return [event.kind for event in load_history(self.paths).events]


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    return Flow(tmp_path, monkeypatch)


def test_the_restart_becomes_the_next_attempt_once_it_runs(flow: Flow) -> None:
    assert "has not ended yet" in flow.prepare(exclude=("n2",))
    assert restarts.waiting_facts(flow.paths) is None
    flow.slurm.start = EXPEDITED
    assert "as soon as it has nodes" in flow.prepare(exclude=("n2",))
    waiting = restarts.waiting_facts(flow.paths)
    assert waiting is not None
    assert (waiting["job_id"], waiting["after_attempt"]) == ("101", 1)
    flow.slurm.start = AGAIN
    assert flow.prepare(exclude=("n2",)) == ""
    second = flow.submit(8)
    job = read_document(Submission, second.submission)
    request = read_document(Request, second.request)
    assert job is not None
    assert request is not None
    assert (job.job_id, job.restarts, flow.slurm.jobs) == ("101", 1, 1)
    assert (request.restart_of, request.job_name[-6:]) == (1, "-a0001")
    assert restarts.first_of(flow.paths, request) == flow.first()
    assert flow.verdict() == (2, 1)
    assert find_attempt(flow.first(), 1, is_lead=True) == second
    assert flow.kinds().count(EventKind.SUCCESSOR_SUBMITTED) == 1
    assert EventKind.SUCCESSOR_ADOPTED in flow.kinds()


def test_an_attempt_of_another_size_gets_a_job_of_its_own(flow: Flow) -> None:
    flow.slurm.start = AGAIN
    assert "nodes differ" in flow.prepare(gpus=4)
    assert flow.prepare(gpus=4) == ""
    second = flow.submit(4)
    job = read_document(Submission, second.submission)
    assert job is not None
    assert (job.job_id, job.restarts, flow.slurm.cancelled) == ("102", 0, [0])
    assert flow.verdict() == (0, 0)
    assert find_attempt(flow.first(), 1, is_lead=True) is None
    assert EventKind.SUCCESSOR_WITHDRAWN in flow.kinds()


@pytest.mark.parametrize("found", [HELD, QUEUED, OVER, None])
def test_a_restart_that_will_not_run_is_withdrawn(flow: Flow, found: JobStart | None) -> None:
    flow.slurm.start = found
    assert flow.prepare().startswith("job 101: ")
    assert flow.prepare() == ""
    flow.submit(8)
    assert flow.slurm.jobs == 2
    assert flow.verdict() == (0, 0)


def test_a_restart_of_a_run_that_ended_is_cancelled_once(flow: Flow) -> None:
    flow.slurm.start = AGAIN
    assert flow.release()
    assert flow.release()
    assert flow.slurm.cancelled == [0]
    assert find_attempt(flow.first(), 1, is_lead=True) is None


def test_a_job_that_gave_up_is_replaced(flow: Flow) -> None:
    flow.slurm.start = AGAIN
    assert flow.prepare() == ""
    successors.decide_on(flow.first(), 0, "no supervisor took it")
    second = flow.submit(8)
    job = read_document(Submission, second.submission)
    assert job is not None
    assert job.job_id == "102"
    request = read_document(Request, second.request)
    assert request is not None
    assert (request.restart_of, request.job_name[-6:]) == (0, "-a0002")


def test_a_silent_scheduler_decides_nothing(flow: Flow) -> None:
    flow.slurm.is_silent = True
    with pytest.raises(SchedulerUnavailableError):
        flow.prepare()
    with pytest.raises(SchedulerUnavailableError):
        flow.release()
    # The verdict is first, so a restart cannot train whatever Slurm does.
    assert flow.verdict() == (0, 0)
    flow.slurm.is_silent = False
    assert flow.release()


def test_each_start_runs_the_attempt_that_names_it(flow: Flow) -> None:
    """A start that no verdict names ends, and a second restart follows both verdicts."""
    flow.slurm.start = AGAIN
    assert flow.prepare() == ""
    second = flow.submit(8)
    flow.end(2)
    flow.slurm.start = start(3, RUNNING, "RUNNING", nodes=("n1", "n4"))
    assert flow.prepare() == ""
    third = flow.submit(8)
    assert flow.verdict(2) == (3, 3)
    found = [find_attempt(flow.first(), number, is_lead=True) for number in range(4)]
    assert found == [flow.first(), second, None, third]
    request = read_document(Request, third.request)
    assert request is not None
    assert restarts.first_of(flow.paths, request) == flow.first()
