"""Decide on which nodes an attempt continues without lost or drained ones. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import Request
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
    left: Sequence[str] = (),
) -> NodePlan:
    """Return how an attempt of `nodes` nodes continues without the `lost` ones and those it `left`.

    `spares` nodes of its job are idle. `fits` returns whether the newest checkpoint can continue at
    a number of GPUs. A smaller size is one that `elastic` allows, in whole nodes.
    """
    names = name_gone(lost, left)
    if restarts_max == 0:
        return NodePlan(reason=f"{names}; supervision.restarts_in_place is 0")
    gone = len(lost) + len(left)
    remaining = nodes - gone + spares
    if remaining >= nodes:
        taken = counted(gone, "spare node")
        return NodePlan(way="spare", nodes=nodes, reason=f"{names}; {taken} replace them")
    per_node = spec.resources.size_per_node
    gpus = None
    if not is_single(spec):
        gpus = largest_within(spec, remaining * per_node, lambda n: n % per_node == 0 and fits(n))
    if gpus is None:
        return NodePlan(reason=f"{names}; no size of elastic fits {counted(remaining, 'node')}")
    smaller = gpus // per_node
    reason = f"{names}; {counted(smaller, 'node')} of {nodes} continue with {counted(gpus, 'GPU')}"
    return NodePlan(way="shrink", nodes=smaller, reason=reason)


def name_gone(lost: Sequence[str], left: Sequence[str]) -> str:
    """Name the nodes without which an attempt continues."""
    kinds = (("lost nodes", lost), ("nodes to leave", left))
    return "; ".join(f"{kind}: {', '.join(hosts)}" for kind, hosts in kinds if hosts)


@dataclass(frozen=True, kw_only=True)
class DrainPlan:
    """Which drained nodes an attempt leaves: none if `way` is empty.

    It then continues on `nodes` nodes. The idle nodes `released` are drained too. `reason` is for
    people, and `why` has the reasons of the operator for the nodes that are left.
    """

    reason: str = ""
    why: str = ""
    way: Way = ""
    nodes: int = 0
    leave: tuple[str, ...] = ()
    released: tuple[str, ...] = ()


def may_leave(spec: RunSpec, request: Request) -> bool:
    """Return True if an attempt may continue on other nodes than those that it began with.

    Only a program with a session stops at a step boundary without a signal.
    """
    has_others = request.spare_nodes > 0 or not is_single(spec)
    if request.program.is_watched or request.supervision.restarts_in_place == 0:
        return False
    return request.executor == "slurm" and request.nodes > 1 and has_others


def plan_departure(
    spec: RunSpec,
    *,
    drained: Mapping[str, str],
    training: Sequence[str],
    spares: Sequence[str],
    restarts_max: int,
    fits: Callable[[int], bool],
    what: str = "drained",
) -> DrainPlan:
    """Return how an attempt that trains on the hosts `training` leaves those that are drained.

    `drained` maps hosts to reasons. The first host of `training` leads and cannot be left. `fits`
    is that of `plan_nodes`, whose rules for sizes apply. If the attempt cannot do without all of
    them, it leaves as many as it can. `what` is said of these hosts.
    """
    of = f"{what} nodes: "
    released = tuple(host for host in spares if host in drained)
    found = [host for host in training if host in drained]
    if not found:
        return DrainPlan(released=released, reason=_named(of, released, drained))
    leads = found[0] == training[0]
    may_go = found[1:] if leads else found
    reason = f"{_named(of, found, drained)}; {found[0]} leads the attempt" if leads else ""
    for count in range(len(may_go), 0, -1):
        leave = tuple(may_go[:count])
        plan = plan_nodes(
            spec,
            nodes=len(training),
            lost=leave,
            spares=len(spares) - len(released),
            restarts_max=restarts_max,
            fits=fits,
        )
        rest = plan.reason.partition("; ")[2]
        reason = reason or f"{_named(of, found, drained)}; {rest}"
        if plan.way:
            return DrainPlan(
                way=plan.way,
                nodes=plan.nodes,
                leave=leave,
                released=released,
                reason=f"{_named(of, leave, drained)}; {rest}",
                why=_reasons(leave, drained),
            )
    return DrainPlan(released=released, reason=reason)


def _named(of: str, hosts: Sequence[str], drained: Mapping[str, str]) -> str:
    return f"{of}{_reasons(hosts, drained)}" if hosts else ""


def _reasons(hosts: Sequence[str], drained: Mapping[str, str]) -> str:
    """Return the hosts with their reasons: `n2 (bad DIMM), n3`."""
    return ", ".join(f"{host} ({drained[host]})" if drained[host] else host for host in hosts)


@dataclass(frozen=True, kw_only=True)
class LeavePrice:
    """What it costs to leave a slow node, and what that gains.

    Nobody knows how long a slowdown will last. So a node is left once the slowdown has cost as much
    as leaving it costs: then at most twice the least possible time is lost, whatever follows. The
    price of leaving is what launches of the run have cost before.

    `restart_s` is the time without training. The new nodes train in a time that is shorter by the
    share `gain` than now; it is 0 or less if that many nodes would be no faster.
    """

    restart_s: float
    gain: float

    def pays(self, lasted_s: float, remaining_s: float | None) -> bool:
        """Return True if leaving pays after `lasted_s` seconds of slowdown.

        `remaining_s` is how long training would take on the present nodes; None if unknown.
        """
        if self.gain <= 0 or lasted_s * self.gain < self.restart_s:
            return False
        return remaining_s is None or remaining_s * self.gain > self.restart_s


def gain_of(cost_share: float, nodes: int, left: int) -> float:
    """Return by which share a step is shorter on `left` of `nodes` nodes, without the slow one.

    The others wait `cost_share` of each step for it. The work of a step is divided by the nodes.
    """
    return 1.0 - (1.0 - cost_share) * nodes / left


def restart_price_s(events: Iterable[Event]) -> float | None:
    """Return the seconds from the last step of a launch to the first of the next one, by history.

    It is the median over the run's launches. If there was none after another, the first ones of
    attempts count, which start on fresh nodes. None without any.
    """
    started, ended, resumed = dict[Any, float](), list[float](), dict[Any, float]()
    for event in events:
        place = (event.data.get("attempt"), event.data.get("launch"))
        if event.kind is EventKind.LAUNCH_STARTED:
            started.setdefault(place, event.time)
        elif event.kind is EventKind.RESUMED:
            resumed.setdefault(place, event.time)
        elif event.kind is EventKind.LAUNCH_ENDED:
            until = event.data.get("trained_until")
            if isinstance(until, int | float):
                ended.append(max(0.0, event.time - until))
    starts = {at: resumed[at] - began for at, began in started.items() if at in resumed}
    again = [seconds for (_, launch), seconds in starts.items() if launch != 1]
    if not starts:
        return None
    return max(0.0, median(again or starts.values())) + (median(ended) if ended else 0.0)
