"""The transition table of attempts: every state is in it, and every legal move."""

from __future__ import annotations

from itertools import product

import pytest

from holdfast.contracts.states import ATTEMPT_MOVES, AttemptState, RunState

LIVE_ORDER = [
    AttemptState.CREATED,
    AttemptState.SUBMITTED,
    AttemptState.PENDING,
    AttemptState.RUNNING,
    AttemptState.STOPPING,
]
ENDED = set(AttemptState) - set(LIVE_ORDER)


def test_every_state_is_in_the_transition_table() -> None:
    assert set(ATTEMPT_MOVES) == set(AttemptState)


@pytest.mark.parametrize(("old", "new"), list(product(AttemptState, AttemptState)))
def test_the_table_has_each_legal_attempt_transition(old: AttemptState, new: AttemptState) -> None:
    if old in ENDED:
        is_legal = old is new
    elif new in ENDED:
        is_legal = True
    else:
        is_legal = LIVE_ORDER.index(new) >= LIVE_ORDER.index(old)
    assert is_legal == (old is new or new in ATTEMPT_MOVES[old])


def test_terminal_and_live_states_match_the_tables() -> None:
    assert {state for state in AttemptState if state.is_terminal} == ENDED
    assert {state for state in RunState if not state.is_live} == {
        RunState.COMPLETED,
        RunState.FAILED,
        RunState.CANCELLED,
    }
