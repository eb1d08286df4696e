"""How long ranks are silent in normal operation, measured per phase and kept for later attempts.

A silence is the time between two signs of life of a rank: the duration of a step while it trains,
otherwise the time until its next beat or phase. This module is pure: `rank_watch` feeds it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.contracts.disk.bounds import Count, Seconds
from holdfast.contracts.records.documents import Document

WINDOW: Final = 256
# Once an attempt has this many silences, it no longer needs those of earlier attempts.
OWN_ENOUGH: Final = 32
# A rank is slow if its own time of a step is this many times that of its peers, and by at least
# this share of a step longer: less is noise, whatever the factor.
SLOW_FACTOR: Final = 1.5
SLOW_SHARE: Final = 0.1


class PhaseTimes(Document):
    """The silences of one phase, in seconds. `count` is the number of measured silences.

    `recurring_s` is the longest one that occurred more than once in the run's life.
    """

    count: Count
    p50_s: Seconds
    p99_s: Seconds
    recurring_s: Seconds = 0.0


class Calibration:
    """The newest `WINDOW` silences of each phase, and the times of earlier attempts."""

    def __init__(self, prior: Mapping[str, PhaseTimes] | None = None, ranks: int = 1) -> None:
        """`ranks` are measured together: one event causes a silence of each of them."""
        self._prior = dict(prior or {})
        self._ranks = ranks
        self._longest: dict[str, list[float]] = {}
        self._own: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}
        self._known: dict[str, PhaseTimes] = {}

    def add(self, phase: str, silences_s: Sequence[float]) -> None:
        """Add silences of `phase`, in seconds."""
        if silences_s:
            self._own.setdefault(phase, deque(maxlen=WINDOW)).extend(silences_s)
            self._counts[phase] = self._counts.get(phase, 0) + len(silences_s)
            longest = [*self._longest.get(phase, ()), *silences_s]
            # All ranks wait for the same event, so a longest silence counts once for all of them.
            # The next one after those shows what recurs.
            self._longest[phase] = heapq.nlargest(self._ranks + 1, longest)
            self._known.pop(phase, None)

    def times(self, phase: str) -> PhaseTimes | None:
        """Return what is known about a phase, or None if it was never seen to end."""
        if phase not in self._own:
            return self._prior.get(phase)
        if phase not in self._known:
            longest = self._longest[phase]
            recurring_s = longest[-1] if len(longest) > self._ranks else 0.0
            own = _summary(self._own[phase], self._counts[phase], recurring_s)
            self._known[phase] = _joined(own, self._prior.get(phase))
        return self._known[phase]

    def summary(self) -> dict[str, PhaseTimes]:
        """Return all known times, for the heartbeat and so for later attempts."""
        found = {phase: self.times(phase) for phase in sorted({*self._prior, *self._own})}
        return {phase: times for phase, times in found.items() if times is not None}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of `ordered` (ascending, not empty) do not exceed."""
    index = -(-share * len(ordered) // 1) - 1
    return ordered[max(0, min(len(ordered) - 1, int(index)))]


def _summary(silences_s: Sequence[float], count: int, recurring_s: float) -> PhaseTimes:
    ordered = sorted(silences_s)
    return PhaseTimes(
        count=count,
        p50_s=round(percentile(ordered, 0.5), 6),
        p99_s=round(percentile(ordered, 0.99), 6),
        recurring_s=round(recurring_s, 6),
    )


def _joined(own: PhaseTimes, prior: PhaseTimes | None) -> PhaseTimes:
    """Return the attempt's own times; while they are few, the longer of both."""
    if prior is None:
        return own
    recurring_s = max(own.recurring_s, prior.recurring_s)
    # An attempt with few silences has not seen the rare long ones, such as an evaluation.
    if own.count >= OWN_ENOUGH:
        return own.model_copy(update={"recurring_s": recurring_s})
    return PhaseTimes(
        count=prior.count + own.count,
        p50_s=own.p50_s,
        p99_s=max(own.p99_s, prior.p99_s),
        recurring_s=recurring_s,
    )


def scaled(prior: Mapping[str, PhaseTimes], factor: float) -> dict[str, PhaseTimes]:
    """Scale the times for other ranks: with fewer of them, each works on more of a batch."""
    return {
        phase: PhaseTimes(
            count=t.count,
            p50_s=t.p50_s * factor,
            p99_s=t.p99_s * factor,
            recurring_s=t.recurring_s * factor,
        )
        for phase, t in prior.items()
    }
