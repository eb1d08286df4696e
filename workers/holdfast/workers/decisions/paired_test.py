"""Judge the measurements of a paired test: which node or which link is slow. Pure functions.

Each node exchanges data with two others. If both exchanges are slow, the node is slow, by its
adapter or its cable. If only one is, the link between the two is slow, and either of them may be
the reason. The measurements cannot tell more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

# A piece of work is slow from this multiple of the other nodes' median on.
WORK_SLOW: Final = 1.10
# An exchange is slow below this share of the other pairs' median. Rates vary by some hundredths.
RATE_SLOW: Final = 0.75
# If more than this part of the nodes differ, the network or the work differs by design.
ODD_SHARE: Final = 8


@dataclass(frozen=True, kw_only=True)
class PairedResults:
    """What the ranks measured after `step`, by node; 0.0 is a value that is missing.

    `pair_rates` are in MB/s, between each node and the next one.
    """

    step: int
    host_times: Sequence[float]
    device_times: Sequence[float]
    pair_rates: Sequence[float]

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> PairedResults | None:
        """Return the results in a journal line, or None if it has none for two nodes or more."""
        lists = [_numbers(facts.get(n)) for n in ("host_times", "device_times", "pair_rates")]
        host, device, rates = lists
        if len(host) < 2 or len(device) != len(host) or len(rates) not in {1, len(host)}:
            return None
        step = int(facts.get("step") or 0)
        return cls(step=step, host_times=host, device_times=device, pair_rates=rates)


@dataclass(frozen=True, kw_only=True)
class PairedVerdict:
    """The nodes that the test proved slow, with the proofs, and the pairs whose link is slow.

    `working` are those of the nodes whose own work is slow, and not only their links.
    """

    nodes: Mapping[int, str]
    pairs: Mapping[tuple[int, int], str]
    working: frozenset[int] = frozenset()


def judge(results: PairedResults) -> PairedVerdict:
    """Return which nodes and which links are slow."""
    nodes: dict[int, str] = {}
    _find_slow_work(nodes, results.host_times, "Python")
    _find_slow_work(nodes, results.device_times, "its device")
    working = frozenset(nodes)
    linked, pairs = _find_slow_links(results.pair_rates)
    for node, proof in linked.items():
        nodes[node] = f"{nodes[node]}, and {proof}" if node in nodes else proof
    count = len(results.host_times)
    return PairedVerdict(
        nodes=nodes if _are_few(len(nodes), count) else {},
        pairs=pairs if _are_few(len(pairs), count) else {},
        working=working,
    )


def _are_few(odd: int, count: int) -> bool:
    """Return True for one of any number, and for an exception among many."""
    return (odd - 1) * ODD_SHARE < count


def _find_slow_work(nodes: dict[int, str], times: Sequence[float], where: str) -> None:
    for node, own_s in enumerate(times):
        others = [one for other, one in enumerate(times) if other != node and one > 0]
        if not others or own_s < WORK_SLOW * (usual_s := median(others)):
            continue
        proof = f"the same work takes {own_s / usual_s - 1:.0%} longer on {where} than elsewhere"
        nodes[node] = f"{nodes[node]}, and {proof}" if node in nodes else proof


def _find_slow_links(
    rates: Sequence[float],
) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """Return the nodes whose two links are slow, and the pairs of which only one link is.

    A node that paused during the test has no rates, which proves nothing.
    """
    count, nodes = len(rates), dict[int, str]()
    if count < 3:
        # The one link of two nodes cannot be compared.
        return {}, {}
    for node in range(count):
        own = (rates[node - 1], rates[node])
        mine = {node, (node - 1) % count}
        others = [one for pair, one in enumerate(rates) if pair not in mine and one > 0]
        if others and min(own) > 0 and max(own) < RATE_SLOW * (usual := median(others)):
            nodes[node] = (
                f"both its links are slow, {own[0]:.0f} and {own[1]:.0f} MB/s, others {usual:.0f}"
            )
    pairs = {}
    for pair, rate in enumerate(rates):
        ends = (pair, (pair + 1) % count)
        others = [
            one
            for other, one in enumerate(rates)
            if one > 0 and other != pair and other not in nodes and (other + 1) % count not in nodes
        ]
        if nodes.keys() & set(ends) or not others or rate <= 0:
            continue
        if rate < RATE_SLOW * (usual := median(others)):
            pairs[ends] = f"{rate:.0f} MB/s, other links {usual:.0f}"
    return nodes, pairs


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list):
        return []
    return [float(one) for one in values if isinstance(one, int | float) and 0 <= one < 1e9]
