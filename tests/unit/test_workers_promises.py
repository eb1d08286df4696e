"""Exit status 0: the steps that a program completed are compared with those that it declared."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.leading import judge_completion

Line = tuple[EventKind, dict[str, Any]]
RESUMED: Line = (EventKind.RESUMED, {})
SAVES_ONLY: Line = (EventKind.RESUMED, {"counts_steps": False})
PROMISED = (EventKind.NOTE, {"text": "the program loops over 100 steps", "promised": True})
LEFT = (EventKind.NOTE, {"text": "left after step 100", "has_left": True, "is_whole": True})
SHORT_TEXT = "left after step 40 of 100 steps"
SHORT = (EventKind.NOTE, {"text": SHORT_TEXT, "has_left": True, "is_whole": False})
CUT = (EventKind.NOTE, {**SHORT[1], "is_declared": False})
UNTOLD = (EventKind.NOTE, {"text": "left after step 40", "has_left": True, "is_whole": None})


@pytest.mark.parametrize(
    ("lines", "state", "words"),
    [
        ([RESUMED, PROMISED, LEFT], AttemptState.COMPLETED, ""),
        ([RESUMED, UNTOLD], AttemptState.COMPLETED, ""),
        ([RESUMED, PROMISED, SHORT], AttemptState.COMPLETED, SHORT_TEXT),
        ([RESUMED], AttemptState.COMPLETED, "had not declared how many steps"),
        ([], AttemptState.COMPLETED, "without a Session"),
        ([SAVES_ONLY], AttemptState.COMPLETED, "without a Session"),
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


@pytest.mark.parametrize(
    ("lines", "steps_total", "is_complete", "words"),
    [
        ([RESUMED, PROMISED, LEFT], 40, True, ""),
        ([RESUMED, PROMISED, LEFT], 41, False, "after step 40, although the spec's [config] sets"),
        ([RESUMED, PROMISED, SHORT], 100, False, "[config] sets 100 steps"),
        ([RESUMED, UNTOLD], 100, False, "[config] sets 100 steps"),
        ([RESUMED], 40, True, ""),
        ([RESUMED], 100, False, "step 40, without session.close(), although the spec's [config]"),
        ([RESUMED, PROMISED, CUT], None, False, "although the program loops over 100 steps"),
        ([RESUMED, PROMISED, CUT], 40, False, "although the program loops over 100 steps"),
        ([], 100, True, "without a Session"),
    ],
)
def test_an_end_before_the_last_step_is_incomplete_unless_it_is_allowed(
    lines: list[Line], steps_total: int | None, is_complete: bool, words: str
) -> None:
    events = [_event(number, 2, *line) for number, line in enumerate(lines)]
    ending = judge_completion(events, launch=2, step=40, steps_total=steps_total)
    assert (ending.state is AttemptState.COMPLETED) == is_complete
    assert words in " ".join(ending.evidence)
    assert bool(words) == bool(ending.evidence)
    allowed = judge_completion(
        events, launch=2, step=40, steps_total=steps_total, allow_early_exit=True
    )
    assert (allowed.state, allowed.cause) == (AttemptState.COMPLETED, None)
    assert words in " ".join(allowed.evidence)
    if not is_complete:
        assert ending.evidence[0].startswith("incomplete: ")
        assert "--allow-early-exit" in ending.evidence[0]
        assert allowed.evidence[0].startswith("accepted: ")


def _event(number: int, launch: int, kind: EventKind, data: dict[str, Any]) -> Event:
    facts = {"attempt": 1, "launch": launch, **data}
    return Event(writer="rank0", opening=1, sequence=number, time=0, kind=kind, data=facts)
