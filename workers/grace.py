"""Whether a preemption leaves enough time for the last flush: measured times, scheduler's word."""

from __future__ import annotations

from typing import Final

from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.flush_forecast import FlushForecast, forecast_flush, grace_warnings
from holdfast.contracts.history import load_events
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.spec import Resources, RunSpec
from holdfast.workers import slurm_client

ANSWER_TIMEOUT_S: Final = 5.0


def warnings_of(spec: RunSpec, measured: RunPaths | None) -> list[str]:
    """What people should know before they rely on the grace period.

    `measured` is the run whose saves tell how long a flush takes, None where none has run yet.
    """
    forecast: FlushForecast | None = None
    if measured is not None:
        forecast = forecast_flush(load_events(measured))
    name, given_s = _partition_grace(spec.resources)
    return grace_warnings(
        forecast, grace_s=spec.supervision.grace_s, partition=name, given_s=given_s
    )


def _partition_grace(resources: Resources) -> tuple[str, float | None]:
    """The partition and the seconds that it gives a preempted job, None for no such thing."""
    if resources.executor != "slurm":
        return "", None
    try:
        found = slurm_client.partitions(ANSWER_TIMEOUT_S)
    except SchedulerError:
        return "", None
    return grace_of_partition(found, resources.partition)


def grace_of_partition(
    partitions: list[dict[str, str]], wanted: str | None
) -> tuple[str, float | None]:
    """Name and grace seconds of the partition a job goes to: pure. None: it preempts nobody."""
    for fields in partitions:
        name, is_default = fields.get("PartitionName", ""), fields.get("Default") == "YES"
        if (name != wanted) if wanted else not is_default:
            continue
        grace = fields.get("GraceTime", "")
        is_preempted = fields.get("PreemptMode", "OFF") != "OFF"
        return name, float(grace) if is_preempted and grace.isdigit() else None
    return "", None
