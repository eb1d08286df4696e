"""Compute the GPUs a job could have now from Slurm's nodes, reservations and QOS, purely."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.node_share import gpu_kind, gpus_of
from holdfast.contracts.spec_resources import Resources
from holdfast.workers.slurm_client import chosen_partitions, takes_whole_nodes

# The marks that Slurm appends to a state: not responding, powering up, rebooting, planned etc.
_STATE_MARKS: Final = "*~#!%$@^-+"
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
    starts jobs now.
    """

    partitions: frozenset[str] = frozenset()
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
    mine = chosen_partitions(resources, partitions) or [{}]
    return Wanted(
        partitions=named - closed,
        is_closed=bool(named) and named <= closed,
        gpu_kind=resources.gpu_type or gpu_kind(resources.gres or ""),
        constraint=resources.constraint or "",
        reserved=None if reserved is None else frozenset(reserved),
        whole=all(takes_whole_nodes(resources, fields) for fields in mine),
    )


def free_gpus(node: Mapping[str, str], wanted: Wanted, held: int = 0) -> int:
    """Return the GPUs of one node that a job could have now.

    `held` are GPUs of the node that our own job has and will release before that.
    """
    if not _is_usable(node, wanted):
        return 0
    if wanted.whole and not held and node.get("CPUAlloc", "0") != "0":
        return 0
    has = gpus_of(node.get("Gres", ""), wanted.gpu_kind)
    used = gpus_of(node.get("GresUsed", ""), wanted.gpu_kind)
    return max(has - used + held, 0)


def _is_usable(node: Mapping[str, str], wanted: Wanted) -> bool:
    states = {state.strip(_STATE_MARKS) for state in node.get("State", "").upper().split("+")}
    if wanted.is_closed or states & _UNUSABLE:
        return False
    if wanted.reserved is None:
        if states & _KEPT:
            return False
    elif node.get("NodeName", "") not in wanted.reserved:
        return False
    theirs = set(node.get("Partitions", "").split(","))
    if wanted.partitions and not wanted.partitions & theirs:
        return False
    features = node.get("ActiveFeatures", "")
    return satisfies(wanted.constraint, set(features.split(",")))


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
    wanted = resources.gpus_on_node
    if not wanted:
        return None
    whole = sum(1 for count in free if count >= wanted)
    if whole or resources.gres:
        return whole * resources.gpus_per_node
    return max(free, default=0)
