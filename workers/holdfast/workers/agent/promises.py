"""Judge whether a program that ended with exit status 0 is complete.

The spec may declare the number of steps. Rank 0 journals what the program loops over, and why it
left: after the last step, when all ranks agreed to stop, or when the program closed its session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.causes import Ending

_LOOPS: Final = {"promised", "has_left"}


def judge_completion(
    events: Iterable[Event],
    *,
    launch: int,
    step: int,
    steps_total: int | None = None,
    allow_early_exit: bool = False,
) -> Ending:
    """Return how a launch ended whose ranks all exited with status 0 without a stop request.

    `events` are the attempt's, and `step` is the last one that a rank completed. `steps_total` is
    the last step by the spec, None without one. An end before the last step is incomplete, which
    is a failure, and `relaunch` continues the run. It is complete if `allow_early_exit` is set, or
    if the program declared it by closing its session and the spec has no number of steps.
    """
    mine = [event for event in events if event.data.get("launch") == launch]
    promises = [str(e.data["text"]) for e in mine if e.data.get("promised")]
    # A program may loop again. Then the end of the loop before says nothing about the last one.
    newest = next((e.data for e in reversed(mine) if _LOOPS & e.data.keys()), {})
    left = newest if newest.get("has_left") else None
    begun = [event.data for event in mine if event.kind is EventKind.RESUMED]
    if not any(data.get("counts_steps", True) for data in begun):
        return _completed("the program ended without a Session: no steps were counted or compared")
    if expected := _unmet(step, steps_total, promises, left):
        how = ", without session.close()" if left is None else ""
        message = f"the program ended with exit status 0 after step {step}{how}, {expected}"
        return _completed(f"accepted: {message}") if allow_early_exit else _incomplete(message)
    if left is not None:
        is_short = left.get("is_whole") is False
        evidence = (f"the program closed its Session: {left['text']}",) if is_short else ()
        return _completed(*evidence)
    if not promises and steps_total is None:
        return _completed(
            f"the program ended after step {step}; it had not declared how many steps there are"
        )
    return _completed()


def judge_own_completion(
    step: int, steps_total: int | None, *, counts_steps: bool, allow_early_exit: bool = False
) -> Ending:
    """Return how a launch of a program ended that writes its own checkpoints, with exit status 0.

    `step` is the last one that its output or its checkpoints show. Without `counts_steps`, only
    its checkpoints show steps, so later ones are unknown.
    """
    if steps_total is None:
        return _completed(
            f"the program ended after step {step}; the spec's [config] does not set its last step"
        )
    if step >= steps_total:
        return _completed()
    message = f"after step {step}, although the spec's [config] sets {steps_total} steps"
    if not counts_steps:
        return _completed(
            f"the program's newest checkpoint is {message}; without program.progress no later step "
            "is known"
        )
    message = f"the program ended with exit status 0 {message}"
    return _completed(f"accepted: {message}") if allow_early_exit else _incomplete(message)


def _unmet(
    step: int,
    steps_total: int | None,
    promises: list[str],
    left: Mapping[str, Any] | None,
) -> str:
    """Return the number of steps that the program did not reach, as text; empty if it did."""
    if steps_total is not None and step < steps_total:
        return f"although the spec's [config] sets {steps_total} steps"
    is_declared = left is not None and left.get("is_declared") is not False
    is_whole = left is not None and left.get("is_whole") is not False
    return f"although {promises[-1]}" if promises and not (is_whole or is_declared) else ""


def _completed(*evidence: str) -> Ending:
    return Ending(state=AttemptState.COMPLETED, cause=None, evidence=evidence)


def _incomplete(message: str) -> Ending:
    advice = (
        "continue from the newest checkpoint with `holdfast relaunch`, or accept such an end with "
        "`holdfast submit --allow-early-exit`"
    )
    evidence = (f"incomplete: {message}; {advice}",)
    return Ending(state=AttemptState.FAILED, cause=Cause.USER_ERROR, evidence=evidence)
