"""Orders of a run: their sequence, who counts before whom, and what becomes of each.

Real folders, journals and locks, and a played scheduler. No process is started.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import Call
from tests.support.histories import NOW, attempt_of, history_of, spec_of

from holdfast.contracts.disk.journal import GROWER, EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import (
    OrdersChangedError,
    RequestConflictError,
    SchedulerError,
    SchedulerUnavailableError,
    SpecError,
)
from holdfast.contracts.records.documents import Request, StopFile, Submission, read_document
from holdfast.contracts.records.history import load_history, pinned_checkpoints
from holdfast.contracts.records.orders import OrderState, open_orders, orders_of
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers import schedulers
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator
from holdfast.workers.runs.attempts import end_unsubmitted
from holdfast.workers.runs.run_folders import create_run
from holdfast.workers.schedulers.base import Executor, JobStatus

SLURM = {"executor": "slurm", "gpus_per_node": 4}
LOG = logging.getLogger("holdfast.test")
OTHER_S = 40.0
WAIT_S = 60.0


class Cluster(Executor):
    """A scheduler whose jobs wait in the queue. `at` is called inside a call of that name."""

    kind, absence_s = "slurm", 300.0

    def __init__(self) -> None:
        self.queued: dict[str, Submission] = {}
        self.is_silent = False
        self.submissions = 0
        self.at: dict[str, Callable[[], object]] = {}

    def _ask(self, name: str) -> None:
        self.at.pop(name, lambda: None)()
        if self.is_silent:
            raise SchedulerUnavailableError("slurmctld does not respond")

    def cluster(self) -> str | None:
        self._ask("cluster")
        return "site"

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        self._ask("submit")
        self.submissions += 1
        job = Submission(job_id=str(self.submissions), executor="slurm", submitted_at=time.time())
        self.queued[request.job_name] = job
        return job

    def find(self, request: Request) -> Submission | None:
        self._ask("find")
        return self.queued.get(request.job_name)

    def is_pending(self, request: Request, submission: Submission) -> bool:
        self._ask("is_pending")
        return request.job_name in self.queued

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        self._ask("status")
        if request.job_name in self.queued:
            return JobStatus(state=AttemptState.PENDING, raw="PENDING")
        return JobStatus(state=AttemptState.CANCELLED, raw="CANCELLED")

    def cancel(self, request: Request, submission: Submission) -> None:
        self._ask("cancel")
        self.queued.pop(request.job_name, None)

    def room(self, resources: Any, held: Any = None, *, is_urgent: bool = True) -> None:
        self._ask("room")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    one = Cluster()
    monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: one)
    return one


@pytest.fixture
def index(home: Path) -> Iterator[Index]:
    with Index() as one:
        yield one


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(spec_of(resources=SLURM), tmp_path, created_by="ann")


def submit(paths: RunPaths) -> AttemptPaths:
    seen = load_history(paths).newest_order
    return submit_next(paths, gpus=4, reason="x", exclude=(), seen=seen)


def end(attempt: AttemptPaths, paths: RunPaths, cause: Cause = Cause.INFRASTRUCTURE) -> None:
    with JournalWriter(paths.journal_of("flow")) as journal:
        end_unsubmitted(attempt, journal, state=AttemptState.FAILED, cause=cause, evidence="x")


class Turns:
    """A supervisor that acts when the test says so."""

    def __init__(self, paths: RunPaths, index: Index) -> None:
        self.supervisor = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next)
        self.supervisor.is_acting = True
        self.paths = paths

    def act(self) -> float | None:
        from holdfast.workers.runs.reconcile import reconcile

        with JournalWriter(self.paths.journal_of("flow")) as journal:
            return self.supervisor._act(reconcile(self.paths), journal)

    def act_to_the_end(self) -> None:
        """Act until the run has ended. The outcome of a job that ended may be late for seconds."""
        ends_at = time.monotonic() + WAIT_S
        while self.act() is not None:
            assert time.monotonic() < ends_at, "the run has not ended"
            time.sleep(0.05)


def ahead(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    real = time.time
    monkeypatch.setattr("holdfast.contracts.disk.journal.time.time", lambda: real() + by_s)


# --- The sequence -------------------------------------------------------------------------------


@pytest.mark.parametrize("by_s", [OTHER_S, 3600.0, -3600.0])
def test_no_clock_orders_the_requests(
    paths: RunPaths, by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ahead(patch, by_s)
        operator.request(paths, "pause", by="ann")
    assert "continues" in operator.request(paths, "resume", by="bob")
    history = load_history(paths)
    assert history.state is RunState.WAITING
    assert history.pending_request is not None
    assert history.pending_request["action"] == "resume"
    assert [order.number for order in orders_of(history)] == [1, 2]


def test_no_clock_orders_the_pins(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_orders(paths) as book, monkeypatch.context() as patch:
        ahead(patch, OTHER_S)
        book.give(EventKind.UNPINNED, checkpoint="step-00000010.a0001.l01", by="ann")
    with open_orders(paths) as book:
        book.give(EventKind.PINNED, checkpoint="step-00000010.a0001.l01", by="ann")
    assert pinned_checkpoints(load_history(paths).events)


def test_requests_of_different_parts_are_one_sequence(paths: RunPaths) -> None:
    operator.request(paths, "pause", by="ann", writer="cli")
    operator.request(paths, "resume", by="bob", writer="api")
    operator.request(paths, "relaunch", by="prefect", writer="flow")
    orders = orders_of(load_history(paths))
    assert [(order.number, order.action, order.by) for order in orders] == [
        (1, "pause", "ann"),
        (2, "resume", "bob"),
        (3, "relaunch", "prefect"),
    ]
    assert [path.name for path in paths.list_journals()] == ["orders.jsonl"]


def test_a_request_that_was_decided_on_an_older_state_is_refused(paths: RunPaths) -> None:
    seen = load_history(paths).newest_order
    operator.request(paths, "pause", by="ann")
    with pytest.raises(OrdersChangedError, match="order 1 was given after"):
        operator.request(paths, "relaunch", by="bob", seen=seen)


# --- Orders and reservations --------------------------------------------------------------------


def test_a_cancel_between_the_look_and_the_reservation_counts(
    tmp_path: Path, cluster: Cluster, index: Index
) -> None:
    spec = spec_of(resources=SLURM, elastic={"choices": [2, 4]})
    paths = create_run(spec, tmp_path, created_by="ann")
    end(submit(paths), paths)
    cluster.at["room"] = lambda: operator.request(paths, "cancel", by="ann")
    turns = Turns(paths, index)
    turns.act()
    assert "room" not in cluster.at
    turns.act_to_the_end()
    history = load_history(paths)
    assert (history.state, len(history.attempts)) == (RunState.CANCELLED, 1)
    assert cluster.submissions == 1


def test_a_cancel_between_the_reservation_and_the_submission_counts(
    paths: RunPaths, cluster: Cluster, index: Index
) -> None:
    cluster.at["cluster"] = lambda: operator.request(paths, "cancel", by="ann")
    turns = Turns(paths, index)
    turns.act()
    turns.act()
    assert turns.act() is None
    history = load_history(paths)
    assert history.state is RunState.CANCELLED
    assert [a.cause for a in history.attempts] == [Cause.OPERATOR]
    assert cluster.submissions == 0


@pytest.mark.more
def test_a_cancel_during_the_submission_takes_the_job_back(
    paths: RunPaths, cluster: Cluster, index: Index
) -> None:
    cluster.at["submit"] = lambda: operator.request(paths, "cancel", by="ann")
    turns = Turns(paths, index)
    turns.act()
    assert cluster.queued
    turns.act()
    assert not cluster.queued
    turns.act_to_the_end()
    assert load_history(paths).state is RunState.CANCELLED


def test_a_relaunch_during_a_reservation_keeps_its_size(
    tmp_path: Path, cluster: Cluster, index: Index
) -> None:
    spec = spec_of(resources=SLURM, elastic={"choices": [2, 4]})
    paths = create_run(spec, tmp_path, created_by="ann")
    cluster.at["cluster"] = lambda: operator.request(paths, "relaunch", by="ann", gpus=2)
    turns = Turns(paths, index)
    for _ in range(4):
        turns.act()
    last = load_history(paths).last_attempt
    assert last is not None
    assert (last.gpus, last.state) == (2, AttemptState.PENDING)
    assert [order.state for order in orders_of(load_history(paths))] == [OrderState.DONE]


# --- A scheduler that does not answer -----------------------------------------------------------


@pytest.mark.more
def test_the_supervisor_repeats_what_the_scheduler_did_not_answer(
    paths: RunPaths, cluster: Cluster, index: Index
) -> None:
    submit(paths)
    cluster.is_silent = True
    message = operator.request(paths, "cancel", by="ann")
    assert "is pending, because the scheduler does not answer" in message
    assert "supervisor tries again" in message
    turns = Turns(paths, index)
    turns.act()
    (order,) = orders_of(load_history(paths))
    assert order.state is OrderState.PENDING
    assert "slurmctld does not respond" in order.detail
    cluster.is_silent = False
    turns.act()
    assert not cluster.queued
    turns.act_to_the_end()
    (order,) = orders_of(load_history(paths))
    assert (order.state, load_history(paths).state) == (OrderState.DONE, RunState.CANCELLED)


def test_a_refusal_of_the_scheduler_is_no_silence(
    paths: RunPaths, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(paths)

    def refuse(*_: object) -> None:
        raise SchedulerError("scancel: error: Access denied")

    monkeypatch.setattr(cluster, "withdraw", refuse)
    message = operator.request(paths, "cancel", by="ann")
    assert "because the scheduler refuses it: scancel: error: Access denied" in message


def test_a_newer_order_withdraws_one_that_is_not_done(paths: RunPaths, cluster: Cluster) -> None:
    attempt = submit(paths)
    cluster.is_silent = True
    operator.request(paths, "pause", by="ann")
    operator.request(paths, "resume", by="ann")
    first, second = orders_of(load_history(paths))
    assert (first.state, first.detail) == (OrderState.OVERTAKEN, "by order 2")
    assert second.state is OrderState.PENDING
    end(attempt, paths)
    assert load_history(paths).state is RunState.WAITING


def test_the_stop_file_is_that_of_the_newest_order(
    paths: RunPaths, cluster: Cluster, index: Index
) -> None:
    attempt = submit(paths)
    cluster.is_silent = True
    operator.request(paths, "pause", by="ann")
    operator.request(paths, "cancel", by="bob", now=True)
    attempt.stop.unlink()  # The command was killed between its order and the file.
    with pytest.raises(SchedulerUnavailableError):
        operator.carry_out(load_history(paths))
    stop = read_document(StopFile, attempt.stop)
    assert stop is not None
    assert (stop.action, stop.by, stop.order, stop.deadline_s) == ("cancel", "bob", 2, 0.0)


# --- People and Holdfast ------------------------------------------------------------------------


def test_holdfasts_own_requests_do_not_replace_a_persons(paths: RunPaths, cluster: Cluster) -> None:
    submit(paths)
    cluster.is_silent = True
    operator.request(paths, "cancel", by="ann")
    with pytest.raises(RequestConflictError, match="ann asked to cancel it"):
        operator.request(paths, "relaunch", by=GROWER, gpus=4)
    assert load_history(paths).newest_order == 1


def test_a_person_counts_before_holdfast_whoever_wrote_last() -> None:
    spec = spec_of()
    ended = attempt_of(spec, 1, Cause.OPERATOR)
    base = history_of(spec, ended, asked={"action": "cancel", "by": "ann"})
    own = history_of(spec, ended, asked={"action": "relaunch", "by": GROWER})
    merged = vars(base) | {"events": (*base.events, *own.events)}
    assert type(base)(**merged).state is RunState.CANCELLED


def test_holdfasts_own_request_ends_with_the_attempt_that_it_ends() -> None:
    spec = spec_of()
    asked = {"action": "relaunch", "by": GROWER}
    failed = history_of(spec, attempt_of(spec, 1, Cause.USER_ERROR), asked=asked)
    stopped = history_of(spec, attempt_of(spec, 1, Cause.OPERATOR), asked=asked)
    assert failed.pending_request is None
    assert stopped.pending_request == {"after_attempt": 1, **asked}


def test_holdfast_requests_nothing_of_a_run_whose_attempt_has_ended(
    paths: RunPaths, cluster: Cluster
) -> None:
    end(submit(paths), paths, Cause.USER_ERROR)
    with pytest.raises(OrdersChangedError, match="its attempt has ended"):
        operator.request(paths, "relaunch", by=GROWER, gpus=4)


def test_the_age_of_a_pending_request_is_bounded(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ahead(patch, 30 * 24 * 3600.0)
        operator.request(paths, "relaunch", by="ann")
    operator.request(paths, "pause", by="bob", alone=True)
    operator.request(paths, "relaunch", by="bob")
    with pytest.raises(SpecError, match="not paused"):
        operator.request(paths, "resume", by="bob")


# --- States -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "cause", "expected"),
    [
        (AttemptState.RUNNING, None, OrderState.PENDING),
        (AttemptState.STOPPING, None, OrderState.TAKEN),
        (AttemptState.CANCELLED, Cause.OPERATOR, OrderState.DONE),
        (AttemptState.COMPLETED, None, OrderState.FAILED),
    ],
)
def test_the_state_of_a_pause_follows_from_its_attempt(
    state: AttemptState, cause: Cause | None, expected: OrderState
) -> None:
    spec = spec_of()
    history = history_of(spec, attempt_of(spec, 1, cause, state=state), asked={"action": "pause"})
    (order,) = orders_of(history)
    assert order.state is expected


def test_the_state_of_a_relaunch_follows_from_the_next_attempt() -> None:
    spec = spec_of()
    asked = {"action": "relaunch", "gpus": 4, "after_attempt": 1}
    first = attempt_of(spec, 1, Cause.USER_ERROR)
    (pending,) = orders_of(history_of(spec, first, asked=asked))
    second = attempt_of(spec, 2, None, state=AttemptState.RUNNING)
    (done,) = orders_of(history_of(spec, first, second, asked=asked))
    assert (pending.state, done.state) == (OrderState.PENDING, OrderState.DONE)
    assert pending.text == "relaunch at 4 GPUs by ann"


def test_show_lists_the_orders(paths: RunPaths, cluster: Cluster, call: Call) -> None:
    submit(paths)
    cluster.is_silent = True
    operator.request(paths, "relaunch", by="ann", gpus=4)
    operator.request(paths, "cancel", by="bob")
    shown = json.loads(call("show", paths.directory, "--json").out)
    first, second = shown["orders"]
    assert (first["number"], first["state"]) == (1, "overtaken")
    assert (second["action"], second["by"], second["state"]) == ("cancel", "bob", "pending")
    printed = call("show", paths.directory).out
    assert "relaunch at 4 GPUs" in printed
    assert "by order 2" in printed


@pytest.mark.parametrize(("started_at", "gpus"), [(None, 2), (1.0, 8)])
def test_a_size_that_a_person_asked_for_counts_until_an_attempt_has_started(
    started_at: float | None, gpus: int
) -> None:
    spec = spec_of(resources=SLURM, elastic={"min_gpus": 2, "max_gpus": 8})
    asked = {"action": "relaunch", "gpus": 2, "after_attempt": 1}
    first = attempt_of(spec, 1, Cause.USER_ERROR, gpus=8)
    lost = attempt_of(spec, 2, Cause.INFRASTRUCTURE, gpus=2, started_at=started_at)
    decision = decide(history_of(spec, first, lost, asked=asked), 8, now=NOW)
    assert (decision.action, decision.gpus) == ("relaunch", gpus)
