"""Exit status 0: the steps that a program completed are compared with those that it declared."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.promises import judge_completion

Line = tuple[EventKind, dict[str, Any]]
RESUMED: Line = (EventKind.RESUMED, {})
PROMISED = (EventKind.NOTE, {"text": "the program loops over 100 steps", "promised": True})
LEFT = (EventKind.NOTE, {"text": "left after step 100", "has_left": True, "is_whole": True})
SHORT_TEXT = "left after step 40 of 100 steps"
SHORT = (EventKind.NOTE, {"text": SHORT_TEXT, "has_left": True, "is_whole": False})
UNTOLD = (EventKind.NOTE, {"text": "left after step 40", "has_left": True, "is_whole": None})


@pytest.mark.parametrize(
    ("lines", "state", "words"),
    [
        ([RESUMED, PROMISED, LEFT], AttemptState.COMPLETED, ""),
        ([RESUMED, UNTOLD], AttemptState.COMPLETED, ""),
        ([RESUMED, PROMISED, SHORT], AttemptState.COMPLETED, SHORT_TEXT),
        ([RESUMED], AttemptState.COMPLETED, "had not declared how many steps"),
        ([], AttemptState.COMPLETED, "without a Session"),
        ([RESUMED, PROMISED], AttemptState.FAILED, "after step 40, without session.close()"),
    ],
)
def test_exit_status_0_is_compared_with_the_declared_steps(
    lines: list[Line], state: AttemptState, words: str
) -> None:
    before = [_event(0, 1, kind, data) for kind, data in (RESUMED, PROMISED, LEFT)]
    events = [_event(number, 2, *line) for number, line in enumerate(lines, 10)]
    ending = judge_completion([*before, *events], launch=2, step=40)
    assert ending.state is state
    assert (ending.cause is Cause.USER_ERROR) == (state is AttemptState.FAILED)
    assert words in " ".join(ending.evidence)
    assert bool(words) == bool(ending.evidence)


def _event(number: int, launch: int, kind: EventKind, data: dict[str, Any]) -> Event:
    facts = {"attempt": 1, "launch": launch, **data}
    return Event(writer="rank0", opening=1, sequence=number, time=0, kind=kind, data=facts)
