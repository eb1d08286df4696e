"""Health checks by the real agent: before the ranks start, and before a restart in place."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, processes_of, send, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator

Make = Callable[..., LocalRun]
SLEEP_S = 400


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Creates runs, and ends their processes afterwards."""
    made: list[LocalRun] = []

    def make_run(**settings: Any) -> LocalRun:
        made.append(LocalRun(tmp_path / f"root{len(made)}", gpus=1, **settings))
        return made[-1]

    yield make_run
    for run in made:
        run.end_all()


@pytest.mark.more
def test_no_rank_starts_on_an_unhealthy_node(make: Make) -> None:
    check = "printf 'GPU 3 is \\033[31mlost\\033[0m\\a, password=Hunter2hunter2x\\n' >&2; exit 7"
    run = make(health={"before": ["true", check]})
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert run.events(EventKind.LAUNCH_STARTED) == []
    (event,) = run.events(EventKind.NODE_UNHEALTHY)
    assert event.data["check"] == check
    reason = event.data["detail"]
    assert reason.startswith("the check ended with exit status 7: GPU 3 is lost\\x07")
    assert "Hunter2" not in reason
    assert view.facts["unhealthy_hosts"] == [event.data["host"]]
    assert noticed(load_events(run.paths))[0]["kind"] == "node_unhealthy"
    decision = decide(run.history(), None, now=time.time())
    assert (decision.action, decision.exclude) == ("relaunch", (event.data["host"],))


def test_a_check_that_takes_too_long_ends_with_all_its_processes(make: Make) -> None:
    check = f"echo waits; (setsid sleep {SLEEP_S} &); sleep {SLEEP_S}"
    run = make(health={"before": [check], "timeout_s": 1})
    run.submit()
    view = run.wait_for_end()
    assert view.cause is Cause.NODE_FAILURE
    assert "took longer than 1 s: waits" in view.evidence[0]
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_a_stop_ends_a_running_check(make: Make, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = make(health={"before": [f"touch {begun}; sleep {SLEEP_S}"], "timeout_s": SLEEP_S})
    run.submit()
    wait_until(begun.exists, "the check")
    operator.request(run.paths, "stop", by="tester")
    view = run.wait_for_end(60)
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert run.events(EventKind.LAUNCH_STARTED) == []
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.more
def test_a_node_that_fails_after_a_crash_gets_no_other_launch(make: Make) -> None:
    run = make(
        steps=100_000,
        sleep_s=0.05,
        health={"before": ["ready"], "after": ["echo the link is down; false"]},
    )
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    victim = next(rank.pid for beat in run.beats(attempt) for rank in beat.ranks)
    send(victim, signal.SIGKILL)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert "the link is down" in view.evidence[0]
    assert [one.ending for one in run.outcome(attempt).launches] == ["crashed"]
