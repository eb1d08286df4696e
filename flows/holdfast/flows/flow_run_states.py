"""What Prefect knows about a flow run: how often it was started, and who gave an order.

A flow run is scheduled before each start: by its creation, a resumption or a retry. One that waits
for its worker is scheduled twice in a row, the second time as late. A worker sets it to pending.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext

from holdfast.contracts.plain_text import plain_line


def times_scheduled(states: Sequence[State[Any]]) -> int:
    """Return how often the flow run was to be started by a worker."""
    # Prefect's own count of starts leaves out resumptions, see decision 69.
    return sum(one.is_scheduled() for one in _without_repetitions(states))


def state_before_scheduling(states: Sequence[State[Any]]) -> State[Any] | None:
    """Return the state in which the flow run was scheduled last; None at its creation."""
    before = None
    for one, following in itertools.pairwise(_without_repetitions(states)):
        if following.is_scheduled():
            before = one
    return before


def last_begun_at(states: Sequence[State[Any]]) -> float:
    """Return when a worker last took the flow run, as a Unix time of the server; 0.0 if never."""
    pending = [one.timestamp.timestamp() for one in states if one.type is StateType.PENDING]
    return max(pending, default=0.0)


def _without_repetitions(states: Sequence[State[Any]]) -> list[State[Any]]:
    """Return the states in order, without a scheduled one that follows another."""
    # By time, because the server may return them in another order.
    ordered = sorted(states, key=lambda one: one.timestamp)
    pairs = zip([None, *ordered], ordered, strict=False)
    return [
        one
        for before, one in pairs
        if not (one.is_scheduled() and before is not None and before.is_scheduled())
    ]


# Who gave an order through Prefect, as far as Prefect knows.
#
# Prefect's own server has one login at most, and records no person. So an order names the
# automation, the schedule or the flow run that it came through. The deployments have a parameter
# `by` for a name.


BY: Final = "prefect"
NAME_MAX: Final = 80
_AUTOMATION: Final = "automation"
_MADE_BY: Final = {"AUTOMATION": _AUTOMATION, "SCHEDULE": "schedule"}


def giver(by: str | None = None) -> str:
    """Return who started the current flow run: the name that was given, or what Prefect knows."""
    context = FlowRunContext.get()
    found = context.flow_run if context else None
    if found is None:
        return BY
    made_by = found.created_by
    kind = _MADE_BY.get(made_by.type or "") if made_by else None
    if kind is None and found.auto_scheduled:
        kind = _MADE_BY["SCHEDULE"]
    known = f"{BY} {kind}" if kind else BY
    # Of a schedule, Prefect gives only the kind, such as CronSchedule.
    if kind == _AUTOMATION and made_by and made_by.display_value:
        known = f"{known} {made_by.display_value}"
    return _with_name(by, f"{known}, flow run {found.name}" if kind else of_flow_run(found.name))


def of_flow_run(name: str) -> str:
    """Return the giver of an order that was a change of a flow run's state."""
    return plain_line(f"{BY} flow run {name}")


def message_of(state: State[object] | None) -> str:
    """Return the message that someone gave with a flow run's state, for the order's reason."""
    return plain_line(state.message)[:NAME_MAX] if state is not None and state.message else ""


def cancelled_by(flow_run: FlowRun, state: State[object] | None = None) -> tuple[str, str]:
    """Return the giver and the reason of a cancellation of a flow run."""
    state = state or flow_run.state
    is_it = state is not None and (state.is_cancelling() or state.is_cancelled())
    return of_flow_run(flow_run.name), message_of(state) if is_it else ""


def _with_name(by: str | None, through: str) -> str:
    name = plain_line(by or "").strip()[:NAME_MAX]
    return plain_line(f"{name} ({through})" if name else through)
