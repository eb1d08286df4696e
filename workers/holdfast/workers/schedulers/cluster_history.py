"""The free GPUs of a partition in the past, from Slurm's accounting: a trace for `simulate`.

Every job of every user counts with its GPUs while it ran, and every node with all its GPUs while it
was down or drained. Each number is the fewest that were free in its time. The nodes are those of
today.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.bounds import NODES_MAX, SECONDS_MAX
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.spec.resources import Resources, gpu_kind, gpus_of
from holdfast.workers.schedulers import slurm_client

# Traces of free GPUs over time, such as those of a cloud's spot instances.

GAP_S_MIN: Final = 1.0
SHOWN_CHARACTERS: Final = 40


class Trace:
    """The number of free GPUs every `gap_s` seconds. After its end it begins again."""

    def __init__(self, gpus: tuple[int, ...], gap_s: float) -> None:
        self.gpus, self.gap_s = gpus, gap_s
        self.length_s = len(gpus) * gap_s

    def free(self, at: float) -> int:
        return self.gpus[int(at // self.gap_s) % len(self.gpus)]

    def first(self, since: float, gpus: int, *, has: bool) -> float:
        """Return the first time from `since` at which `gpus` are free, or are not; else infinity.

        The trace is followed for one length, because then it repeats.
        """
        tick = int(since // self.gap_s)
        for later in range(len(self.gpus) + 1):
            if (self.gpus[(tick + later) % len(self.gpus)] >= gpus) == has:
                return max(since, (tick + later) * self.gap_s)
        return math.inf


def read_trace(path: Path, gpus_per_instance: int) -> Trace:
    """Read a trace in the format of the public `spot-traces`; see `docs/goodput.md`.

    Raises `SpecError` for anything else, and `NotFoundError` without such a file.
    """
    try:
        document = json.loads(read_bounded(path))
        gap_s, counts = float(document["metadata"]["gap_seconds"]), document["data"]
        wrong = [
            n for n, one in enumerate(counts) if type(one) is not int or not 0 <= one <= NODES_MAX
        ]
        if wrong or not counts:
            shown = f"{counts[wrong[0]]!r}"[:SHOWN_CHARACTERS] if wrong else ""
            what = f"data[{wrong[0]}] is {shown}" if wrong else "data is empty"
            raise ValueError(f"{what}; a gap in the trace must be filled")
        if not GAP_S_MIN <= gap_s <= SECONDS_MAX:
            raise ValueError(f"metadata.gap_seconds is {gap_s}")
    except FileNotFoundError:
        raise NotFoundError(f"--trace {path}: no such file") from None
    except OSError as error:
        raise SpecError(f"--trace {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise SpecError(
            f"--trace {path}: {error}; expected JSON with metadata.gap_seconds from {GAP_S_MIN:g} "
            f"to {SECONDS_MAX:g} and data, the number of available instances at each time"
        ) from error
    return Trace(tuple(count * gpus_per_instance for count in counts), gap_s)


GAP_S_MAX: Final = 300.0
# Of a short time, the trace has a number for each second or so.
TICKS_MIN: Final = 1000
DAY_S: Final = 24 * 3600.0
# A month of a large cluster takes a while.
ANSWER_S_MAX: Final = 300.0
JOB_FIELDS: Final = ("Start", "End", "AllocTRES", "NodeList")
EVENT_FIELDS: Final = ("NodeName", "TimeStart", "TimeEnd")


class _Use:
    """The GPUs in use over time, of nodes with `gpus` GPUs each."""

    def __init__(self, gpus: Mapping[str, int], since: float, until: float) -> None:
        self._gpus, self._since, self._until = gpus, since, until
        # When, how many GPUs more or less, and on which node.
        self._changes: list[tuple[float, float, str]] = []

    def add(self, began: float, ended: float | None, nodes: Mapping[str, float]) -> None:
        """Count GPUs by node as in use from `began` until `ended`, or until now if it is `None`.

        Other nodes than those of `gpus` do not count.
        """
        first = max(began, self._since)
        last = self._until if ended is None else min(ended, self._until)
        if first < last:
            for node in nodes.keys() & self._gpus.keys():
                self._changes += [(first, nodes[node], node), (last, -nodes[node], node)]

    def most(self, gap_s: float) -> list[float]:
        """Return the most GPUs that were in use at one moment, for each `gap_s` seconds.

        So jobs that follow each other on a GPU within this time count once.
        """
        most = [0.0] * math.ceil((self._until - self._since) / gap_s)
        used = dict.fromkeys(self._gpus, 0.0)
        total, tick = 0.0, 0
        # At one moment, jobs end before others begin, since a decrease sorts first.
        for at, change, node in sorted(self._changes):
            position = (at - self._since) / gap_s
            for earlier in range(tick, math.ceil(position)):
                most[earlier] = max(most[earlier], total)
            tick = int(position)
            # A node that was drained counts whole, with the jobs that still ran there.
            before = min(used[node], self._gpus[node])
            used[node] += change
            total += min(used[node], self._gpus[node]) - before
        return most


def read_history(
    resources: Resources, days: float, *, now: float, ask: slurm_client.Ask | None = None
) -> Trace:
    """Return the GPUs that were free for `resources` in the last `days` days before `now`.

    Raises `SpecError` if none of the cluster's nodes is for these resources, and `SchedulerError`
    if Slurm does not answer.
    """
    ask = ask or partial(slurm_client.call, timeout_s=ANSWER_S_MAX)
    gpus = _gpus_by_node(resources, ask)
    if not sum(gpus.values()):
        raise SpecError(
            f"partition {resources.partition or '(default)'}: no node with GPUs of the spec; check "
            "resources.partition and resources.gpu_type"
        )
    if "gres/gpu" not in slurm_client.settings(ask).get("AccountingStorageTRES", ""):
        raise SpecError(
            "Slurm does not account for GPUs here (no gres/gpu in AccountingStorageTRES), so their "
            "past use is unknown; give a trace with --trace"
        )
    since = now - days * DAY_S
    use = _Use(gpus, since, now)
    period = slurm_client.format_time(since), slurm_client.format_time(now)
    for began, ended, nodes in _jobs(period, ask):
        use.add(began, ended, nodes)
    for node, began, ended in _events(period, ask):
        # An event without a node is about the whole cluster, such as a change of its size.
        use.add(began, ended, {node: float(gpus.get(node, 0))})
    total = sum(gpus.values())
    gap_s = min(GAP_S_MAX, math.ceil(days * DAY_S / TICKS_MIN))
    # Shares of a node are fractions, whose sums are not exact.
    return Trace(tuple(int(total - used + 1e-6) for used in use.most(gap_s)), gap_s)


def _jobs(
    period: tuple[str, str], ask: slurm_client.Ask
) -> Iterator[tuple[float, float | None, dict[str, float]]]:
    """Yield when each job began and ended, and its GPUs by node."""
    command = ["sacct", "-n", "-P", "-X", "-a", "-D", f"-S{period[0]}", f"-E{period[1]}"]
    for line in ask([*command, "-o", ",".join(JOB_FIELDS)]).splitlines():
        start, end, tres, hosts = line.split("|", 3)
        began = slurm_client.parse_time(start)
        words = [word.partition("=") for word in tres.split(",")]
        count = sum(int(value) for key, _, value in words if key == "gres/gpu")
        nodes = slurm_client.expand_hosts(hosts)
        if began is not None and count and nodes:
            yield began, slurm_client.parse_time(end), {node: count / len(nodes) for node in nodes}


def _events(
    period: tuple[str, str], ask: slurm_client.Ask
) -> Iterator[tuple[str, float, float | None]]:
    """Yield the node and the period of each time that it was down or drained."""
    chosen = [f"start={period[0]}", f"end={period[1]}", f"format={','.join(EVENT_FIELDS)}"]
    for line in ask(["sacctmgr", "-n", "-P", "show", "event", *chosen]).splitlines():
        node, start, end = line.split("|", 2)
        began = slurm_client.parse_time(start)
        if began is not None:
            yield node, began, slurm_client.parse_time(end)


def _gpus_by_node(resources: Resources, ask: slurm_client.Ask) -> dict[str, int]:
    """Return the GPUs of the nodes of the partitions that the spec names, or of the default."""
    mine = slurm_client.chosen_partitions(resources, slurm_client.partitions(ask))
    names = {str(one.get("PartitionName")) for one in mine}
    kind = resources.gpu_type or gpu_kind(resources.gres or "")
    return {
        node["NodeName"]: gpus_of(node.get("Gres", ""), kind)
        for node in slurm_client.show_nodes(ask)
        if names & set(node.get("Partitions", "").split(","))
    }
