"""Which node keeps the copies of which other node's snapshots. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


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
