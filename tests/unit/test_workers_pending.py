"""Pending timeouts: when a job is overdue, and the size that is tried next."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of

from holdfast.contracts.disk.journal import PENDING_TIMEOUT
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.policy import decide, fits_any
from holdfast.workers.runs.tending import is_overdue, smaller_size

ON_SLURM = {"executor": "slurm", "gpus_per_node": 4}
LIMIT = {"supervision": {"pending_timeout_min": 10}, "resources": ON_SLURM}


@pytest.mark.parametrize(
    ("state", "waited_s", "started", "overdue"),
    [
        (AttemptState.PENDING, 600, False, True),
        (AttemptState.SUBMITTED, 600, False, True),
        (AttemptState.PENDING, 599, False, False),
        (AttemptState.PENDING, 6000, True, False),
        (AttemptState.RUNNING, 6000, False, False),
        (AttemptState.CREATED, 6000, False, False),
    ],
)
def test_a_job_is_overdue_when_it_has_waited_longer_than_the_spec_allows(
    state: AttemptState, waited_s: float, started: bool, overdue: bool
) -> None:
    spec = spec_of(**LIMIT)
    view = attempt_of(spec, 1, None, state=state, started_at=NOW if started else None)
    view = replace(view, submitted_at=NOW - waited_s)
    assert is_overdue(spec, view, now=NOW) is overdue
    assert not is_overdue(spec_of(), view, now=NOW)


@pytest.mark.parametrize(
    ("choices", "current", "capacity", "expected"),
    [
        ([1, 2, 4], 4, 3, 2),
        ([1, 2, 4], 4, 0, 1),
        ([1, 2, 4], 4, 8, 2),
        ([1, 2, 4], 4, None, 2),
        ([1, 2, 4], 1, 8, None),
        ([4], 4, 0, None),
    ],
)
def test_the_next_size_is_the_largest_smaller_one_that_is_free_or_the_smallest(
    choices: list[int], current: int, capacity: int | None, expected: int | None
) -> None:
    spec = spec_of(elastic={"choices": choices})
    assert smaller_size(spec, current, capacity, fits_any) == expected
    assert smaller_size(spec, current, capacity, lambda _: False) is None


def test_the_request_decides_what_follows_and_resets_no_budget() -> None:
    spec = spec_of(elastic={"choices": [2, 4]})
    ended = attempt_of(spec, 1, Cause.OPERATOR)
    asked = {"by": PENDING_TIMEOUT, "reason": "job 7 was pending"}
    paused = decide(history_of(spec, ended, asked={"action": "pause", **asked}), 4, now=NOW)
    assert paused.action == "wait"
    assert paused.reason == f"paused by {PENDING_TIMEOUT}: job 7 was pending"
    smaller = history_of(spec, ended, asked={"action": "relaunch", "gpus": 2, **asked})
    assert (decide(smaller, 4, now=NOW).action, decide(smaller, 4, now=NOW).gpus) == ("relaunch", 2)
    failed = [attempt_of(spec, n, Cause.HOST_OOM, committed=n) for n in (1, 2)]
    again = {"action": "relaunch", "after_attempt": 1}
    stopped = decide(history_of(spec, *failed, asked={**again, **asked}), 4, now=NOW)
    assert stopped.action == "stop"
    assert decide(history_of(spec, *failed, asked=again), 4, now=NOW).action == "relaunch"


@pytest.mark.parametrize("value", [0, -1, float("inf")])
def test_a_pending_timeout_is_a_positive_number_of_minutes(value: float) -> None:
    with pytest.raises(ValueError, match="pending_timeout_min"):
        spec_of(supervision={"pending_timeout_min": value})
