"""`decide`: causes, budgets, progress, operator requests and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.histories import NOW, attempt_of, growing, history_of, spec_of

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.documents import LaunchRecord, SubmissionTry
from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.causes import RankFailure, classify_crash, hung_ending
from holdfast.workers.decisions.exclusions import EXCLUDE_S, excluded_hosts
from holdfast.workers.decisions.policy import (
    BACKOFF_S_MAX,
    BUDGETS,
    PREEMPTOR_S,
    UNLIMITED,
    decide,
    decide_in_place,
    spent_on,
    wait_after_refusal,
)
from holdfast.workers.decisions.sizes import allowed_sizes, problem_with


def test_the_first_attempt_uses_the_specs_gpus() -> None:
    decision = decide(history_of(spec_of()), None, now=NOW)
    assert (decision.action, decision.gpus, decision.reason) == ("relaunch", 4, "first")


@pytest.mark.parametrize("state", [s for s in AttemptState if not s.is_terminal])
def test_the_decision_for_a_live_attempt_is_to_wait(state: AttemptState) -> None:
    spec = spec_of()
    history = history_of(spec, attempt_of(spec, 1, None, state=state), asked={"action": "relaunch"})
    assert decide(history, 0, now=NOW).action == "wait"


def test_a_completed_run_stops_after_any_request() -> None:
    spec = spec_of()
    history = history_of(spec, attempt_of(spec, 1, None), asked={"action": "relaunch", "gpus": 4})
    assert decide(history, None, now=NOW).reason == "completed"


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_relaunches_as_often_as_its_budget_allows(cause: Cause) -> None:
    spec, budget = spec_of(), BUDGETS[cause]
    within = 30 if budget == UNLIMITED else budget
    if within:
        history = history_of(spec, *growing(spec, cause, within))
        assert decide(history, None, now=NOW).action == "relaunch"
    if budget != UNLIMITED:
        beyond = history_of(spec, *growing(spec, cause, within + 1))
        decision = decide(beyond, None, now=NOW)
        assert decision.action == "stop"
        assert decision.reason


def test_hangs_that_were_restarted_in_place_use_up_the_budget() -> None:
    def hung(number: int, *causes: Cause) -> AttemptView:
        attempt = attempt_of(spec, number, causes[-1], committed=number * 10)
        assert attempt.outcome is not None
        launches = tuple(
            LaunchRecord(number=n, started_at=0, cause=cause) for n, cause in enumerate(causes, 1)
        )
        outcome = attempt.outcome.model_copy(update={"launches": launches})
        return dataclasses.replace(attempt, outcome=outcome)

    spec = spec_of(supervision={"budgets": {"hang": 3}})
    hang, crash, taken = Cause.HANG, Cause.INFRASTRUCTURE, Cause.PREEMPTION
    history = history_of(spec, hung(1, hang, crash, hang, taken), hung(2, hang))
    assert spent_on(history, Cause.HANG) == 3
    assert decide(history, None, now=NOW).action == "relaunch"
    # The agent of the next attempt knows that number, so it restarts nothing.
    ending = hung_ending(["every rank is silent"])
    assert decide_in_place(ending, restarts=0, restarts_max=3, hangs=3, hangs_max=3).action == (
        "restart"
    )
    assert decide_in_place(ending, restarts=0, restarts_max=3, hangs=4, hangs_max=3).action == (
        "stop"
    )
    last = decide(history_of(spec, *history.attempts, hung(3, hang)), None, now=NOW)
    assert (last.action, last.reason[:27]) == ("stop", "hang (4 times, 3 allowed): ")


def test_full_storage_is_tried_again_only_where_the_next_attempt_resumes_further_on() -> None:
    spec = spec_of()
    full = Cause.STORAGE_FULL
    says = "the save of step 60 failed: [Errno 28] No space left on device"
    cases = [
        (attempt_of(spec, 1, full, steps=(1, 60), evidence=(says,)), "stop"),
        (attempt_of(spec, 1, full, steps=(1, 60), committed=40, evidence=(says,)), "relaunch"),
        # It ended before its first step, so nothing is trained twice.
        (attempt_of(spec, 1, full, evidence=(says,)), "relaunch"),
    ]
    for attempt, action in cases:
        decision = decide(history_of(spec, attempt), None, now=NOW)
        assert decision.action == action
        if action == "stop":
            assert says in decision.reason
            assert "holdfast prune r`" in decision.reason
            assert "holdfast relaunch r`" in decision.reason


def test_an_attempt_that_was_never_submitted_changes_no_decision() -> None:
    spec = spec_of(supervision={"budgets": {"infrastructure": 0}}, elastic={"on_preemption": [2]})
    preempted = attempt_of(spec, 1, Cause.PREEMPTION, committed=5)
    cut_short = [
        dataclasses.replace(
            attempt_of(spec, n, Cause.INFRASTRUCTURE, state=AttemptState.LOST),
            request=None,
            job_id=None,
            outcome=None,
        )
        for n in range(2, 9)
    ]
    alone = decide(history_of(spec, preempted), None, now=NOW)
    assert (alone.action, alone.gpus) == ("relaunch", 2)
    assert decide(history_of(spec, preempted, *cut_short), None, now=NOW) == alone
    asked = {"action": "relaunch", "gpus": 4, "by": "tester", "after_attempt": 1}
    answered = decide(history_of(spec, preempted, *cut_short, asked=asked), None, now=NOW)
    assert (answered.action, answered.gpus) == ("relaunch", 4)
    assert decide(history_of(spec, *cut_short), None, now=NOW).reason == "first"


def test_a_spec_may_set_its_own_budgets() -> None:
    spec = spec_of(supervision={"budgets": {"user_error": 2, "preemption": 1}})
    errors = history_of(spec, *growing(spec, Cause.USER_ERROR, 2))
    assert decide(errors, None, now=NOW).action == "relaunch"
    preempted = history_of(spec, *growing(spec, Cause.PREEMPTION, 2))
    assert decide(preempted, None, now=NOW).action == "stop"


def test_an_operators_relaunch_resets_the_budgets() -> None:
    spec = spec_of()
    first = attempt_of(spec, 1, Cause.USER_ERROR, committed=10)
    assert decide(history_of(spec, first), None, now=NOW).action == "stop"
    asked = {"action": "relaunch", "after_attempt": 1}
    later = attempt_of(spec, 2, Cause.PREEMPTION, committed=20)
    history = history_of(spec, first, later, asked=asked)
    assert decide(history, None, now=NOW).action == "relaunch"


@pytest.mark.parametrize(
    ("asked", "action", "words"),
    [
        ({"action": "pause"}, "wait", "paused by ann"),
        ({"action": "stop"}, "stop", "stop by ann"),
        ({"action": "cancel"}, "stop", "cancel by ann"),
        ({"action": "resume"}, "relaunch", "resume"),
        ({"action": "relaunch", "gpus": 2}, "relaunch", "2 GPUs"),
    ],
)
def test_an_operator_request_takes_precedence_over_every_rule(
    asked: dict[str, Any], action: str, words: str
) -> None:
    spec = spec_of()
    failed = attempt_of(spec, 1, Cause.USER_ERROR)
    decision = decide(history_of(spec, failed, asked=asked), None, now=NOW)
    assert decision.action == action
    assert words in decision.reason
    if action == "relaunch":
        assert decision.gpus == asked.get("gpus", 4)


def test_a_run_cancelled_outside_holdfast_is_not_relaunched() -> None:
    spec = spec_of()
    decision = decide(history_of(spec, attempt_of(spec, 1, Cause.OPERATOR)), None, now=NOW)
    assert (decision.action, decision.reason) == ("stop", "cancelled from outside Holdfast")


def test_preemptions_do_not_trip_the_breaker() -> None:
    spec = spec_of()
    crash = attempt_of(spec, 1, Cause.INFRASTRUCTURE)
    preempted = [attempt_of(spec, n, Cause.PREEMPTION) for n in range(2, 12)]
    assert decide(history_of(spec, crash, *preempted), None, now=NOW).action == "relaunch"
    crashes = [attempt_of(spec, n, Cause.INFRASTRUCTURE) for n in (12, 13)]
    stopped = decide(history_of(spec, crash, *preempted, *crashes), None, now=NOW)
    assert (stopped.action, "3 attempts in a row" in stopped.reason) == ("stop", True)


REFUSED = {"count": 1, "host": "login", "tried_at": NOW, "refused": "no", "refused_since": NOW}


@pytest.mark.parametrize(
    ("facts", "after_s", "wait_s"),
    [
        ({"refusals": 1, "may_pass": True}, 0.0, 10.0),
        ({"refusals": 1, "may_pass": True}, 10.0, 0.0),
        ({"refusals": 4, "may_pass": True}, 30.0, 50.0),
        ({"refusals": 500, "may_pass": True}, 0.0, 600.0),
        ({"refusals": 500, "may_pass": True}, -9_000.0, 0.0),
        ({"refusals": 900, "may_pass": True}, 6 * 86_400.0, 0.0),
        ({"refusals": 2000, "may_pass": True}, 8 * 86_400.0, None),
        ({"refusals": 2}, 0.0, 0.0),
        ({"refusals": 3}, 0.0, None),
    ],
)
def test_a_refused_submission_is_retried_after_a_wait(
    facts: dict[str, Any], after_s: float, wait_s: float | None
) -> None:
    tried = SubmissionTry.model_validate({**REFUSED, **facts})
    assert wait_after_refusal(tried, now=NOW + after_s) == wait_s


@pytest.mark.parametrize("cause", [Cause.TIME_LIMIT, Cause.NODE_FAILURE])
def test_the_breaker_stops_a_run_whose_attempts_commit_no_new_step(cause: Cause) -> None:
    spec = spec_of()
    began = attempt_of(spec, 1, cause, committed=50)
    stuck = [attempt_of(spec, n, cause, committed=c) for n, c in ((2, 50), (3, None), (4, 40))]
    two = history_of(spec, began, *stuck[:2])
    assert decide(two, None, now=NOW).action == "relaunch"
    three = decide(history_of(spec, began, *stuck), None, now=NOW)
    assert three.action == "stop"
    assert "3 attempts in a row committed no new step" in three.reason


def test_rolled_back_steps_do_not_count_for_or_against_progress() -> None:
    spec = spec_of()
    steps = ((1, 50), (2, 150), (3, 60), (4, 70), (5, 80))
    attempts = [attempt_of(spec, n, Cause.TIME_LIMIT, committed=step) for n, step in steps]
    history = history_of(spec, *attempts)
    assert decide(history, None, now=NOW).action == "stop"
    rolled_back = Event(
        writer="rank0",
        opening=1,
        sequence=0,
        time=NOW,
        kind=EventKind.ROLLED_BACK,
        data={"to": "step-00000050.a0001.l01", "excluded": ["step-00000150.a0002.l01"]},
    )
    taken_back = dataclasses.replace(history, events=(rolled_back,))
    assert decide(taken_back, None, now=NOW).action == "relaunch"


def test_attempts_max_limits_the_attempts() -> None:
    spec = spec_of(supervision={"attempts_max": 3})
    history = history_of(spec, *growing(spec, Cause.PREEMPTION, 3))
    assert "attempts_max" in decide(history, None, now=NOW).reason


def test_backoff_doubles_up_to_a_maximum_and_is_deterministic() -> None:
    spec = spec_of(supervision={"budgets": {"infrastructure": 50}, "backoff_s": 10})
    delays = [
        decide(history_of(spec, *growing(spec, Cause.INFRASTRUCTURE, n)), None, now=NOW).delay_s
        for n in (1, 2, 3, 20)
    ]
    assert 7.5 <= delays[0] <= 12.5
    assert 15 <= delays[1] <= 25
    assert 30 <= delays[2] <= 50
    assert delays[3] <= BACKOFF_S_MAX
    again = decide(history_of(spec, *growing(spec, Cause.INFRASTRUCTURE, 1)), None, now=NOW)
    assert again.delay_s == delays[0]
    preempted = decide(history_of(spec, *growing(spec, Cause.PREEMPTION, 1)), None, now=NOW)
    assert preempted.delay_s == 0
    on_cluster = decide(history_of(spec, *growing(spec, Cause.PREEMPTION, 1)), 8, now=NOW)
    assert on_cluster.delay_s == PREEMPTOR_S, "the preemptor takes its GPUs first"


@pytest.mark.parametrize(
    ("elastic", "current", "preemptions", "capacity", "gpus"),
    [
        ({}, 4, 1, 0, 4),
        ({}, 4, 1, None, 4),
        ({"on_preemption": [2]}, 4, 1, None, 2),
        ({"on_preemption": [2]}, 2, 2, 8, 2),
        ({"on_preemption": [3, 2]}, 3, 2, None, 2),
        ({"min_gpus": 1, "max_gpus": 4}, 4, 1, 3, 3),
        ({"min_gpus": 1, "max_gpus": 4}, 2, 1, 9, 4),
        ({"min_gpus": 2, "max_gpus": 4}, 4, 1, 1, 2),
        ({"min_gpus": 2, "max_gpus": 4}, 3, 1, None, 3),
        ({"choices": [1, 2, 4]}, 4, 1, 3, 2),
        ({"choices": [2, 4]}, 4, 1, 1, 2),
        ({"choices": [1]}, 4, 1, 3, 1),
        ({"choices": [1]}, 4, 1, 4, 4),
        ({"choices": [1]}, 1, 1, 4, 1),
    ],
)
def test_the_size_after_a_preemption(
    elastic: dict[str, Any], current: int, preemptions: int, capacity: int | None, gpus: int
) -> None:
    spec = spec_of(elastic=elastic)
    attempts = growing(spec, Cause.PREEMPTION, preemptions, gpus=current)
    assert decide(history_of(spec, *attempts), capacity, now=NOW).gpus == gpus


@pytest.mark.parametrize(
    ("elastic", "current", "capacity", "fitting", "gpus"),
    [
        ({"min_gpus": 1, "max_gpus": 4}, 4, 3, {4}, 4),
        ({"min_gpus": 1, "max_gpus": 4}, 4, 0, {4}, 4),
        ({"min_gpus": 1, "max_gpus": 4}, 1, 3, {4}, 4),
        ({"min_gpus": 1, "max_gpus": 4}, 1, None, {4}, 4),
        ({"choices": [1, 2]}, 4, 1, {4}, 4),
        ({"on_preemption": [2]}, 4, 9, {4}, 4),
        ({"on_preemption": [2]}, 4, None, {4}, 4),
        ({"on_preemption": [2, 1]}, 4, None, {1, 4}, 4),
        ({"min_gpus": 1, "on_preemption": [3]}, 4, 2, {1, 2, 4}, 2),
        ({"choices": [1, 2]}, 2, 1, {8}, 1),
    ],
)
def test_a_preempted_run_waits_for_a_size_that_its_checkpoint_fits(
    elastic: dict[str, Any], current: int, capacity: int | None, fitting: set[int], gpus: int
) -> None:
    spec = spec_of(elastic=elastic)
    history = history_of(spec, *growing(spec, Cause.PREEMPTION, 1, gpus=current))
    assert decide(history, capacity, now=NOW, fits=fitting.__contains__).gpus == gpus


def test_a_relaunch_without_a_size_uses_one_that_the_checkpoint_fits() -> None:
    spec = spec_of(elastic={"min_gpus": 1, "max_gpus": 4})
    ended = attempt_of(spec, 1, Cause.USER_ERROR, gpus=1)
    history = history_of(spec, ended, asked={"action": "relaunch"})
    assert decide(history, None, now=NOW, fits={2, 4}.__contains__).gpus == 2
    assert decide(history, None, now=NOW, fits={1}.__contains__).gpus == 1


def test_sizes_over_several_nodes_fill_whole_nodes() -> None:
    resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4}
    spec = spec_of(resources=resources, elastic={"min_gpus": 2, "max_gpus": 16})
    assert allowed_sizes(spec) == (2, 3, 4, 8, 12, 16)
    assert problem_with(spec, 8) is None
    assert "multiple of 4" in (problem_with(spec, 6) or "")
    assert "outside elastic 2 to 16" in (problem_with(spec, 32) or "")


def test_failed_nodes_are_excluded_for_a_while() -> None:
    spec = spec_of(resources={"executor": "slurm", "nodes": 2, "gpus_per_node": 4})
    lost = attempt_of(spec, 1, Cause.NODE_FAILURE, committed=1, hosts=("n1", "n2"), lost=("n2",))
    assert decide(history_of(spec, lost), None, now=NOW).exclude == ("n2",)
    later = NOW + EXCLUDE_S
    assert decide(history_of(spec, lost), None, now=later).exclude == ()
    unnamed = attempt_of(spec, 1, Cause.NODE_FAILURE, committed=1, hosts=("n1", "n2"))
    assert decide(history_of(spec, unnamed), None, now=NOW).exclude == ()


@pytest.mark.parametrize(
    ("causes", "evidence", "shut_out"),
    [
        ([Cause.HANG], "no step for 60 s", False),
        ([Cause.HANG, Cause.HANG], "no step for 60 s", True),
        ([Cause.INFRASTRUCTURE, Cause.HANG], "connection refused", True),
        ([Cause.USER_ERROR, Cause.HANG], "KeyError", False),
        ([Cause.INFRASTRUCTURE], "CUDA error: uncorrectable ECC error encountered", True),
        ([Cause.INFRASTRUCTURE], "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen", True),
    ],
)
def test_a_host_where_ranks_fail_first_repeatedly_is_excluded_for_a_while(
    causes: list[Cause], evidence: str, shut_out: bool
) -> None:
    spec = spec_of()
    attempts = [
        attempt_of(spec, number, cause, failed_host="n3", evidence=(evidence,), hosts=("n2", "n3"))
        for number, cause in enumerate(causes, 1)
    ]
    assert excluded_hosts(attempts, NOW) == (("n3",) if shut_out else ())
    assert excluded_hosts(attempts, NOW + EXCLUDE_S) == ()


def test_suspicions_of_several_hosts_exclude_none_of_them() -> None:
    spec = spec_of()
    attempts = [
        attempt_of(spec, number, Cause.HANG, failed_host=f"n{number}") for number in (1, 2, 3)
    ]
    assert excluded_hosts(attempts, NOW) == ()


KILLED = RankFailure(rank=1, exit_code=-9)
ERROR = RankFailure(rank=0, exit_code=1, traceback="Traceback\nValueError: no", timestamp=5)
PEER = RankFailure(
    rank=0, exit_code=1, traceback="RuntimeError: Connection closed by peer", timestamp=1
)
TIMED_OUT = RankFailure(
    rank=0, exit_code=1, traceback="RuntimeError: Timed out waiting 9ms for recv operation"
)
BAD_LOSS = RankFailure(
    rank=0,
    exit_code=1,
    traceback="holdfast.contracts.errors.NumericsError: the loss of step 3 is nan; back to …",
)
FAULTY = RankFailure(
    rank=0, exit_code=1, traceback="RuntimeError: CUDA error: uncorrectable ECC error encountered"
)


@pytest.mark.parametrize(
    ("failures", "fields", "action"),
    [
        ([TIMED_OUT], {}, "restart"),
        ([FAULTY], {}, "stop"),
        ([KILLED], {}, "restart"),
        ([PEER, KILLED], {}, "restart"),
        ([PEER], {}, "restart"),
        ([], {}, "restart"),
        ([ERROR], {}, "stop"),
        ([PEER, ERROR], {}, "stop"),
        ([KILLED], {"oom_kills": 1}, "stop"),
        ([KILLED], {"lost_nodes": ("n1",)}, "stop"),
        ([KILLED], {"restarts": 3}, "stop"),
        ([KILLED], {"restarts": 1, "gained_steps": False}, "stop"),
        ([KILLED], {"restarts": 1}, "restart"),
        ([KILLED], {"restarts_max": 0}, "stop"),
        ([BAD_LOSS], {}, "stop"),
        ([BAD_LOSS], {"rolled_back": True}, "restart"),
        ([BAD_LOSS], {"rolled_back": True, "restarts": 3}, "stop"),
        ([ERROR], {"rolled_back": True}, "stop"),
    ],
)
def test_the_decision_to_restart_in_place(
    failures: list[RankFailure], fields: dict[str, Any], action: str
) -> None:
    given: dict[str, Any] = {"restarts": 0, "restarts_max": 3, **fields}
    kills = given.pop("oom_kills", 0)
    ending, _ = classify_crash(failures, oom_kills=kills)
    decision = decide_in_place(ending, **given)
    assert decision.action == action
    assert decision.reason
