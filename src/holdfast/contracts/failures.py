"""How often a run has failed without a warning, as its own journals tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.states import Cause

# These come with a warning: a last checkpoint is made, and nothing is lost.
ANNOUNCED = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.OPERATOR})


@dataclass(frozen=True)
class Failures:
    """`count` unannounced failures in `trained_s` seconds of launches that are over."""

    count: int
    trained_s: float


def observe_failures(events: Iterable[Event], current: tuple[int, int]) -> Failures:
    """Fold the run's journals; `current` is the (attempt, launch) that runs now.

    A launch failed when its agent says that it crashed. Where no agent was left to say so,
    the attempt's cause decides, and without one whether the program itself said that it left.
    """
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    crashed: dict[tuple[int, int], bool] = {}
    announced: dict[int, bool] = {}
    for event in events:
        attempt, launch = event.data.get("attempt"), event.data.get("launch")
        if event.kind is EventKind.ATTEMPT_ENDED and attempt is not None:
            cause = event.data.get("cause")
            announced[attempt] = cause is None or cause in ANNOUNCED
        if attempt is None or launch is None or (attempt, launch) == current:
            continue
        key = (attempt, launch)
        first, last = spans.get(key, (event.time, event.time))
        spans[key] = min(first, event.time), max(last, event.time)
        if event.kind is EventKind.LAUNCH_ENDED:
            crashed[key] = event.data.get("ending") == "crashed"
        elif event.data.get("has_left"):
            crashed.setdefault(key, False)
    failed = [key for key in spans if crashed.get(key, not announced.get(key[0], False))]
    return Failures(len(failed), sum(last - first for first, last in spans.values()))
