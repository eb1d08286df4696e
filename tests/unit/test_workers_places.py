"""Fallbacks: the resources of a place, when a run moves on, and where the next attempt goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.histories import NOW, attempt_of, history_of, record_of, spec_of

from holdfast.contracts.disk.journal import FALLBACKS, Event, EventKind
from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.places import ReturnWatch, place_after, reason_to_move
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.tending import is_overdue
from holdfast.workers.schedulers.slurm_capacity import free_gpus, wanted_of

ELSEWHERE = {"partition": "spot-b", "after_min": 10}
ON_DEMAND = {"partition": "prod", "qos": "high", "gpu_type": "h100", "after_min": 5}


def spec_with(*fallbacks: dict[str, Any]) -> RunSpec:
    resources = {"executor": "slurm", "gpus_per_node": 4, "partition": "spot", "qos": "low"}
    return spec_of(resources={**resources, "fallbacks": fallbacks})


def pending_at(
    spec: RunSpec, place: int, waited_s: float, starts_in_s: float | None = None
) -> AttemptView:
    view = attempt_of(spec, 1, None, state=AttemptState.PENDING)
    assert view.request is not None
    said: dict[str, Any] = {"state": "pending", "attempt": 1}
    if starts_in_s is not None:
        said["starts_at"] = NOW + starts_in_s
    line = {"writer": "flow", "opening": 1, "sequence": 0, "time": NOW, "data": said}
    return replace(
        view,
        request=view.request.model_copy(update={"place": place}),
        submitted_at=NOW - waited_s,
        started_at=None,
        ended_at=None,
        pending=Event.model_validate({**line, "kind": EventKind.ATTEMPT_STATE}),
    )


def test_a_place_replaces_only_the_keys_that_it_gives() -> None:
    resources = spec_with(ELSEWHERE, ON_DEMAND).resources
    chosen = [(one.partition, one.qos, one.gpu_type) for one in map(resources.at, range(4))]
    assert chosen == [
        ("spot", "low", None),
        ("spot-b", "low", None),
        ("prod", "high", "h100"),
        ("spot", "low", None),
    ]


def test_the_job_is_submitted_at_its_place() -> None:
    spec = spec_with(ELSEWHERE, ON_DEMAND)
    request = build_request(record_of(spec), spec, attempt=2, gpus=4, reason="r", place=2)
    assert request.place == 2
    assert request.scheduler["partition"] == "prod"
    assert request.scheduler["qos"] == "high"
    assert request.scheduler["gpus_per_node"] == "h100:4"


@pytest.mark.parametrize(
    ("place", "waited_s", "starts_in_s", "moves"),
    [
        (0, 599, None, False),
        (0, 600, None, True),
        (1, 299, None, False),
        (1, 300, None, True),
        (2, 90_000, None, False),
        (0, 59, 9000, False),
        (0, 61, 9000, True),
        (0, 61, 500, False),
    ],
)
def test_a_run_moves_on_after_the_wait_or_by_the_forecast(
    place: int, waited_s: float, starts_in_s: float | None, moves: bool
) -> None:
    spec = spec_with(ELSEWHERE, ON_DEMAND)
    history = history_of(spec, pending_at(spec, place, waited_s, starts_in_s))
    assert bool(reason_to_move(history, now=NOW)) == moves


def test_a_run_that_already_moves_or_runs_does_not_move_again() -> None:
    spec = spec_with(ELSEWHERE)
    late = pending_at(spec, 0, 6000)
    asked = history_of(spec, late, asked={"action": "stop", "after_attempt": 1})
    assert reason_to_move(asked, now=NOW) == ""
    running = replace(late, state=AttemptState.RUNNING, started_at=NOW)
    assert reason_to_move(history_of(spec, running), now=NOW) == ""


def taken_back(spec: RunSpec, place: int) -> AttemptView:
    view = attempt_of(spec, 1, Cause.OPERATOR)
    assert view.request is not None
    return replace(view, request=view.request.model_copy(update={"place": place}))


def test_the_request_names_the_next_place() -> None:
    spec = spec_with(ELSEWHERE, ON_DEMAND)
    asked = {"action": "relaunch", "by": FALLBACKS, "gpus": 4, "place": 1, "after_attempt": 1}
    decision = decide(history_of(spec, taken_back(spec, 0), asked=asked), 0, now=NOW)
    assert (decision.action, decision.gpus, decision.place) == ("relaunch", 4, 1)


def test_after_an_ending_the_first_choice_is_tried_unless_it_is_full() -> None:
    spec = spec_with(ELSEWHERE, ON_DEMAND)
    view = attempt_of(spec, 1, Cause.TIME_LIMIT, committed=10)
    assert view.request is not None
    away = replace(view, request=view.request.model_copy(update={"place": 2}))
    history = history_of(spec, away)
    assert [place_after(history, capacity, now=NOW) for capacity in (None, 4, 0)] == [0, 0, 2]
    assert decide(history, 0, now=NOW).place == 2
    assert decide(history, 4, now=NOW).place == 0


@pytest.mark.parametrize("fallback", [{}, {"after_min": 5}, {"partition": "p", "after_min": 0}])
def test_a_fallback_without_another_place_is_refused(fallback: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec_with(fallback)


def test_fallbacks_need_slurm() -> None:
    with pytest.raises(ValidationError, match=r"resources\.fallbacks .* acts only on Slurm"):
        spec_of(resources={"fallbacks": [ELSEWHERE]})


def test_a_closed_partition_has_no_capacity() -> None:
    node = {"NodeName": "n1", "State": "IDLE", "Gres": "gpu:4", "Partitions": "spot,prod"}
    resources = spec_with(ELSEWHERE).resources
    states = [("UP", 4), ("DOWN", 0), ("DRAIN", 0), ("INACTIVE", 0)]
    for state, gpus in states:
        known = [
            {"PartitionName": "spot", "State": state},
            {"PartitionName": "prod", "State": "UP"},
        ]
        assert free_gpus(node, wanted_of(resources, None, known)) == gpus
    both = resources.model_copy(update={"partition": "spot,prod"})
    known = [{"PartitionName": "spot", "State": "DOWN"}, {"PartitionName": "prod", "State": "UP"}]
    assert free_gpus(node, wanted_of(both, None, known)) == 4


def test_a_request_of_an_older_version_has_no_place() -> None:
    spec = spec_with(ELSEWHERE)
    request = build_request(record_of(spec), spec, attempt=1, gpus=4, reason="r")
    old = {key: value for key, value in request.model_dump(mode="json").items() if key != "place"}
    assert type(request).model_validate(old).place == 0


def recorded(*fallbacks: dict[str, Any], **fields: Any) -> RunSpec:
    """A spec that an earlier version accepted: its first fallback contradicts `gres`."""
    resources = {"executor": "slurm", "gpus_per_node": 4, "gres": "gpu:4", "fallbacks": fallbacks}
    return RunSpec.read({"name": "r", "command": ["t.py"], "resources": resources, **fields})


def test_a_recorded_fallback_that_cannot_be_submitted_is_passed_over() -> None:
    spec = recorded({"gpu_type": "a100", "after_min": 1}, ELSEWHERE)
    with pytest.raises(ValidationError, match=r"resources\.gres"):
        spec.resources.at(1)
    assert spec.resources.next_place(0) == 2
    assert reason_to_move(history_of(spec, pending_at(spec, 0, 599)), now=NOW) == ""
    assert reason_to_move(history_of(spec, pending_at(spec, 0, 600)), now=NOW)
    # The request for the bad place may be in the journal: its supervisor died of it.
    asked = {"action": "relaunch", "by": FALLBACKS, "gpus": 4, "place": 1, "after_attempt": 1}
    assert decide(history_of(spec, taken_back(spec, 0), asked=asked), 4, now=NOW).place == 2
    alone = recorded({"gpu_type": "a100", "after_min": 1})
    assert reason_to_move(history_of(alone, pending_at(alone, 0, 6000)), now=NOW) == ""
    assert decide(history_of(alone, taken_back(alone, 0), asked=asked), 4, now=NOW).place == 0
    late = {"supervision": {"pending_timeout_min": 10}}
    waits = pending_at(alone, 0, 6000)
    assert is_overdue(recorded({"gpu_type": "a100"}, **late), waits, now=NOW)
    assert not is_overdue(recorded({"gpu_type": "a100"}, ELSEWHERE, **late), waits, now=NOW)


def test_the_limit_of_attempts_also_holds_for_moves() -> None:
    spec = spec_of(
        resources=spec_with(ELSEWHERE, ON_DEMAND).resources, supervision={"attempts_max": 3}
    )
    first, second = attempt_of(spec, 1, Cause.PREEMPTION), attempt_of(spec, 2, Cause.PREEMPTION)
    waits = pending_at(spec, 0, 6000)
    assert reason_to_move(history_of(spec, first, replace(waits, number=2)), now=NOW)
    last = history_of(spec, first, second, replace(waits, number=3))
    assert reason_to_move(last, now=NOW) == ""
    away = replace(waits, number=3, request=replace_place(waits, 1))
    watch = ReturnWatch(free_since=NOW - 6000, attempt=3)
    assert watch.look(history_of(spec, first, second, away), lambda **_: 8, now=NOW) == ""
    watch = ReturnWatch(free_since=NOW - 6000, attempt=2)
    assert watch.look(history_of(spec, first, replace(away, number=2)), lambda **_: 8, now=NOW)


def replace_place(view: AttemptView, place: int) -> Any:
    assert view.request is not None
    return view.request.model_copy(update={"place": place})
