"""The rate of failures without a warning, computed from a run's journals."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.contracts.account.save_interval import Failures
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.states import Cause

# These causes come with a warning, so a last checkpoint is saved and nothing is lost.
ANNOUNCED = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.OPERATOR})


def observe_failures(events: Iterable[Event], current: tuple[int, int]) -> Failures:
    """Return the failures in a run's journals. `current`, (attempt, launch), is left out.

    A launch counts as failed when its agent recorded a crash. If the agent recorded nothing, the
    launch did not fail when the program recorded that it left. Otherwise the attempt's cause
    decides.
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
