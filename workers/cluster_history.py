"""The free GPUs of a partition in the past, from Slurm's accounting: a trace for `simulate`.

Every job of every user counts with its GPUs while it ran, and every node with all its GPUs while it
was down or drained. The nodes are those of today.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Final

from holdfast.contracts.errors import SpecError
from holdfast.contracts.node_share import gpu_kind, gpus_of
from holdfast.contracts.spec_resources import Resources
from holdfast.workers import slurm_client
from holdfast.workers.slurm_client import Ask, call, chosen_partitions, expand_hosts, parse_time
from holdfast.workers.traces import Trace

GAP_S: Final = 300.0
DAY_S: Final = 24 * 3600.0
# A month of a large cluster takes a while.
ANSWER_S_MAX: Final = 300.0
JOB_FIELDS: Final = ("Start", "End", "AllocTRES", "NodeList")
EVENT_FIELDS: Final = ("NodeName", "TimeStart", "TimeEnd")


class _Use:
    """The GPUs in use at each tick, of nodes with `gpus` GPUs each."""

    def __init__(self, gpus: Mapping[str, int], since: float, until: float) -> None:
        self._gpus, self._since = gpus, since
        self.ticks = [0.0] * max(1, math.ceil((until - since) / GAP_S))

    def add(self, began: float, ended: float, nodes: Mapping[str, float]) -> None:
        """Count GPUs by node as in use in every tick that the period touches."""
        first = max(0, int((began - self._since) // GAP_S))
        last = math.ceil((ended - self._since) / GAP_S)
        gpus = sum(min(count, self._gpus[node]) for node, count in nodes.items())
        for tick in range(first, min(last, len(self.ticks))):
            self.ticks[tick] += gpus


def read_history(resources: Resources, days: float, *, now: float, ask: Ask | None = None) -> Trace:
    """Return the GPUs that were free for `resources` in the last `days` days before `now`.

    Raises `SpecError` if none of the cluster's nodes is for these resources, and `SchedulerError`
    if Slurm does not answer.
    """
    ask = ask or partial(call, timeout_s=ANSWER_S_MAX)
    gpus = _gpus_by_node(resources, ask)
    if not sum(gpus.values()):
        raise SpecError(
            f"partition {resources.partition or '(default)'}: no node with GPUs of the spec; check "
            "resources.partition and resources.gpu_type"
        )
    if "gres/gpu" not in slurm_client.settings(ask=ask).get("AccountingStorageTRES", ""):
        raise SpecError(
            "Slurm does not account for GPUs here (no gres/gpu in AccountingStorageTRES), so their "
            "past use is unknown; give a trace with --trace"
        )
    since = now - days * DAY_S
    use = _Use(gpus, since, now)
    period = _slurm_time(since), _slurm_time(now)
    for began, ended, nodes in _jobs(period, ask):
        ours = {node: count for node, count in nodes.items() if node in gpus}
        use.add(began, now if ended is None else ended, ours)
    for node, began, ended in _events(period, ask):
        # An event without a node is about the whole cluster, such as a change of its size.
        if node in gpus:
            use.add(began, now if ended is None else ended, {node: float(gpus[node])})
    total = sum(gpus.values())
    return Trace(tuple(max(0, int(total - used)) for used in use.ticks), GAP_S)


def _jobs(
    period: tuple[str, str], ask: Ask
) -> Iterator[tuple[float, float | None, dict[str, float]]]:
    """Yield when each job began and ended, and its GPUs by node."""
    command = ["sacct", "-n", "-P", "-X", "-a", "-D", f"-S{period[0]}", f"-E{period[1]}"]
    for line in ask([*command, "-o", ",".join(JOB_FIELDS)]).splitlines():
        start, end, tres, hosts = line.split("|", 3)
        began = parse_time(start)
        words = [word.partition("=") for word in tres.split(",")]
        count = sum(int(value) for key, _, value in words if key == "gres/gpu")
        nodes = expand_hosts(hosts)
        if began is not None and count and nodes:
            yield began, parse_time(end), {node: count / len(nodes) for node in nodes}


def _events(period: tuple[str, str], ask: Ask) -> Iterator[tuple[str, float, float | None]]:
    """Yield the node and the period of each time that it was down or drained."""
    chosen = [f"start={period[0]}", f"end={period[1]}", f"format={','.join(EVENT_FIELDS)}"]
    for line in ask(["sacctmgr", "-n", "-P", "show", "event", *chosen]).splitlines():
        node, start, end = line.split("|", 2)
        began = parse_time(start)
        if began is not None:
            yield node, began, parse_time(end)


def _slurm_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")


def _gpus_by_node(resources: Resources, ask: Ask) -> dict[str, int]:
    """Return the GPUs of the nodes of the partitions that the spec names, or of the default."""
    mine = chosen_partitions(resources, slurm_client.partitions(ask=ask))
    names = {str(one.get("PartitionName")) for one in mine}
    kind = resources.gpu_type or gpu_kind(resources.gres or "")
    return {
        node["NodeName"]: gpus_of(node.get("Gres", ""), kind)
        for node in slurm_client.show_nodes(ask)
        if names & set(node.get("Partitions", "").split(","))
    }
