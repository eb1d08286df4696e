"""The cost of a save, and the resulting interval: Young's and Daly's formula with bounds.

A save every W seconds costs C of each W seconds, and a failure loses W/2 on average. The sum is
least at W = sqrt(2 μ C), where μ is the mean time between unannounced failures. Announced failures
lose nothing, because a last checkpoint is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

OVERHEAD_MAX: Final = 0.03
# The assumed hours between failures of one node until the run has seen one. Large published
# training runs report about this value.
PRIOR_NODE_S: Final = 6000 * 3600.0
# Bounds of the chosen interval. The maximum limits unsaved work to an hour.
INTERVAL_MIN_S: Final = 10.0
INTERVAL_MAX_S: Final = 3600.0
# A smaller relative change of the interval is not reported.
NOTICEABLE: Final = 0.25


@dataclass(frozen=True)
class Failures:
    """`count` failures without a warning in `trained_s` seconds of ended launches."""

    count: int
    trained_s: float


@dataclass(frozen=True)
class IntervalChoice:
    """An interval and the figures that led to it. All values but `failures` are seconds."""

    interval_s: float
    mean_failure_s: float
    failures: int
    cost_s: float
    flush_s: float
    bound: str

    def differs_from(self, other: IntervalChoice | None) -> bool:
        """Return True if the change is large enough to report."""
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
    """Return μ in seconds: as measured, or without failures the prior or longer training time."""
    if seen.count:
        return max(seen.trained_s, 1.0) / seen.count
    # A run that trained longer than the assumption without a failure has disproved it.
    return max(PRIOR_NODE_S / nodes, seen.trained_s)


def choose_interval(seen: Failures, nodes: int, *, cost_s: float, flush_s: float) -> IntervalChoice:
    """Return the interval for a save that costs `cost_s` and is durable after `flush_s`."""
    mean_s = mean_failure_s(seen, nodes)
    bounds = [
        (math.sqrt(2.0 * mean_s * cost_s), "set by the formula"),
        (flush_s, "raised to the time of a flush"),
        # With frequent failures or expensive saves, the formula alone would spend more than that on
        # saves.
        (cost_s / OVERHEAD_MAX, f"raised to keep the overhead within {OVERHEAD_MAX:.0%}"),
        (INTERVAL_MIN_S, "the minimum interval"),
    ]
    interval_s, bound = max(bounds)
    # A save that needs longer than an hour to become durable cannot be made every hour.
    longest_s = max(INTERVAL_MAX_S, flush_s, cost_s / OVERHEAD_MAX)
    if interval_s > longest_s:
        interval_s, bound = longest_s, "the maximum interval"
    return IntervalChoice(interval_s, mean_s, seen.count, cost_s, flush_s, bound)
