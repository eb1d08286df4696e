"""How long the last save of an attempt will take, from what the run's saves have taken. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.journal import Event, EventKind

# The slowest of this many saves is expected: storage that others use has bad minutes.
SAVES_RECENT: Final = 10
# What is planned for beyond the forecast, and what a stop takes besides: agreement and leaving.
FACTOR: Final = 1.25
MARGIN_S: Final = 10.0
# A step that took longer had an evaluation in it, which a stop does not wait for twice.
STEP_S_MAX: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class FlushForecast:
    """`seconds` from the last step to the commit, by the slowest of `saves` recent saves."""

    seconds: float
    saves: int

    @property
    def needed_s(self) -> float:
        """The grace within which a flush can be promised."""
        return FACTOR * self.seconds


def forecast_flush(events: Iterable[Event]) -> FlushForecast | None:
    """From the `staged` and `committed` lines of a run, oldest first; None before any save."""
    blocked: dict[str, float] = {}
    took: list[float] = []
    for event in events:
        name = str(event.data.get("checkpoint"))
        if event.kind is EventKind.STAGED:
            blocked[name] = _duration(event.data.get("blocked_s")) or 0.0
        elif event.kind is EventKind.COMMITTED:
            flush_s = _duration(event.data.get("flush_s"))
            # A snapshot was never staged for a flush: it waited in memory until the ranks died.
            if flush_s is not None and name in blocked:
                took.append(blocked.pop(name) + flush_s)
    recent = took[-SAVES_RECENT:]
    return FlushForecast(seconds=max(recent), saves=len(recent)) if recent else None


def stop_lead_s(forecast: FlushForecast | None, *, grace_s: float, step_s: float = 0.0) -> float:
    """Seconds before the end of a job at which its stop must begin.

    Without a forecast the grace stands for it. `step_s` is what a step takes: ranks finish the
    one that they are in, and the next where they cannot agree on the first.
    """
    flush_s = forecast.needed_s if forecast else grace_s
    return flush_s + 2.0 * min(step_s, STEP_S_MAX) + MARGIN_S


def grace_warnings(
    forecast: FlushForecast | None, *, grace_s: float, giver: str = "", given_s: float | None
) -> list[str]:
    """What people should know of the grace period before they rely on it.

    `grace_s` is the spec's word, `given_s` what the scheduler gives by the word of `giver`,
    a partition or a QOS; None where it preempts nobody or cannot be asked.
    """
    warnings = []
    if given_s is not None and given_s < grace_s:
        warnings.append(
            f"{giver} gives a preempted job {given_s:.0f} s, and "
            f"supervision.grace_s says {grace_s:.0f} s: set it to what is given"
        )
    shortest_s = grace_s if given_s is None else min(grace_s, given_s)
    if forecast is not None and forecast.needed_s > shortest_s:
        warnings.append(
            f"a grace of {shortest_s:.0f} s is too short for the last flush: the slowest of the "
            f"last {forecast.saves} saves took {forecast.seconds:.1f} s, and {FACTOR:g} times that "
            f"is {forecast.needed_s:.1f} s. A preemption may lose the steps since the last "
            "checkpoint: ask for a longer grace, for faster storage, or for shorter intervals"
        )
    return warnings


def _duration(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < math.inf else None
