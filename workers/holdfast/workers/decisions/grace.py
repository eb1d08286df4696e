"""Check whether a preemption leaves enough time for the last flush."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.schedulers import slurm_client

# The forecast is the slowest of this many saves, because shared storage is sometimes slow.
SAVES_RECENT: Final = 10
# Safety factor of the forecast.
FACTOR: Final = 1.25
# Time for agreeing on a stop step and for the exit of the ranks.
MARGIN_S: Final = 10.0
# A longer step included an evaluation. A stop waits for at most one of those.
STEP_S_MAX: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class FlushForecast:
    """`seconds` from the last step to the commit, as in the slowest of `saves` recent saves."""

    seconds: float
    saves: int

    @property
    def needed_s(self) -> float:
        """The grace that a flush needs, with a safety factor."""
        return FACTOR * self.seconds


def forecast_flush(events: Iterable[Event]) -> FlushForecast | None:
    """Return a forecast from a run's `staged` and `committed` lines, oldest first, or None."""
    blocked: dict[str, float] = {}
    took: list[float] = []
    for event in events:
        name = str(event.data.get("checkpoint"))
        if event.kind is EventKind.STAGED:
            blocked[name] = _duration(event.data.get("blocked_s")) or 0.0
        elif event.kind is EventKind.COMMITTED:
            flush_s = _duration(event.data.get("flush_s"))
            # A salvaged snapshot has no `staged` line, because it was only kept in memory.
            # Both lines are needed: the grace covers the copy and the flush.
            if flush_s is not None and name in blocked:
                took.append(blocked.pop(name) + flush_s)
    recent = took[-SAVES_RECENT:]
    return FlushForecast(seconds=max(recent), saves=len(recent)) if recent else None


def stop_lead_s(forecast: FlushForecast | None, *, grace_s: float, step_s: float = 0.0) -> float:
    """Return how many seconds before the end of a job its stop must begin.

    Without a forecast, the flush is assumed to take `grace_s`. `step_s` is the duration of a step.
    Ranks finish their present step, and one more if they cannot agree on that one.
    """
    flush_s = forecast.needed_s if forecast else grace_s
    return flush_s + 2.0 * min(step_s, STEP_S_MAX) + MARGIN_S


def grace_warnings(
    forecast: FlushForecast | None, *, grace_s: float, giver: str = "", given_s: float | None
) -> list[str]:
    """Return warnings for a grace period that is too short.

    `grace_s` is the value in the spec. `given_s` is the grace that the scheduler gives, as set by
    `giver`, a partition or a QOS. It is None if jobs are not preempted or the scheduler cannot be
    asked.
    """
    warnings = []
    if given_s == 0:
        warnings.append(
            f"{giver} gives a preempted job no grace (GraceTime=0), only Slurm's KillWait: ask "
            f"for GraceTime={grace_s:.0f}, or set supervision.grace_s to KillWait if that is "
            "shorter"
        )
    elif given_s is not None and given_s < grace_s:
        warnings.append(
            f"{giver} gives a preempted job {given_s:.0f} s, but supervision.grace_s is "
            f"{grace_s:.0f} s: set it to {given_s:.0f}"
        )
    shortest_s = grace_s if given_s is None else min(grace_s, given_s)
    if forecast is not None and forecast.needed_s > shortest_s:
        warnings.append(
            f"a grace of {shortest_s:.0f} s is too short for the last flush: the slowest of the "
            f"last {counted(forecast.saves, 'save')} took {forecast.seconds:.1f} s, and "
            f"{FACTOR:g} times that "
            f"is {forecast.needed_s:.1f} s. A preemption may lose the steps since the last "
            "checkpoint: use a longer grace, faster storage or a shorter checkpoint interval"
        )
    return warnings


def _duration(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < math.inf else None


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
