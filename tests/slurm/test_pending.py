"""Jobs that Slurm keeps pending for longer than `supervision.pending_timeout_min` allows."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.disk.journal import PENDING_TIMEOUT, EventKind
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import operator
from holdfast.workers.runs.tending import take_back_overdue
from holdfast.workers.schedulers import executor_for

HELD = {"executor": "slurm", "gpus_per_node": 2, "partition": "spot", "extra": {"hold": True}}
A_MOMENT = {"pending_timeout_min": 0.01, "poll_s": 0.2}


def _run(folder: Path, **settings: Any) -> LocalRun:
    return LocalRun(folder / "root", resources=HELD, supervision=A_MOMENT, steps=5, **settings)


@pytest.mark.slow
def test_an_overdue_job_is_taken_back_for_a_smaller_one_and_then_the_run_pauses(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    run = _run(tmp_path, elastic={"choices": [1]})

    def submit(paths: RunPaths, *, gpus: int, **_: object) -> AttemptPaths:
        return run.submit(gpus)

    run.submit(2)
    with Index() as index:
        log = logging.getLogger("holdfast.test")
        supervisor = Supervisor(paths=run.paths, index=index, log=log, submit=submit)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        try:
            paused = wait_until(lambda: run.history().state is RunState.PAUSED, "the pause")
            assert paused
            first, second = run.history().attempts
            decision = wait_until(lambda: run.history().last_decision, "the decision")
        finally:
            operator.request(run.paths, "cancel", by="tester")
            thread.join(60)
            run.end_all()
    assert not thread.is_alive()
    assert (first.world_size, second.world_size) == (2, 1)
    for attempt in (first, second):
        assert (attempt.state, attempt.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
        assert attempt.started_at is None
    assert decision["action"] == "wait"
    assert f"paused by {PENDING_TIMEOUT}: job {second.job_id} of attempt 2" in decision["reason"]
    assert "last because of JobHeldUser" in decision["reason"]
    asked = [(e.data["action"], e.data["gpus"]) for e in run.events(EventKind.OPERATOR_REQUEST)]
    assert asked == [("relaunch", 1), ("pause", None), ("cancel", None)]


@pytest.mark.slow
@pytest.mark.parametrize("starts_first", [True, False])
def test_a_job_that_starts_while_it_is_taken_back_runs_or_ends_and_never_both(
    slurm: SlurmCluster, tmp_path: Path, starts_first: bool
) -> None:
    """The job has started when it is looked at, or starts at that moment."""
    run = _run(tmp_path, elastic={"choices": [2]})
    run.submit()
    pending = wait_until(lambda: _pending(run), "a pending job")
    job = pending.last_attempt.job_id
    slurm.run("scontrol", "release", job)
    if starts_first:
        wait_until(lambda: _state(slurm, job) == "RUNNING", "the job's start")
    message = take_back_overdue(pending, now=time.time() + 60, writer="flow")
    assert not (starts_first and message)
    view = run.wait_for_end()
    taken, completed = (AttemptState.CANCELLED, Cause.OPERATOR), (AttemptState.COMPLETED, None)
    assert (view.state, view.cause) == (taken if message else completed), message
    assert run.history().state is (RunState.PAUSED if message else RunState.COMPLETED)
    assert len(run.history().attempts) == 1
    request = view.request
    assert request is not None
    wait_until(lambda: not executor_for("slurm").live_jobs(request), "its end")


def _pending(run: LocalRun) -> Any:
    history = run.history()
    last = history.last_attempt
    return history if last is not None and last.state is AttemptState.PENDING else None


def _state(slurm: SlurmCluster, job: str | None) -> str:
    return slurm.run("squeue", "-h", "-t", "all", "-j", job or "", "-o", "%T").strip()
