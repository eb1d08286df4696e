"""Judge whether a program that ended with exit status 0 is complete.

Rank 0 journals what the program loops over, and why it left: after the last step, when all ranks
agreed to stop, or when the program closed its session.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.causes import Ending


def judge_completion(events: Iterable[Event], *, launch: int, step: int) -> Ending:
    """Return how a launch ended whose ranks all exited with status 0 without a stop request.

    `events` are the attempt's, and `step` is the last one that a rank completed. An early end is
    complete if the program declared it by closing its session. Otherwise it is a failure, and
    `relaunch` continues the run.
    """
    mine = [event for event in events if event.data.get("launch") == launch]
    promises = [e.data["text"] for e in mine if e.data.get("promised")]
    left = next((e.data for e in reversed(mine) if e.data.get("has_left")), None)
    if not any(event.kind is EventKind.RESUMED for event in mine):
        return _completed("the program ended without a Session: no steps were counted or compared")
    if left is not None:
        is_short = left.get("is_whole") is False
        evidence = (f"the program closed its Session: {left['text']}",) if is_short else ()
        return _completed(*evidence)
    if not promises:
        return _completed(
            f"the program ended after step {step}; it had not declared how many steps there are"
        )
    message = (
        f"the program ended with exit status 0 after step {step}, without session.close(), "
        f"although {promises[-1]}; continue from the newest checkpoint with `holdfast relaunch`"
    )
    return Ending(state=AttemptState.FAILED, cause=Cause.USER_ERROR, evidence=(message,))


def _completed(*evidence: str) -> Ending:
    return Ending(state=AttemptState.COMPLETED, cause=None, evidence=evidence)
