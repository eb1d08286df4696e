"""What the states that a Prefect flow run went through say about its starts.

A flow run is scheduled before each start: by its creation, a resumption or a retry. One that waits
for its worker is scheduled twice in a row, the second time as late. A worker sets it to pending.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from prefect.client.schemas.objects import State, StateType


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
