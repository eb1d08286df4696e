"""The transition tables: they contain every state, and each transition is legal or raises."""

from __future__ import annotations

from itertools import product

import pytest

from holdfast.contracts.errors import IllegalTransitionError
from holdfast.contracts.states import (
    ATTEMPT_MOVES,
    RUN_MOVES,
    AttemptState,
    RunState,
    check_attempt_move,
    check_run_move,
)

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
    assert set(RUN_MOVES) == set(RunState)


@pytest.mark.parametrize(("old", "new"), list(product(AttemptState, AttemptState)))
def test_each_attempt_transition_is_legal_or_raises(old: AttemptState, new: AttemptState) -> None:
    if old in ENDED:
        is_legal = old is new
    elif new in ENDED:
        is_legal = True
    else:
        is_legal = LIVE_ORDER.index(new) >= LIVE_ORDER.index(old)
    if is_legal:
        check_attempt_move(old, new)
        assert old is new or new in ATTEMPT_MOVES[old]
    else:
        with pytest.raises(IllegalTransitionError, match=f"cannot go from {old} to {new}"):
            check_attempt_move(old, new)


ILLEGAL_RUN_MOVES = {(RunState.COMPLETED, state) for state in RunState} | {
    (RunState.PAUSED, RunState.COMPLETED),
    (RunState.FAILED, RunState.PAUSED),
    (RunState.FAILED, RunState.COMPLETED),
    (RunState.CANCELLED, RunState.PAUSED),
    (RunState.CANCELLED, RunState.COMPLETED),
    (RunState.CANCELLED, RunState.FAILED),
}


@pytest.mark.parametrize(("old", "new"), list(product(RunState, RunState)))
def test_each_run_transition_is_legal_or_raises(old: RunState, new: RunState) -> None:
    if old is not new and (old, new) in ILLEGAL_RUN_MOVES:
        with pytest.raises(IllegalTransitionError, match=f"cannot go from {old} to {new}"):
            check_run_move(old, new)
    else:
        check_run_move(old, new)
        assert old is new or new in RUN_MOVES[old]


def test_terminal_and_live_states_match_the_tables() -> None:
    assert {state for state in AttemptState if state.is_terminal} == ENDED
    assert {state for state in RunState if not state.is_live} == {
        RunState.COMPLETED,
        RunState.FAILED,
        RunState.CANCELLED,
    }


def test_the_error_for_an_ended_attempt_says_that_it_has_ended() -> None:
    with pytest.raises(IllegalTransitionError, match="no other state, because it has ended"):
        check_attempt_move(AttemptState.LOST, AttemptState.RUNNING)
