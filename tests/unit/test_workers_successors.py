"""Successors: the job that waits, what becomes of it, and what its agent does until then."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.histories import attempt_of, history_of, record_of, spec_of
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, SuccessorPaths, folder_of
from holdfast.contracts.errors import SchedulerUnavailableError, SubmissionRefusedError
from holdfast.contracts.records.documents import Request, Submission, SubmissionTry, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers import schedulers
from holdfast.workers.agent import successor
from holdfast.workers.decisions.policy import Decision
from holdfast.workers.runs import attempts, run_folders, successors
from holdfast.workers.runs.request import as_successor, build_request, differences, run_by
from holdfast.workers.schedulers import Executor, JobStatus
from holdfast.workers.schedulers.local import LocalExecutor

ON_SLURM = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, "standby": "successor"}


def request_of(gpus: int = 8, **fields: Any) -> Request:
    spec = spec_of(resources={**ON_SLURM, **fields}, elastic={"choices": [4, 8]})
    return build_request(record_of(spec), spec, attempt=2, gpus=gpus, reason="test")


def test_a_successor_starts_after_the_job_and_has_a_name_of_its_own() -> None:
    one = as_successor(request_of(extra={"dependency": "afterok:7"}), 3, "101")
    options = one.scheduler["additional_parameters"]
    assert options["dependency"] == "afterany:101"
    assert options["no-requeue"] is True
    assert one.job_name == one.scheduler["job_name"] == f"holdfast-r-{'u' * 8}-s0003"
    assert run_by(one, 0).job_name == f"holdfast-r-{'u' * 8}-a0002"


def test_only_the_excluded_nodes_may_differ_from_the_job_of_the_attempt() -> None:
    one = as_successor(request_of(), 3, "101")
    assert differences(one, request_of()) == []
    excluding = request_of().model_copy(
        update={"exclude": ("n1",), "scheduler": {**request_of().scheduler, "exclude": "n1"}}
    )
    assert differences(one, excluding) == []
    assert differences(one, request_of(gpus=4)) == ["nodes"]
    assert differences(one, request_of(partition="big")) == ["partition"]
    assert differences(one, request_of(extra={"reservation": "x"})) == ["option reservation"]


def test_a_request_on_disk_differs_in_nothing() -> None:
    one = as_successor(request_of(), 3, "101")
    assert differences(Request.model_validate_json(one.model_dump_json()), request_of()) == []


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, "r", "u" * 32)
    made.submit(1, 2, 1_000.0)
    made.claim(1, 1_001.0)
    return made


@pytest.fixture
def waiting(run: RunFolder) -> SuccessorPaths:
    paths = run.paths.successor(1)
    paths.directory.mkdir(parents=True)
    return paths


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the agent has slept, by its own clock."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    played = SimpleNamespace(monotonic=lambda: slept[0], sleep=sleep)
    monkeypatch.setattr(successor, "time", played)
    return slept


def test_documents_of_a_successor_are_read_below_the_run(waiting: SuccessorPaths) -> None:
    assert folder_of(waiting.request) == waiting.run.directory
    assert waiting.run.newest_successor() == waiting
    assert RunPaths(waiting.run.directory / "x").newest_successor() is None


def test_one_verdict_counts(waiting: SuccessorPaths) -> None:
    assert successors.decide_on(waiting, 2).attempt == 2
    assert successors.decide_on(waiting, 0, "too late").attempt == 2
    assert successors.attempt_of(waiting.run, 1) == 2


@pytest.mark.parametrize("is_lead", [True, False])
def test_a_job_runs_the_attempt_that_the_supervisor_names(
    waiting: SuccessorPaths, clock: list[float], is_lead: bool
) -> None:
    successors.decide_on(waiting, 2)
    assert successor.wait_for_verdict(waiting, is_lead=is_lead) == 2
    assert clock == [0.0]


def test_a_job_without_a_supervisor_ends_and_cannot_be_adopted(
    waiting: SuccessorPaths, clock: list[float]
) -> None:
    assert successor.wait_for_verdict(waiting, is_lead=True) == 0
    assert clock[0] == pytest.approx(successors.WAIT_S_MAX, abs=2)
    assert successors.decide_on(waiting, 2).attempt == 0


def test_another_node_waits_longer_than_node_0_and_decides_nothing(
    waiting: SuccessorPaths, clock: list[float]
) -> None:
    assert successor.wait_for_verdict(waiting, is_lead=False) == 0
    assert clock[0] > successors.WAIT_S_MAX + 30
    assert successors.attempt_of(waiting.run, 1) is None


@pytest.mark.parametrize("state", [AttemptState.COMPLETED, AttemptState.CANCELLED])
def test_a_job_ends_at_once_if_the_run_has_ended(
    run: RunFolder, waiting: SuccessorPaths, clock: list[float], state: AttemptState
) -> None:
    cause = Cause.OPERATOR if state is AttemptState.CANCELLED else None
    run.finish(1, state, cause, 10, 2_000.0)
    assert successor.wait_for_verdict(waiting, is_lead=True) == 0
    assert clock == [0.0]


class Free:
    """The room at a place, of which only the free GPUs matter."""

    def __init__(self, gpus: int | None) -> None:
        self.gpus = gpus

    def free_gpus(self, exclude: object) -> int | None:
        return self.gpus


@pytest.mark.parametrize(
    ("free", "given", "chosen"),
    [(2, {}, 8), (4, {}, 4), (None, {}, 4), (2, {"asked": {"action": "resume"}}, 4)],
)
def test_a_successor_counts_if_the_size_of_the_policy_is_not_free(
    monkeypatch: pytest.MonkeyPatch, free: int | None, given: dict[str, Any], chosen: int
) -> None:
    spec = spec_of(resources=ON_SLURM, elastic={"choices": [4, 8]})
    history = history_of(spec, attempt_of(spec, 1, Cause.PREEMPTION), **given)
    one = SimpleNamespace(is_waiting=True, request=request_of(), submission="job")
    monkeypatch.setattr(successors, "newest", lambda _: one)
    decision = Decision(action="relaunch", reason="x", gpus=4)
    room: Any = Free(free)
    found = successors.prefer(history, decision, lambda _: room, lambda _: True)
    assert found.gpus == chosen
    assert ("for which a successor waits" in found.reason) == (chosen == 8)


def test_the_local_executor_has_no_queue(waiting: SuccessorPaths) -> None:
    with pytest.raises(SubmissionRefusedError, match="has no queue"):
        LocalExecutor().submit_successor(waiting, request_of())


class Queue(Executor):
    """A scheduler that keeps jobs by name, and starts none."""

    kind = "slurm"
    absence_s = 300.0

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, AttemptState]] = {}
        self.is_silent = False
        self.free: list[str] = []

    def drop_dependency(self, request: Request, submission: Submission) -> bool:
        self.free.append(submission.job_id)
        return True

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        job = str(101 + len(self.jobs))
        self.jobs[request.job_name] = job, AttemptState.PENDING
        return Submission(job_id=job, executor="slurm", submitted_at=1.0)

    def submit_successor(self, paths: SuccessorPaths, request: Request) -> Submission:
        return self.submit(paths, request)

    def find(self, request: Request) -> Submission | None:
        job, _ = self.jobs.get(request.job_name, ("", None))
        return Submission(job_id=job, executor="slurm", submitted_at=1.0) if job else None

    def live_jobs(self, request: Request) -> tuple[Submission, ...]:
        found = self.find(request)
        is_live = found is not None and not self.jobs[request.job_name][1].is_terminal
        return (found,) if found is not None and is_live else ()

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        if self.is_silent:
            raise SchedulerUnavailableError("silent")
        return JobStatus(state=self.jobs[request.job_name][1])

    def cancel(self, request: Request, submission: Submission) -> None:
        self.jobs[request.job_name] = submission.job_id, AttemptState.CANCELLED


class Flow:
    """A run on the queue, whose first attempt has ended and whose successor waits."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue = Queue()
        monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: self.queue)
        self.spec = spec_of(resources=ON_SLURM, elastic={"choices": [4, 8]})
        self.paths = run_folders.attach_or_create(self.spec, root, created_by="ann")[0]
        self.submit(8)
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            journal.append(EventKind.ATTEMPT_STATE, attempt=1, state="running")
            said = successors.tend(load_history(self.paths), journal, now=time.time())
        assert said == "job 102 waits in the queue as the successor of attempt 1"

    def submit(self, gpus: int) -> AttemptPaths:
        record = run_folders.read_record(self.paths)
        with JournalWriter(self.paths.journal_of("flow")) as journal:
            return attempts.submit_attempt(
                self.paths, self.spec, record, gpus=gpus, reason="x", journal=journal
            )

    def request(self, number: int) -> Request:
        found = read_document(Request, self.paths.attempt(number).request)
        assert found is not None
        return found

    @property
    def job(self) -> str | None:
        return load_history(self.paths).attempts[-1].job_id


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    return Flow(tmp_path, monkeypatch)


def test_the_next_attempt_of_the_same_size_takes_the_waiting_job(flow: Flow) -> None:
    flow.submit(8)
    assert (flow.job, len(flow.queue.jobs)) == ("102", 2)
    assert flow.request(2).job_name.endswith("-s0001")
    assert successors.attempt_of(flow.paths, 1) == 2
    # It need not wait for what is left of the job before.
    assert flow.queue.free == ["102"]


def test_the_next_attempt_of_another_size_gets_a_job_of_its_own(flow: Flow) -> None:
    flow.submit(4)
    assert (flow.job, flow.request(2).successor) == ("103", 0)
    assert flow.queue.jobs[f"{flow.request(2).job_name[:-6]}-s0001"][1] is AttemptState.CANCELLED
    assert successors.attempt_of(flow.paths, 1) == 0


def test_a_job_that_gives_up_while_it_is_adopted_is_replaced(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of the attempt names it already."""
    adopt = successors.adopt

    def adopt_late(run: RunPaths, request: Request) -> Submission | None:
        successors.decide_on(run.successor(1), 0, "no supervisor took it")
        return adopt(run, request)

    monkeypatch.setattr(successors, "adopt", adopt_late)
    flow.submit(8)
    assert (flow.job, flow.request(2).successor) == ("103", 0)
    assert flow.request(2).job_name.endswith("-a0002")
    tried = read_document(SubmissionTry, flow.paths.attempt(2).submitting)
    assert tried is not None
    assert tried.count == 1


def test_a_silent_scheduler_reserves_no_attempt(flow: Flow) -> None:
    flow.queue.is_silent = True
    with pytest.raises(SchedulerUnavailableError):
        flow.submit(8)
    assert flow.paths.attempt_numbers() == [1]
    assert successors.attempt_of(flow.paths, 1) is None
    flow.queue.is_silent = False
    flow.submit(8)
    assert flow.job == "102"


def test_a_successor_is_withdrawn_once(flow: Flow) -> None:
    with JournalWriter(flow.paths.journal_of("flow")) as journal:
        history = load_history(flow.paths)
        assert successors.release(history, "the run is paused", journal)
        assert successors.release(history, "the run is paused", journal)
    kinds = [event.kind for event in load_history(flow.paths).events]
    assert kinds.count(EventKind.SUCCESSOR_WITHDRAWN) == 1
    assert successors.waiting_facts(flow.paths) is None


def test_a_successor_that_starts_although_the_run_has_ended_does_not_train(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is written before the scheduler is asked, so it holds if that is too slow."""

    def cancel(request: Request, submission: Submission) -> None:
        raise SchedulerUnavailableError("silent")

    with JournalWriter(flow.paths.journal_of("flow")) as journal:
        history = load_history(flow.paths)
        with monkeypatch.context() as patch:
            patch.setattr(flow.queue, "cancel", cancel)
            with pytest.raises(SchedulerUnavailableError):
                successors.release(history, "the run is completed", journal)
        assert successor.wait_for_verdict(flow.paths.successor(1), is_lead=True) == 0
        # It stays in the run's account until it is gone.
        assert not successors.read(flow.paths.successor(1)).is_closed
        assert successors.release(history, "the run is completed", journal)
    assert successors.decide_on(flow.paths.successor(1), 2).attempt == 0


def test_a_successor_without_an_answer_is_found_by_its_name(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow controller queues it later. It is not submitted again."""
    submit = flow.queue.submit_successor

    def submit_unheard(paths: SuccessorPaths, request: Request) -> Submission:
        submit(paths, request)
        raise SchedulerUnavailableError("Socket timed out")

    def tend() -> str:
        with JournalWriter(flow.paths.journal_of("flow")) as journal:
            return successors.tend(load_history(flow.paths), journal, now=time.time())

    flow.submit(4)
    with JournalWriter(flow.paths.journal_of("flow")) as journal:
        journal.append(EventKind.ATTEMPT_STATE, attempt=2, state="running")
    monkeypatch.setattr(flow.queue, "submit_successor", submit_unheard)
    with pytest.raises(SchedulerUnavailableError):
        tend()
    assert tend() == "job 104 waits in the queue as the successor of attempt 2"
    assert tend() == ""
    assert len(flow.queue.jobs) == 4
