"""Growth: when free capacity is observed, when a run grows, and when it waits longer."""

from __future__ import annotations

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of

from holdfast.contracts.disk.journal import GROWER
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.growth import (
    CapacityObservation,
    find_growth,
    grow_delay,
    is_due,
    observe_capacity,
)
from holdfast.workers.decisions.policy import decide, fits_any

AFTER_S = 100.0
RUNNING = AttemptState.RUNNING


def growing_spec(grow: bool = True) -> RunSpec:
    elastic = {"min_gpus": 1, "grow": True, "grow_after_s": AFTER_S} if grow else {"min_gpus": 1}
    return spec_of(elastic=elastic, resources={"executor": "slurm", "gpus_per_node": 4})


def running(spec: RunSpec, gpus: int = 2, *, began: float = NOW - 10 * AFTER_S) -> AttemptView:
    return attempt_of(spec, 1, None, gpus=gpus, state=RUNNING, started_at=began)


def one(gpus: int = 2, *, grow: bool = True, state: AttemptState = RUNNING) -> RunHistory:
    spec = growing_spec(grow)
    return history_of(spec, attempt_of(spec, 1, None, gpus=gpus, state=state))


@pytest.mark.parametrize(
    ("history", "capacity", "before", "seen"),
    [
        (one(), 4, None, CapacityObservation(gpus=4, since=NOW)),
        (one(), 3, None, CapacityObservation(gpus=3, since=NOW)),
        (one(), 99, None, CapacityObservation(gpus=4, since=NOW)),
        (one(), 2, None, None),
        (one(), 0, CapacityObservation(gpus=4, since=1), None),
        (one(), None, CapacityObservation(gpus=4, since=1), None),
        (one(gpus=4), 8, None, None),
        (one(grow=False), 4, None, None),
        (one(state=AttemptState.PENDING), 4, CapacityObservation(gpus=4, since=1), None),
        (one(), 4, CapacityObservation(gpus=4, since=1), CapacityObservation(gpus=4, since=1)),
        (one(), 4, CapacityObservation(gpus=3, since=1), CapacityObservation(gpus=4, since=1)),
        (one(), 3, CapacityObservation(gpus=4, since=1), CapacityObservation(gpus=3, since=NOW)),
    ],
)
def test_free_capacity_for_a_larger_attempt_is_observed(
    history: RunHistory,
    capacity: int | None,
    before: CapacityObservation | None,
    seen: CapacityObservation | None,
) -> None:
    assert observe_capacity(history, capacity, before, now=NOW, fits=fits_any) == seen


def test_a_size_that_the_checkpoint_does_not_fit_is_not_observed() -> None:
    seen = observe_capacity(one(), 4, None, now=NOW, fits=lambda gpus: gpus != 4)
    assert seen == CapacityObservation(gpus=3, since=NOW)


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize(("since", "due"), [(NOW - AFTER_S, True), (NOW - AFTER_S + 1, False)])
def test_growth_is_due_when_capacity_was_free_for_long_enough(
    since: float, due: bool, skew_s: float
) -> None:
    spec = growing_spec()
    # The node's clock has no effect.
    history = history_of(spec, running(spec, began=NOW - AFTER_S + skew_s))
    assert is_due(history, CapacityObservation(gpus=4, since=since), now=NOW) is due


def test_capacity_that_was_observed_during_another_attempt_does_not_count() -> None:
    spec = growing_spec()
    before = CapacityObservation(gpus=4, since=NOW - 10 * AFTER_S, attempt=1)
    again = attempt_of(spec, 2, None, gpus=2, state=RUNNING, started_at=NOW)
    seen = observe_capacity(history_of(spec, again), 4, before, now=NOW, fits=fits_any)
    assert seen == CapacityObservation(gpus=4, since=NOW, attempt=2)


def test_no_growth_without_capacity_or_with_a_pending_request() -> None:
    spec = growing_spec()
    asked = history_of(spec, running(spec), asked={"action": "pause"})
    assert not is_due(asked, CapacityObservation(gpus=4, since=0), now=NOW)
    assert not is_due(history_of(spec, running(spec)), None, now=NOW)


@pytest.mark.parametrize(
    ("since", "answers", "found", "asked"),
    [
        # Not due yet: an old answer is enough.
        (NOW - AFTER_S + 1, (4, 4), (CapacityObservation(gpus=4, since=NOW - AFTER_S + 1), 0), 1),
        (NOW - AFTER_S, (4, 4), (None, 4), 2),
        # The old answer was right a minute ago.
        (NOW - AFTER_S, (4, 2), (None, 0), 2),
        (NOW - AFTER_S, (4, 3), (CapacityObservation(gpus=3, since=NOW), 0), 2),
        (NOW - AFTER_S, (4, None), (None, 0), 2),
        (NOW - AFTER_S, (2, 4), (None, 0), 1),
    ],
)
def test_growth_that_is_due_is_confirmed_by_a_new_answer(
    since: float,
    answers: tuple[int, int | None],
    found: tuple[CapacityObservation | None, int],
    asked: int,
) -> None:
    spec, questions = growing_spec(), []

    def ask(*, is_urgent: bool) -> int | None:
        questions.append(is_urgent)
        return answers[is_urgent]

    history, before = history_of(spec, running(spec)), CapacityObservation(gpus=4, since=since)
    assert find_growth(history, ask, before, now=NOW, fits=fits_any) == found
    assert questions == [False, True][:asked]


def test_each_preemption_of_a_grown_attempt_doubles_the_wait() -> None:
    spec = growing_spec()
    grown = {"action": "relaunch", "by": GROWER, "gpus": 4, "after_attempt": 1}
    first = attempt_of(spec, 1, Cause.OPERATOR, gpus=2, committed=5)
    again = attempt_of(spec, 2, Cause.PREEMPTION, gpus=4, committed=9)
    assert grow_delay(history_of(spec, first, asked=grown)) == AFTER_S
    assert grow_delay(history_of(spec, first, again, asked=grown)) == 2 * AFTER_S


@pytest.mark.parametrize(("capacity", "gpus"), [(8, 4), (4, 4), (3, 3), (None, 4), (0, 2)])
def test_the_capacity_at_the_relaunch_decides_the_new_size(capacity: int | None, gpus: int) -> None:
    spec = growing_spec()
    ended = attempt_of(spec, 1, Cause.OPERATOR, gpus=2, committed=5)
    asked = {"action": "relaunch", "by": GROWER, "gpus": 4}
    decision = decide(history_of(spec, ended, asked=asked), capacity, now=NOW)
    assert (decision.action, decision.gpus) == ("relaunch", gpus)
    assert GROWER in decision.reason


def test_growth_does_not_reset_the_budgets() -> None:
    spec = growing_spec()
    asked = {"action": "relaunch", "by": GROWER, "gpus": 4, "after_attempt": 1}
    first = attempt_of(spec, 1, Cause.GPU_OOM, committed=5)
    second = attempt_of(spec, 2, Cause.GPU_OOM, committed=9)
    assert decide(history_of(spec, first, second, asked=asked), None, now=NOW).action == "stop"
