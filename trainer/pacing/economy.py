"""What a save costs training, and the interval that follows: Young's and Daly's formula, bounded.

A save every W seconds costs C of each W, and a failure loses W/2 on average: the sum is least at
W = sqrt(2 μ C), with μ the mean time between failures that nobody announced. Announced ones lose
nothing, since a last checkpoint is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.failures import Failures

OVERHEAD_MAX: Final = 0.03
# One failure in so many hours of one node, while the run has seen none: about what large
# published training runs report.
PRIOR_NODE_S: Final = 6000 * 3600.0
# Whatever the formula says: not more often than this, and an hour's work is always on disk.
INTERVAL_MIN_S: Final = 10.0
INTERVAL_MAX_S: Final = 3600.0
# A choice that differs by less from the one that was told is not worth a line.
NOTICEABLE: Final = 0.25


@dataclass(frozen=True)
class Choice:
    """An interval in seconds, and the figures that led to it, all in seconds but `failures`."""

    interval_s: float
    mean_failure_s: float
    failures: int
    cost_s: float
    flush_s: float
    bound: str

    def differs_from(self, other: Choice | None) -> bool:
        """True when people should hear of it."""
        if other is None:
            return True
        return abs(self.interval_s - other.interval_s) > NOTICEABLE * other.interval_s

    def __str__(self) -> str:
        seen = f"{self.failures} unannounced failures so far" if self.failures else "none so far"
        return (
            f"a checkpoint every {self.interval_s:.0f} s: mean time between failures "
            f"{self.mean_failure_s:.0f} s ({seen}), a save costs training {self.cost_s:.3f} s and "
            f"is durable after {self.flush_s:.1f} s; {self.bound}"
        )


def mean_failure_s(seen: Failures, nodes: int) -> float:
    """μ in seconds: as seen, or the prior for so many nodes, or longer when none came by then."""
    if seen.count:
        return max(seen.trained_s, 1.0) / seen.count
    return max(PRIOR_NODE_S / nodes, seen.trained_s)


def choose_interval(seen: Failures, nodes: int, *, cost_s: float, flush_s: float) -> Choice:
    """The interval for a save that costs training `cost_s` and takes `flush_s` to be durable."""
    mean_s = mean_failure_s(seen, nodes)
    bounds = [
        (math.sqrt(2.0 * mean_s * cost_s), "the formula's own value"),
        (flush_s, "held up by the flush"),
        (cost_s / OVERHEAD_MAX, f"held up by the budget of {OVERHEAD_MAX:.0%}"),
        (INTERVAL_MIN_S, "the shortest that is ever chosen"),
    ]
    interval_s, bound = max(bounds)
    longest_s = max(INTERVAL_MAX_S, flush_s, cost_s / OVERHEAD_MAX)
    if interval_s > longest_s:
        interval_s, bound = longest_s, "the longest that is ever chosen"
    return Choice(interval_s, mean_s, seen.count, cost_s, flush_s, bound)


class StepMeter:
    """Times steps, those beside a flush apart, between two looks. Grows with nothing."""

    def __init__(self, now: float) -> None:
        self._entered_at = now
        self._steps = [0, 0]
        self._seconds = [0.0, 0.0]

    def leave(self, now: float, *, is_flushing: bool) -> None:
        """A step is complete."""
        self._steps[is_flushing] += 1
        self._seconds[is_flushing] += now - self._entered_at
        self._entered_at = now

    def enter(self, now: float) -> None:
        """The next step begins; what was done in between belongs to none."""
        self._entered_at = now

    @property
    def step_s(self) -> float:
        """Mean seconds of a step since the last `restart`; 0 when there was none."""
        steps = sum(self._steps)
        return sum(self._seconds) / steps if steps else 0.0

    @property
    def slowed_s(self) -> float:
        """Seconds by which flushes made steps longer, as far as both kinds were seen."""
        if not all(self._steps):
            return 0.0
        quiet_s = self._seconds[False] / self._steps[False]
        return max(0.0, self._seconds[True] - self._steps[True] * quiet_s)

    def restart(self) -> None:
        """Begin to count again: the pace may have changed."""
        self._steps, self._seconds = [0, 0], [0.0, 0.0]
