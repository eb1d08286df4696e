"""Check whether a preemption leaves enough time for the last flush."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.decisions.flush_forecast import FlushForecast, forecast_flush, grace_warnings
from holdfast.workers.schedulers import slurm_client

# With this preemption type the QOS gives the grace, otherwise the partition does.
BY_QOS: Final = "preempt/qos"


def warnings_of(spec: RunSpec, measured: RunPaths | None) -> list[str]:
    """Return warnings about the grace period.

    `measured` is the run whose saves show how long a flush takes, or None if none has run yet.
    """
    forecast: FlushForecast | None = None
    if measured is not None:
        forecast = forecast_flush(load_events(measured))
    giver, given_s = _scheduler_grace(spec.resources)
    return grace_warnings(forecast, grace_s=spec.supervision.grace_s, giver=giver, given_s=given_s)


def _scheduler_grace(resources: Resources) -> tuple[str, float | None]:
    """Return the QOS or partition that gives a preempted job its grace, and the grace in seconds.

    The grace is None if there is none or it is unknown.
    """
    if resources.executor != "slurm":
        return "", None
    ask = slurm_client.call_briefly
    try:
        if slurm_client.preemption_type(ask) == BY_QOS:
            name = resources.qos or ""
            return f"QOS {name}", grace_of_qos(slurm_client.list_qos(ask), name)
        found = slurm_client.partitions(ask)
    except SchedulerError:
        return "", None
    name, given_s = grace_of_partition(found, resources.partition)
    return f"partition {name}", given_s


def grace_of_qos(known: Mapping[str, tuple[str, str]], wanted: str) -> float | None:
    """Return the grace of a QOS in seconds, without side effects.

    `known` maps each QOS to its grace, such as `00:00:30`, and to the QOS that it preempts. Returns
    None if no other QOS preempts `wanted`, or if `wanted` is the account's default and so unknown.
    """
    preempted = {name for _, names in known.values() for name in names.split(",")}
    if wanted not in known or wanted not in preempted:
        return None
    minutes = slurm_client.parse_minutes(known[wanted][0])
    return None if minutes is None else minutes * 60


def grace_of_partition(
    partitions: list[dict[str, str]], wanted: str | None
) -> tuple[str, float | None]:
    """Return the name and the grace (seconds) of a job's partition; None if it is not preempted.

    If `wanted` names several partitions, as `a,b`, the one with the shortest grace counts.
    """
    found: list[tuple[str, float | None]] = []
    for fields in partitions:
        name, is_default = fields.get("PartitionName", ""), fields.get("Default") == "YES"
        if name in wanted.split(",") if wanted else is_default:
            grace = fields.get("GraceTime", "")
            is_preempted = fields.get("PreemptMode", "OFF") != "OFF"
            found.append((name, float(grace) if is_preempted and grace.isdecimal() else None))
    return min(found, key=lambda one: math.inf if one[1] is None else one[1], default=("", None))
