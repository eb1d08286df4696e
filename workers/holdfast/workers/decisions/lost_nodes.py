"""Decide on how many nodes an attempt continues after it has lost some. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.decisions.sizes import is_single, largest_within

# `spare`: idle nodes take the places of the lost ones. `shrink`: fewer nodes continue.
Way = Literal["", "spare", "shrink"]


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """How an attempt continues: on `nodes` nodes, or not at all if `way` is empty."""

    reason: str
    way: Way = ""
    nodes: int = 0


def plan_nodes(
    spec: RunSpec,
    *,
    nodes: int,
    lost: Sequence[str],
    spares: int,
    restarts_max: int,
    fits: Callable[[int], bool],
) -> NodePlan:
    """Return how an attempt of `nodes` nodes continues without the `lost` ones.

    `spares` nodes of its job are idle. `fits` returns whether the newest checkpoint can continue at
    a number of GPUs. A smaller size is one that `elastic` allows, in whole nodes.
    """
    names = f"lost nodes: {', '.join(lost)}"
    if restarts_max == 0:
        return NodePlan(reason=f"{names}; supervision.restarts_in_place is 0")
    left = nodes - len(lost) + spares
    if left >= nodes:
        taken = counted(len(lost), "spare node")
        return NodePlan(way="spare", nodes=nodes, reason=f"{names}; {taken} replace them")
    per_node = spec.resources.size_per_node
    gpus = None
    if not is_single(spec):
        gpus = largest_within(spec, left * per_node, lambda n: n % per_node == 0 and fits(n))
    if gpus is None:
        return NodePlan(reason=f"{names}; no size of elastic fits {counted(left, 'node')}")
    smaller = gpus // per_node
    reason = f"{names}; {counted(smaller, 'node')} of {nodes} continue with {counted(gpus, 'GPU')}"
    return NodePlan(way="shrink", nodes=smaller, reason=reason)
