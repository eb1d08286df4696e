"""When all nodes copy their snapshots to their neighbours: rounds of one step each. Pure.

All copies must be of the same step. So a round begins with a step that no node has reached yet, and
the next one begins when all nodes have ended this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

# For how long messages to all nodes are on their way, at least.
LEAD_S: Final = 0.5
# How much earlier a round is announced after the ranks have been too fast for some.
FACTOR_MAX: Final = 64


@dataclass(frozen=True, kw_only=True)
class RoundEnd:
    """How a round ended on one node: its neighbour holds `step`, or -1. See `node.CopyRound`."""

    step: int
    is_missed: bool


@dataclass(frozen=True, kw_only=True)
class CopyState:
    """The present round `number`, and `keep`, the step that all neighbours held last, or -1.

    `factor` grows while rounds are missed.
    """

    number: int = 0
    keep: int = -1
    factor: int = 1

    def after(self, ends: Sequence[RoundEnd]) -> CopyState:
        """Return the state after all nodes have ended the round.

        A node without a neighbour that has memory protects nothing, and does not hinder the others.
        """
        steps = {end.step for end in ends if end.step >= 0}
        if len(steps) > 1 or any(end.is_missed for end in ends):
            return replace(self, factor=min(2 * self.factor, FACTOR_MAX))
        return replace(self, factor=1, keep=max(steps, default=self.keep))

    def next(self, newest: int, step_s: float, poll_s: float) -> CopyState:
        """Return the next round. `newest` is the newest finished step that a node has reported.

        A step takes `step_s` seconds, and a report may be older than `poll_s`.
        """
        ahead = 1
        if step_s > 0:
            ahead = max(1, math.ceil(self.factor * (LEAD_S + poll_s) / step_s))
        return replace(self, number=max(newest + ahead, self.number + 1))
