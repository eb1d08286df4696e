"""When a running attempt gives way to a larger one: capacity that has come back, and stays.

Pure. Taking more GPUs costs a restart, so free ones must have been seen for a while, the attempt
must have trained as long, and each time that a grown attempt was preempted again doubles that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.history import RunHistory
from holdfast.contracts.journal import GROWER
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.sizes import allowed_sizes

DOUBLINGS_MAX: Final = 5


@dataclass(frozen=True, kw_only=True)
class CapacityObservation:
    """Room for `gpus` GPUs, seen at every look since `since`, Unix seconds."""

    gpus: int
    since: float


def observe_capacity(
    history: RunHistory,
    capacity: int | None,
    before: CapacityObservation | None,
    *,
    now: float,
    fits: Callable[[int], bool],
) -> CapacityObservation | None:
    """The room for a larger attempt that is seen now; `before` is what the last look saw.

    `capacity` counts the GPUs that are free or the attempt's own, `fits` says whether the
    checkpoint can go on at a count. None without such room, and
    while nobody knows. A larger size than before is no new sighting, a smaller one is.
    """
    last, spec = history.last_attempt, history.spec
    if not spec.elastic.grow or capacity is None or last is None:
        return None
    if last.state is not AttemptState.RUNNING:
        return None
    larger = [size for size in allowed_sizes(spec) if last.world_size < size <= capacity]
    fitting = [size for size in larger if fits(size)]
    if not fitting:
        return None
    if before is None or before.gpus > fitting[-1]:
        return CapacityObservation(gpus=fitting[-1], since=now)
    return CapacityObservation(gpus=fitting[-1], since=before.since)


def is_due(history: RunHistory, seen: CapacityObservation | None, *, now: float) -> bool:
    """True when the attempt should save, stop and go on at `seen.gpus`."""
    last = history.last_attempt
    if seen is None or last is None or history.pending_request is not None:
        return False
    delay_s = grow_delay(history)
    began = last.started_at or now
    return now - seen.since >= delay_s and now - began >= delay_s


def grow_delay(history: RunHistory) -> float:
    """Seconds that room must have been there, and the attempt trained."""
    grown = {
        int(event.data["after_attempt"]) + 1
        for event in history.events
        if event.kind == "operator_request" and event.data.get("by") == GROWER
    }
    lost = sum(1 for a in history.attempts if a.number in grown and a.cause is Cause.PREEMPTION)
    after_s: float = history.spec.elastic.grow_after_s
    return after_s * 2.0 ** min(lost, DOUBLINGS_MAX)
