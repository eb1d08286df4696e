"""Decide which drained nodes an attempt leaves, and on which it continues. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.contracts.records.attempt import Request
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.decisions.lost_nodes import Way, plan_nodes
from holdfast.workers.decisions.sizes import is_single


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
) -> DrainPlan:
    """Return how an attempt that trains on the hosts `training` leaves those that are drained.

    `drained` maps hosts to reasons. The first host of `training` leads and cannot be left. `fits`
    is that of `plan_nodes`, whose rules for sizes apply. If the attempt cannot do without all of
    them, it leaves as many as it can.
    """
    released = tuple(host for host in spares if host in drained)
    found = [host for host in training if host in drained]
    if not found:
        return DrainPlan(released=released, reason=_named(released, drained))
    leads = found[0] == training[0]
    may_go = found[1:] if leads else found
    reason = f"{_named(found, drained)}; {found[0]} leads the attempt" if leads else ""
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
        reason = reason or f"{_named(found, drained)}; {rest}"
        if plan.way:
            return DrainPlan(
                way=plan.way,
                nodes=plan.nodes,
                leave=leave,
                released=released,
                reason=f"{_named(leave, drained)}; {rest}",
                why=_reasons(leave, drained),
            )
    return DrainPlan(released=released, reason=reason)


def _named(hosts: Sequence[str], drained: Mapping[str, str]) -> str:
    return f"drained nodes: {_reasons(hosts, drained)}" if hosts else ""


def _reasons(hosts: Sequence[str], drained: Mapping[str, str]) -> str:
    """Return the hosts with their reasons: `n2 (bad DIMM), n3`."""
    return ", ".join(f"{host} ({drained[host]})" if drained[host] else host for host in hosts)
