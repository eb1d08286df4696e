"""Which node keeps copies of which other node's snapshots, and when they are made. Pure functions.

All copies must be of the same step. So a round begins with a step that no node has reached yet, and
the next one begins when all nodes have ended this one.
"""

from __future__ import annotations

import math
from collections import Counter
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


def choose_neighbours(switches: Sequence[str]) -> list[int]:
    """Return for each of two or more nodes another one, so that each keeps one node's copies.

    `switches` has the path of switches above each node, or '' if unknown. The neighbour is below
    another switch, so that the loss of a switch does not take both. Where one switch has more than
    half of the nodes, some of its nodes have a neighbour below the same switch.
    """
    nodes = range(len(switches))
    order = sorted(nodes, key=lambda node: (switches[node], node))
    largest = max(Counter(switches).values(), default=0)
    # All nodes of one switch are together in the order. A shift by the size of the largest such
    # group leads out of each group.
    shift = largest if largest < len(order) else 1
    return [neighbour for _, neighbour in sorted(_shifted(order, shift))]


def _shifted(order: Sequence[int], shift: int) -> list[tuple[int, int]]:
    count = len(order)
    return [(node, order[(at + shift) % count]) for at, node in enumerate(order)]
