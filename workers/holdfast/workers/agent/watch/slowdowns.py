"""Find a node that slows the others down for minutes. Pure, apart from what it remembers.

Ranks that meet in collectives take equally long for a step, so a slow node shows only in its *own*
time: the part of a step in which its main threads do not wait. The others wait for it meanwhile.
Own times differ between ranks that have other work, such as the stages of a pipeline. So each rank
is compared with what its share was before. In a job of `FROM_START_NODES` nodes, a node may be slow
from the start: if few differ from the others, these few are named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.agent.watch.stack_text import ranks_text

# With windows of ten seconds, eleven of them are less than two minutes.
WINDOWS: Final = 11
# The mean of the lowest windows counts, so that a pause of less than a minute is not a slowdown.
LOWEST: Final = 6
# A rank is slow from this mean on. The noise of one window is several hundredths.
SLOW: Final = 1.085
USUAL: Final = 1.05
# Smaller shares of a step are not worth a message.
COST_MIN: Final = 0.05
# More nodes than this share of them are not exception, but work of another kind.
NODES_SHARE: Final = 8
FROM_START_NODES: Final = 8
# What is usual follows slowly, by at most this share per window, so that a slowdown stays one.
USUAL_STEP: Final = 1 / 90
USUAL_CHANGE_MAX: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class SlowNode:
    """A node that is slow, or is no longer. Shares are of 1.

    `ranks` work `excess` longer per step than usual, compared with their peers. `cost` is the share
    of a step in which the others wait for them.
    """

    node: int
    ranks: tuple[int, ...]
    excess: float
    cost: float
    is_slow: bool = True


@dataclass
class _Seen:
    """The newest windows of a rank: its own time by that of its peers, and what it costs."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    usual: float = 0.0

    @property
    def excess(self) -> float:
        return sorted(self.ratios)[WINDOWS // 2] / self.usual - 1.0

    @property
    def cost(self) -> float:
        return sorted(self.costs)[WINDOWS // 2]

    @property
    def is_slow(self) -> bool:
        # Most ranks of most windows end here.
        if self.ratios[-1] < self.usual:
            return False
        lowest = sum(sorted(self.ratios)[:LOWEST]) / LOWEST
        return lowest >= SLOW * self.usual and self.cost >= COST_MIN

    @property
    def is_usual(self) -> bool:
        return self.excess < USUAL - 1.0

    def follow(self) -> None:
        """Let what is usual follow the newest window a little."""
        change = self.ratios[-1] / self.usual - 1.0
        change = max(-USUAL_CHANGE_MAX, min(USUAL_CHANGE_MAX, change))
        self.usual *= 1.0 + change * USUAL_STEP


class Slowdowns:
    """Names a node that slows the others down, and reports when it no longer does."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._named: dict[int, tuple[int, ...]] = {}

    def look(self, statuses: Sequence[RankStatus], ranks_per_node: int) -> list[SlowNode]:
        """Return the changes; call it once for each window of `statuses`.

        A window in which a rank does not train counts for none of them.
        """
        own = {one.rank: one.own_s for one in statuses if one.phase == "train" and one.step_s > 0}
        nodes = _by_node(own, ranks_per_node)
        if len(own) < len(statuses) or len(nodes) < 2:
            return []
        step_s = median(one.step_s for one in statuses)
        # Of many nodes, one hardly changes the median of all.
        are_many = len(nodes) >= FROM_START_NODES
        all_s = median(own.values()) if are_many else 0.0
        for node, ranks in nodes.items():
            peers_s = all_s if are_many else _peers_s(own, nodes, node)
            for rank in ranks:
                seen = self._seen.setdefault(rank, _Seen())
                seen.ratios.append(own[rank] / peers_s if peers_s > 0 else 1.0)
                seen.costs.append((own[rank] - peers_s) / step_s)
        if any(len(self._seen[rank].ratios) < WINDOWS for rank in own):
            return []
        self._learn(nodes)
        return self._changes(nodes)

    def named(self) -> list[SlowNode]:
        """Return the nodes that are slow now, by the newest windows."""
        return [self._change(node, ranks) for node, ranks in self._named.items()]

    def _learn(self, nodes: Mapping[int, Sequence[int]]) -> None:
        """Set what is usual for each rank at the first complete windows, or let it follow."""
        new = [seen for seen in self._seen.values() if not seen.usual]
        for seen in new:
            seen.usual = 1.0
        if new and not self._are_few(nodes):
            # The nodes differ by their work, and nothing is known about the time before.
            for seen in new:
                seen.usual = max(seen.excess + 1.0, 1e-6)
        for node, ranks in nodes.items():
            if node not in self._named:
                for rank in ranks:
                    self._seen[rank].follow()

    def _are_few(self, nodes: Mapping[int, Sequence[int]]) -> bool:
        odd = sum(any(not self._seen[rank].is_usual for rank in ranks) for ranks in nodes.values())
        return len(nodes) >= FROM_START_NODES and odd * NODES_SHARE <= len(nodes)

    def _changes(self, nodes: Mapping[int, Sequence[int]]) -> list[SlowNode]:
        found = {}
        for node, ranks in nodes.items():
            slow = tuple(rank for rank in ranks if self._seen[rank].is_slow)
            if slow and node not in self._named:
                found[node] = slow
        changes = []
        if (len(found) + len(self._named) - 1) * NODES_SHARE < len(nodes):
            self._named |= found
            changes = [self._change(node, ranks) for node, ranks in found.items()]
        for node, ranks in list(self._named.items()):
            if node not in nodes or all(self._seen[rank].is_usual for rank in ranks):
                del self._named[node]
                changes.append(self._change(node, ranks, is_slow=False))
        return changes

    def _change(self, node: int, ranks: tuple[int, ...], *, is_slow: bool = True) -> SlowNode:
        worst = max(ranks, key=lambda rank: self._seen[rank].excess)
        return SlowNode(
            node=node,
            ranks=ranks,
            excess=self._seen[worst].excess,
            cost=self._seen[worst].cost,
            is_slow=is_slow,
        )


def describe(found: SlowNode, host: str, *, asks: bool) -> str:
    """Return a sentence for people. With `asks`, it says how to leave the node."""
    if not found.is_slow:
        return f"{host} is as fast as usual again"
    said = (
        f"{host} is slow: {ranks_text(found.ranks)} {'work' if len(found.ranks) > 1 else 'works'} "
        f"{found.excess:.0%} longer per step than usual, and the others wait {found.cost:.0%} of "
        "each step"
    )
    return said + drain_hint(host) if asks else said


def drain_hint(host: str) -> str:
    """Return how a person leaves a node, as the end of a sentence."""
    return (
        f"; to leave the node, drain it: scontrol update nodename={host} state=drain "
        "reason=slow. A run with spare nodes or a smaller size then continues without it"
    )


def _by_node(own: Mapping[int, float], ranks_per_node: int) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(own):
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return nodes


def _peers_s(own: Mapping[int, float], nodes: Mapping[int, Sequence[int]], node: int) -> float:
    """Return the median own time of the other nodes' ranks."""
    return median(own[rank] for other, ranks in nodes.items() if other != node for rank in ranks)
