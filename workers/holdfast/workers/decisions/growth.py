"""Decide when a running attempt stops so that a larger one can start.

More GPUs cost a restart. So they must have been free for a while during this attempt. That delay
doubles each time a grown attempt was preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.disk.journal import GROWER, EventKind
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions import attempt_limit, sizes
from holdfast.workers.schedulers.base import AskCapacity

DOUBLINGS_MAX: Final = 5


@dataclass(frozen=True, kw_only=True)
class CapacityObservation:
    """Capacity for `gpus` GPUs at every check since `since` (Unix seconds), while `attempt` ran."""

    gpus: int
    since: float
    attempt: int = 1


def observe_capacity(
    history: RunHistory,
    capacity: int | None,
    before: CapacityObservation | None,
    *,
    now: float,
    fits: Callable[[int], bool],
) -> CapacityObservation | None:
    """Return the capacity for a larger attempt now; `before` is the previous observation.

    `capacity` counts free GPUs and the attempt's own. `fits` returns whether the checkpoint can
    continue at a count. Returns None without such capacity or if it is unknown. A larger size than
    before keeps the start time, a smaller one or another attempt resets it.
    """
    last, spec = history.last_attempt, history.spec
    # Growing starts an attempt, so the limit of attempts applies to it as well.
    if (
        not spec.elastic.grow
        or capacity is None
        or last is None
        or not attempt_limit.may_try_again(history)
    ):
        return None
    if last.state is not AttemptState.RUNNING:
        return None
    most = sizes.without_spares(spec, capacity) or 0
    larger = [size for size in sizes.allowed_sizes(spec) if _gpus_now(history, last) < size <= most]
    fitting = [size for size in larger if fits(size)]
    if not fitting:
        return None
    # Capacity for more GPUs includes capacity for fewer, so a larger size keeps the time.
    keeps = before is not None and before.gpus <= fitting[-1] and before.attempt == last.number
    since = before.since if before is not None and keeps else now
    return CapacityObservation(gpus=fitting[-1], since=since, attempt=last.number)


def _gpus_now(history: RunHistory, last: AttemptView) -> int:
    """Return the GPUs of an attempt's newest launch, which may have fewer nodes than its first."""
    for event in reversed(history.events):
        if event.kind is EventKind.LAUNCH_STARTED and event.data.get("attempt") == last.number:
            nodes = event.data.get("nodes")
            per_node = history.spec.resources.size_per_node
            return last.gpus if nodes is None else int(nodes) * per_node
    return last.gpus


def is_due(history: RunHistory, seen: CapacityObservation | None, *, now: float) -> bool:
    """Return True if the attempt should save, stop and continue at `seen.gpus`.

    The attempt has run at least since `seen.since`, so the clock of its node does not matter.
    """
    if seen is None or history.last_attempt is None or history.pending_request is not None:
        return False
    return now - seen.since >= grow_delay(history)


def find_growth(
    history: RunHistory,
    ask: AskCapacity,
    before: CapacityObservation | None,
    *,
    now: float,
    fits: Callable[[int], bool],
) -> tuple[CapacityObservation | None, int]:
    """Return the capacity seen so far, and the GPUs at which the run should continue now, or 0.

    Until growth is due, an answer of the scheduler may be a minute old. Then it is asked again.
    """
    seen = observe_capacity(history, ask(is_urgent=False), before, now=now, fits=fits)
    if is_due(history, seen, now=now):
        # An answer that is a minute old must not stop a run for GPUs that are gone.
        seen = observe_capacity(history, ask(is_urgent=True), seen, now=now, fits=fits)
    if seen is None or not is_due(history, seen, now=now):
        return seen, 0
    return None, seen.gpus


def grow_delay(history: RunHistory) -> float:
    """Return the seconds for which capacity must be free and the attempt must have trained."""
    grown = {
        int(event.data["after_attempt"]) + 1
        for event in history.events
        if event.kind == "operator_request" and event.data.get("by") == GROWER
    }
    lost = sum(1 for a in history.attempts if a.number in grown and a.cause is Cause.PREEMPTION)
    after_s: float = history.spec.elastic.grow_after_s
    # Each preemption of a grown attempt is a sign that the larger size does not last.
    return after_s * 2.0 ** min(lost, DOUBLINGS_MAX)
