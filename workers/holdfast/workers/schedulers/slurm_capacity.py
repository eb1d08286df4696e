"""Compute the GPUs a job could have from Slurm's nodes, reservations and QOS, purely."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.spec.resources import Resources, gpu_kind, gpus_of
from holdfast.workers.schedulers import slurm_client

# The marks that Slurm appends to a state: not responding, powering up, rebooting, planned etc.
_STATE_MARKS: Final = "*~#!%$@^-+"
_SILENT_MARK: Final = "*"
# Base states and flags in which a node starts no job. A powered-down node is not listed here,
# because Slurm powers it up for the job.
_UNUSABLE: Final = frozenset(
    {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "UNKNOWN", "ERROR"}
    | {"NO_RESPOND", "NOT_RESPONDING", "POWERING_DOWN", "POWER_DOWN", "INVAL", "INVALID_REG"}
    | {"REBOOT_REQUESTED", "REBOOT_ISSUED", "BLOCKED"}
)
# States that reserve a node for the jobs of a reservation.
_KEPT: Final = frozenset({"RESERVED", "RESV", "MAINT"})
_TOKEN: Final = re.compile(r"[A-Za-z0-9_.:/\-]+|[&|()]")
_COUNT: Final = re.compile(r"\*[0-9]+")
_GPU_TRES: Final = re.compile(r"(?:^|,)gres/gpu=([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What our job needs of a node. `reserved` is None without a reservation.

    With `whole`, the job shares no node with other jobs. If `is_closed`, no partition of the job
    starts jobs now. `named` are all partitions that the job may run in, closed ones too.
    """

    partitions: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    gpu_kind: str = ""
    constraint: str = ""
    reserved: frozenset[str] | None = None
    whole: bool = False
    is_closed: bool = False


def wanted_of(
    resources: Resources,
    reserved: Collection[str] | None = None,
    partitions: Sequence[Mapping[str, str]] = (),
) -> Wanted:
    """Return what a node must offer.

    `reserved` are the nodes of the spec's reservation. `partitions` are all partitions as Slurm
    shows them.
    """
    named = frozenset((resources.partition or "").split(",")) - {""}
    closed = {one.get("PartitionName") for one in partitions if one.get("State", "UP") != "UP"}
    mine = slurm_client.chosen_partitions(resources, partitions) or [{}]
    default = {one.get("PartitionName", "") for one in mine} - {""}
    return Wanted(
        partitions=named - closed,
        named=named or frozenset(default),
        is_closed=bool(named) and named <= closed,
        gpu_kind=resources.gpu_type or gpu_kind(resources.gres or ""),
        constraint=resources.constraint or "",
        reserved=None if reserved is None else frozenset(reserved),
        whole=all(slurm_client.takes_whole_nodes(resources, fields) for fields in mine),
    )


@dataclass(frozen=True, kw_only=True)
class Room:
    """The nodes that a job of `resources` may use, and how many GPUs it could have on each.

    `free` counts the GPUs that it could have now, `up` all GPUs of the nodes that start jobs, and
    `has` all GPUs of every node, also of those that are down. `required` are the hosts of the
    spec's `nodelist`. `allowed` is the most GPUs under a QOS, or None without a limit. `problem` is
    why that limit is unknown. Within `notice_s` seconds, Slurm reports that a lost node is down.
    """

    resources: Resources
    free: Mapping[str, int]
    up: Mapping[str, int]
    has: Mapping[str, int]
    required: frozenset[str] = frozenset()
    allowed: int | None = None
    problem: str = ""
    notice_s: float = 0.0

    def free_gpus(self, exclude: Collection[str] = ()) -> int | None:
        """Return the size of the largest job that could start now without the hosts `exclude`.

        None if GPUs do not limit the job, or if the limit of its QOS is unknown.
        """
        if self.problem:
            return None
        free = [gpus for host, gpus in self.free.items() if host not in exclude]
        fit = gpus_that_fit(free, self.resources)
        return fit if fit is None or self.allowed is None else min(fit, self.allowed)

    def largest_job(self, exclude: Collection[str] = (), *, is_up: bool = False) -> int:
        """Return the size of the largest job on all nodes without the hosts `exclude`.

        With `is_up`, only nodes that start jobs count. Other jobs are ignored.
        """
        if not self.required.isdisjoint(exclude):
            return 0
        nodes = self.up if is_up else self.has
        return _largest(
            [gpus for host, gpus in nodes.items() if host not in exclude], self.resources
        )


def room_of(
    nodes: Sequence[Mapping[str, str]],
    resources: Resources,
    wanted: Wanted,
    held: Mapping[str, int],
    *,
    allowed: int | None = None,
    problem: str = "",
    notice_s: float = 0.0,
) -> Room:
    """Return the room on `nodes`, as Slurm shows them. `held` maps hosts to our own job's GPUs."""
    mine = {node.get("NodeName", ""): node for node in nodes if _matches(node, wanted)}
    has = {host: gpus_of(node.get("Gres", ""), wanted.gpu_kind) for host, node in mine.items()}
    return Room(
        resources=resources,
        free={host: free_gpus(node, wanted, held.get(host, 0)) for host, node in mine.items()},
        up={host: gpus for host, gpus in has.items() if _is_up(mine[host], wanted)},
        has=has,
        required=frozenset(slurm_client.expand_hosts(str(resources.extra.get("nodelist", "")))),
        allowed=allowed,
        problem=problem,
        notice_s=notice_s,
    )


def free_gpus(node: Mapping[str, str], wanted: Wanted, held: int = 0) -> int:
    """Return the GPUs of one node that a job could have now.

    `held` are GPUs of the node that our own job has and will release before that.
    """
    if wanted.is_closed or not _matches(node, wanted) or not _is_up(node, wanted):
        return 0
    if wanted.partitions and not wanted.partitions & _partitions_of(node):
        return 0
    if wanted.whole and not held and node.get("CPUAlloc", "0") != "0":
        return 0
    has = gpus_of(node.get("Gres", ""), wanted.gpu_kind)
    used = gpus_of(node.get("GresUsed", ""), wanted.gpu_kind)
    return max(has - used + held, 0)


def _is_up(node: Mapping[str, str], wanted: Wanted) -> bool:
    """Return True if the node starts jobs of ours, perhaps after the jobs that it runs now."""
    states = _states_of(node)
    return not states & _UNUSABLE and (wanted.reserved is not None or not states & _KEPT)


def _matches(node: Mapping[str, str], wanted: Wanted) -> bool:
    """Return True if the node may run the job when it is up and free."""
    if "FUTURE" in _states_of(node):
        return False
    if wanted.reserved is not None and node.get("NodeName", "") not in wanted.reserved:
        return False
    if wanted.named and not wanted.named & _partitions_of(node):
        return False
    features = node.get("ActiveFeatures", "")
    return satisfies(wanted.constraint, set(features.split(",")))


def _states_of(node: Mapping[str, str]) -> set[str]:
    shown = node.get("State", "").upper()
    states = {state.strip(_STATE_MARKS) for state in shown.split("+")}
    return states | ({"NOT_RESPONDING"} if _SILENT_MARK in shown else set())


# States of a node that runs its jobs and starts no others.
_DRAINED: Final = frozenset({"DRAIN", "DRAINED", "DRAINING"})
_GONE: Final = frozenset({"DOWN", "FAIL", "FAILING", "NO_RESPOND", "NOT_RESPONDING"})
_SET_BY: Final = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]$")
REASON_MAX: Final = 300


def drained_hosts(nodes: Sequence[Mapping[str, str]], hosts: Collection[str]) -> dict[str, str]:
    """Return those of `hosts` that are drained, with the reason that their operator gave.

    A node that is down is none of them, because its agents no longer answer.
    """
    found = {}
    for node in nodes:
        states, name = _states_of(node), node.get("NodeName", "")
        if name in hosts and states & _DRAINED and not states & _GONE:
            reason = _SET_BY.sub("", node.get("Reason", ""))
            found[name] = plain_line(reason)[:REASON_MAX]
    return found


def _partitions_of(node: Mapping[str, str]) -> set[str]:
    return set(node.get("Partitions", "").split(","))


def satisfies(constraint: str, features: Collection[str]) -> bool:
    """Return True if a node with `features` satisfies Slurm's `--constraint` expression.

    Supports `&` and `,` for and, `|` for or, and parentheses. Counts (`a*2`) and the rule that all
    nodes take the same branch of `[a|b]` concern several nodes and are ignored for one node. An
    expression that cannot be parsed excludes no node.
    """
    text = _COUNT.sub("", constraint).replace("[", "(").replace("]", ")").replace(",", "&")
    if not text.strip():
        return True
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        return True
    try:
        answer, rest = _any_of(tokens, features)
    except IndexError:
        return True
    return answer if not rest else True


def _any_of(tokens: Sequence[str], features: Collection[str]) -> tuple[bool, Sequence[str]]:
    """Return the value of `a | b | …` at the start of `tokens`, and the remaining tokens."""
    answer, rest = _all_of(tokens, features)
    while rest and rest[0] == "|":
        right, rest = _all_of(rest[1:], features)
        answer = answer or right
    return answer, rest


def _all_of(tokens: Sequence[str], features: Collection[str]) -> tuple[bool, Sequence[str]]:
    answer, rest = _one_of(tokens, features)
    while rest and rest[0] == "&":
        right, rest = _one_of(rest[1:], features)
        answer = answer and right
    return answer, rest


def _one_of(tokens: Sequence[str], features: Collection[str]) -> tuple[bool, Sequence[str]]:
    if tokens[0] == "(":
        answer, rest = _any_of(tokens[1:], features)
        return answer, rest[1:]
    return tokens[0] in features, tokens[1:]


def gpus_under_qos(
    limits: Mapping[str, str], in_use: Sequence[tuple[str, str]], user: str, held: int = 0
) -> int | None:
    """Return the GPUs that a QOS still allows `user` in one job; None if it has no limit.

    `limits` are the QOS's `GrpTRES`, `MaxTRES` and `MaxTRESPU` as sacctmgr prints them. `in_use`
    has the user and allocated TRES of each job in it. `held` are our own GPUs to be released.
    """
    by_all = sum(_gpus_of_tres(tres) or 0 for _, tres in in_use) - held
    by_user = sum(_gpus_of_tres(tres) or 0 for name, tres in in_use if name == user) - held
    used = {"GrpTRES": by_all, "MaxTRES": 0, "MaxTRESPU": by_user}
    tops = {name: _gpus_of_tres(limits.get(name, "")) for name in used}
    left = [top - used[name] for name, top in tops.items() if top is not None]
    return max(min(left), 0) if left else None


def _gpus_of_tres(tres: str) -> int | None:
    """Return the GPUs of any kind in `cpu=2,gres/gpu=4`, or None if it names none."""
    found = _GPU_TRES.search(tres)
    return int(found[1]) if found else None


def gpus_that_fit(free: Sequence[int], resources: Resources) -> int | None:
    """Return the size of the largest job on nodes with `free` GPUs; None if GPUs do not limit it.

    A job on several nodes needs the spec's full count on each of them. A job on one node may use a
    part, unless the spec's GRES sets the count per node.
    """
    return _largest(free, resources) if resources.gpus_on_node else None


def _largest(counts: Sequence[int], resources: Resources) -> int:
    wanted = resources.gpus_on_node
    whole = sum(1 for count in counts if count >= wanted)
    if whole or resources.gres or not wanted:
        return whole * resources.size_per_node
    return max(counts, default=0)
