"""The agent on this machine: real jobs, real torchrun, real signals."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.local_runs import LocalRun, processes_of, send, wait_until
from tests.support.agent_ranks import ranks_of, waiting_ranks

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import newest_committed
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.documents import StopFile, write_document
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator

# A program with this sleep must be ended long before it is over.
SLEEP_S = 400.0
GRACE_S = 40.0
Make = Callable[..., LocalRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Creates runs, and ends their processes afterwards."""
    made: list[LocalRun] = []

    def make_run(**settings: Any) -> LocalRun:
        made.append(LocalRun(tmp_path / f"root{len(made)}", **settings))
        return made[-1]

    yield make_run
    for run in made:
        run.end_all()


@pytest.mark.more
def test_job_completes_and_leaves_no_process(make: Make) -> None:
    run = make(steps=30)
    attempt = run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.COMPLETED, None)
    assert (view.first_step, view.last_step) == (1, 30)
    assert view.facts["committed_step"] == 30
    assert view.request is not None
    assert view.facts["command_digest"] == view.request.command_digest
    assert {rank.rank for beat in run.beats(attempt) for rank in beat.ranks} == {0, 1}
    log = attempt.rank_log(0, 1, 1)
    assert "rank 1 ends after step 30" in log.read_text()
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_preempted_job_loses_no_step_and_the_next_attempt_continues(make: Make) -> None:
    run = make(steps=4000, sleep_s=0.05, grace_s=GRACE_S)
    attempt = run.submit()
    run.wait_for_step(attempt, 5)
    send(run.claim(attempt).pid, signal.SIGTERM)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    outcome = run.outcome(attempt)
    assert outcome.last_step == outcome.committed_step
    assert outcome.stop_requested_at is not None
    assert outcome.stop_committed_at is not None
    assert outcome.stop_committed_at - outcome.stop_requested_at < GRACE_S
    assert len(run.events(EventKind.STOP_AGREED)) == 1
    decision = decide(run.history(), None, now=time.time())
    assert (decision.action, decision.delay_s) == ("relaunch", 0.0)
    again = run.submit(gpus=1)
    run.wait_for_step(again, (outcome.last_step or 0) + 2)
    operator.request(run.paths, "stop", by="tester")
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert view.first_step == (outcome.last_step or 0) + 1
    assert decide(run.history(), None, now=time.time()).action == "stop"


@pytest.mark.slow
def test_killed_rank_is_restarted_in_the_same_job(make: Make) -> None:
    run = make(steps=100_000, sleep_s=0.05, supervision={"standby_after_s": 0})
    attempt = run.submit()
    run.wait_for_step(attempt, 5)
    standbys = wait_until(lambda: waiting_ranks(run), "ranks that wait")
    victim = next(rank.pid for beat in run.beats(attempt) for rank in beat.ranks if rank.rank == 1)
    send(victim, signal.SIGKILL)
    (second,) = ranks_of(run, attempt, 2).values()
    assert set(second) == standbys
    operator.request(run.paths, "cancel", by="tester")
    view = run.wait_for_end()
    outcome = run.outcome(attempt)
    assert [i.ending for i in outcome.launches] == ["crashed", "stopped"]
    assert outcome.committed_step == outcome.last_step == view.last_step
    resumed = run.events(EventKind.RESUMED)
    assert len({(e.data["command_digest"], tuple(e.data["argv"])) for e in resumed}) == 1
    wait_until(lambda: not processes_of(run.paths), "the end of every process", 60)
    logs = sorted(folder.name for folder in attempt.node_logs(0).glob("l*"))
    assert logs == ["l01", "l02"], "an unused warm standby must leave no logs"


@pytest.mark.slow
def test_killed_guard_leaves_no_ranks_and_training_restarts(make: Make) -> None:
    run = make(steps=60, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 5)
    first = {rank.pid for beat in run.beats(attempt) for rank in beat.ranks}
    agent = psutil.Process(run.claim(attempt).pid)
    guard = next(p for p in agent.children() if "holdfast.workers.agent.guard" in p.cmdline())
    send(guard.pid, signal.SIGKILL)
    wait_until(lambda: len(run.events(EventKind.LAUNCH_STARTED)) == 2, "another start")
    assert not first & {process.pid for process in processes_of(run.paths)}
    assert run.wait_for_end().state is AttemptState.COMPLETED


@pytest.mark.slow
def test_program_error_ends_the_job_with_its_traceback(make: Make) -> None:
    """test_flow_prefect.py tests a failing program with its flow by default."""
    run = make(steps=30, fail_at=7)
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
    assert "RuntimeError: a bad batch at step 7" in (view.traceback or "")
    assert decide(run.history(), None, now=time.time()).action == "stop"
    assert len(run.events(EventKind.LAUNCH_STARTED)) == 1


@pytest.mark.slow
def test_pause_commits_and_does_not_count_as_failure(make: Make) -> None:
    """test_flow_prefect.py tests pause and resume with a flow by default."""
    run = make(steps=400, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    operator.request(run.paths, "pause", by="tester")
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    newest = newest_committed(run.paths, 1)
    assert newest is not None
    assert newest.step == view.last_step
    assert run.history().state == "paused"
    operator.request(run.paths, "resume", by="tester")
    assert decide(run.history(), None, now=time.time()).action == "relaunch"


@pytest.mark.more
def test_program_without_a_session_is_killed_after_the_grace_period(make: Make) -> None:
    run = make(session=False, sleep_s=SLEEP_S, grace_s=4.0)
    attempt = run.submit()
    wait_until(lambda: _said_hello(run, attempt), "the program's first words")
    began = time.monotonic()
    send(run.claim(attempt).pid, signal.SIGTERM)
    view = run.wait_for_end()
    assert time.monotonic() - began < SLEEP_S / 2
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert any("killed" in line for line in view.evidence)
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_early_exit_is_a_failure_and_relaunch_continues(make: Make) -> None:
    run = make(steps=12, exit_at=9, gpus=1, checkpoint={"interval": 4}, sleep_s=0.05)
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
    (line,) = view.evidence
    assert "exit status 0 after step 8" in line
    assert "the program loops over 12 steps" in line
    assert decide(run.history(), None, now=time.time()).action == "stop"
    operator.request(run.paths, "relaunch", by="tester")
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.first_step, view.last_step) == (AttemptState.COMPLETED, 9, 12)
    assert view.evidence == ()


@pytest.mark.slow
def test_a_program_that_closes_before_the_steps_of_its_spec_is_incomplete(make: Make) -> None:
    run = make(config={"steps": 12}, steps=12, close_at=7, gpus=1, checkpoint={"interval": 4})
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
    (line,) = view.evidence
    assert line.startswith("incomplete: the program ended with exit status 0 after step 6, ")
    assert "the spec's [config] sets 12 steps" in line
    operator.request(run.paths, "relaunch", by="tester")
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.last_step, view.evidence) == (AttemptState.COMPLETED, 12, ())


@pytest.mark.more
def test_program_without_a_session_completes_with_a_note(make: Make) -> None:
    run = make(session=False, sleep_s=0.1, gpus=1)
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.COMPLETED, None)
    assert view.evidence == (
        "the program ended without a Session: no steps were counted or compared",
    )


@pytest.mark.slow
def test_completed_run_can_be_relaunched_only_if_steps_may_be_missing(
    make: Make,
) -> None:
    run = make(steps=12, close_at=7, gpus=1, checkpoint={"interval": 4}, sleep_s=0.05)
    run.submit()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED
    assert "closed its Session" in view.evidence[0]
    with pytest.raises(SpecError, match="is completed"):
        operator.request(run.paths, "stop", by="tester")
    assert decide(run.history(), None, now=time.time()).action == "stop"
    operator.request(run.paths, "relaunch", by="tester")
    assert run.history().state is RunState.WAITING
    decision = decide(run.history(), None, now=time.time())
    assert (decision.action, decision.gpus) == ("relaunch", 1)
    run.submit()
    view = run.wait_for_end()
    # The loop's end has saved step 6, although the interval is 4.
    assert (view.state, view.first_step, view.last_step) == (AttemptState.COMPLETED, 7, 12)
    assert run.history().state is RunState.COMPLETED
    with pytest.raises(SpecError, match=r"is completed.*holdfast fork"):
        operator.request(run.paths, "relaunch", by="tester")


@pytest.mark.more
def test_run_without_a_session_is_relaunched_once_per_request(
    make: Make,
) -> None:
    run = make(session=False, sleep_s=0.1, gpus=1)
    run.submit()
    assert run.wait_for_end().state is AttemptState.COMPLETED
    operator.request(run.paths, "relaunch", by="tester")
    assert decide(run.history(), None, now=time.time()).action == "relaunch"
    run.submit()
    assert run.wait_for_end().number == 2
    assert run.history().state is RunState.COMPLETED
    assert decide(run.history(), None, now=time.time()).action == "stop"


@pytest.mark.more
def test_error_of_a_program_without_a_session_is_read_from_its_output(make: Make) -> None:
    run = make(session=False, sleep_s=0.1, fail_at=1, gpus=1)
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
    assert "RuntimeError: a bad program" in (view.traceback or "")


@pytest.mark.more
def test_no_process_outlives_a_killed_agent(make: Make) -> None:
    run = make(steps=2000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    send(run.claim(attempt).pid, signal.SIGKILL)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.LOST, Cause.INFRASTRUCTURE)
    assert view.last_step is not None
    assert view.last_step >= 3
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_deadline_of_a_stop_file_is_enforced(make: Make) -> None:
    run = make(session=False, sleep_s=SLEEP_S, gpus=1)
    attempt = run.submit()
    wait_until(lambda: _said_hello(run, attempt), "the program's first words")
    now = time.time()
    asked = StopFile(action="drain", by="tester", requested_at=now, deadline_s=4.0)
    write_document(attempt.stop, asked)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert time.time() - now < SLEEP_S / 2


@pytest.mark.more
def test_cancel_now_ends_a_stop_that_waits_for_a_step(make: Make) -> None:
    run = make(steps=10, sleep_s=SLEEP_S, gpus=1)
    attempt = run.submit()
    wait_until(lambda: run.events(EventKind.RESUMED), "the program's session")
    operator.request(run.paths, "cancel", by="tester")
    wait_until(lambda: run.events(EventKind.SIGNAL), "the stop that waits for step 1")
    now = time.time()
    operator.request(run.paths, "cancel", by="tester", now=True)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert time.time() - now < SLEEP_S / 4
    assert run.outcome(attempt).committed_step is None
    assert "had not ended by the deadline and was killed" in " ".join(view.evidence)
    assert decide(run.history(), None, now=time.time()).action == "stop"
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_program_without_a_session_that_a_preemption_ends_is_not_complete(make: Make) -> None:
    """A signal to all processes of the job, and the program exits with status 0."""
    run = make(session=False, sleep_s=SLEEP_S, heeds_signals=True)
    attempt = run.submit()
    wait_until(lambda: _said_hello(run, attempt), "the first lines of both ranks")
    for process in processes_of(run.paths):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION), view.evidence
    assert "then the program ended without a Session" in " ".join(view.evidence)
    assert decide(run.history(), None, now=time.time()).action == "relaunch"


def _said_hello(run: LocalRun, attempt: Any) -> bool:
    """Whether all ranks of a launch on one node run the program, with its handlers of signals."""
    logs = [attempt.rank_log(0, 1, rank) for rank in range(run.spec.resources.gpus_per_node)]
    return all(log.exists() and "without a session" in log.read_text() for log in logs)
