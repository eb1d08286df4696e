"""How often a flow run was scheduled, what it was before, and when a worker took it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Crashed, Late, Pending, Running, Scheduled, Suspended

from holdfast.flows.flow_run_states import (
    last_begun_at,
    state_before_scheduling,
    times_scheduled,
)

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def states(*made: State[Any]) -> list[State[Any]]:
    """States one second apart, in the reverse order, as a server may give them."""
    for number, one in enumerate(made):
        one.timestamp = BEGAN + timedelta(seconds=number)
    return list(reversed(made))


def test_a_late_flow_run_is_scheduled_once() -> None:
    found = states(Scheduled(), Late(), Pending(), Running())
    assert times_scheduled(found) == 1
    assert state_before_scheduling(found) is None


def test_a_resumption_schedules_again_and_a_lost_process_does_not() -> None:
    lost: list[State[Any]] = [Scheduled(), Pending(), Running(), Pending(), Running()]
    assert times_scheduled(states(*lost)) == 1
    found = states(*lost, Suspended(), Scheduled(), Late(), Pending())
    assert times_scheduled(found) == 2
    before = state_before_scheduling(found)
    assert before is not None
    assert before.is_paused()


def test_the_last_scheduling_counts_for_the_state_before_it() -> None:
    found = states(Scheduled(), Pending(), Suspended(), Scheduled(), Pending(), Crashed(), Late())
    before = state_before_scheduling(found)
    assert before is not None
    assert before.is_crashed()


def test_a_flow_run_begins_when_a_worker_takes_it() -> None:
    assert last_begun_at(states(Scheduled())) == 0.0
    found = states(Scheduled(), Pending(), Running(), Pending(), Running())
    assert last_begun_at(found) == BEGAN.timestamp() + 3
