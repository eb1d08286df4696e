"""Whether a program that ended well did all that it had said: exit status 0 alone means little.

Rank 0 journals what the program loops over, and that it left of its own accord: after the last
step, when all ranks agreed to stop, or when the program closed its session.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.causes import Ending


def judge_completion(events: Iterable[Event], *, launch: int, step: int) -> Ending:
    """How a launch ended whose ranks all left with exit status 0, and nobody asked for it.

    `events` are the attempt's, `step` is the last one that a rank completed. An early end that
    the program declared by closing its session is complete. One that it did not declare is a
    failure, from which `relaunch` goes on.
    """
    mine = [event for event in events if event.data.get("launch") == launch]
    promises = [e.data["text"] for e in mine if e.data.get("promised")]
    left = next((e.data for e in reversed(mine) if e.data.get("has_left")), None)
    if not any(event.kind is EventKind.RESUMED for event in mine):
        words = "the program ended without a Session: no steps were counted or compared"
        return Ending(state=AttemptState.COMPLETED, cause=None, evidence=(words,))
    if left is not None:
        is_short = left.get("is_whole") is False
        evidence = (f"the program closed its Session: {left['text']}",) if is_short else ()
        return Ending(state=AttemptState.COMPLETED, cause=None, evidence=evidence)
    if not promises:
        words = f"the program ended after step {step}; it had not said how many steps there are"
        return Ending(state=AttemptState.COMPLETED, cause=None, evidence=(words,))
    words = (
        f"the program ended with exit status 0 after step {step}, without session.close(), and "
        f"{promises[-1]}; `holdfast relaunch` goes on from the newest checkpoint"
    )
    return Ending(state=AttemptState.FAILED, cause=Cause.USER_ERROR, evidence=(words,))
