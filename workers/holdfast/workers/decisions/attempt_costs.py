"""The seconds that the parts of an attempt take, given or measured, and when its saves happen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.contracts.account import goodput, timeline
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.history import RunHistory


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds that the parts of an attempt take.

    `step_s` is a step at the spec's own size; at another size it changes inversely. `relaunch_s` is
    the time from a decision to relaunch until the attempt is queued. `notice_s` is the time between
    a preemption's notice and the end of the job. Without `mean_failure_s`, the mean time between
    failures without a notice, a node fails as often as large runs report.
    """

    step_s: float
    relaunch_s: float = 0.0
    queue_s: float = 0.0
    start_s: float = 60.0
    load_s: float = 30.0
    blocked_s: float = 1.0
    flush_s: float = 30.0
    notice_s: float = 120.0
    mean_failure_s: float | None = None


def measured_costs(history: RunHistory) -> Costs:
    """Return the mean costs that a run had, for a run with the same spec.

    Raises `SpecError` if the run has trained no step.
    """
    spans, created_at = timeline.spans_of(history), history.record.created_at
    until = max((span.ended_at or span.started_at or 0.0 for span in spans), default=created_at)
    parts: defaultdict[str, float] = defaultdict(float)
    size_s = 0.0
    for one in goodput.segments(spans, created_at=created_at, until=until):
        parts[one.part] += one.ended_at - one.began_at
        # Steps that were lost took as long as those that were kept, so both count for the time of a
        # step.
        if one.part in {"training", "lost"}:
            size_s += history.attempts[one.span].gpus * (one.ended_at - one.began_at)
    launches = [launch for span in spans for launch in span.launches]
    steps = sum((one.last_step or 0) - (one.resumed_step or 0) for one in launches)
    if steps <= 0 or size_s <= 0:
        raise SpecError(
            f"{history.paths.name}: it has trained no step yet; give --cost step_s=SECONDS"
        )
    saves = sum(len(one.held) for one in launches)
    # The time between attempts, without what the policy waited on purpose.
    delays_s = sum(
        float(event.data.get("delay_s") or 0.0)
        for event in history.events
        if event.kind is EventKind.DECISION and event.data.get("action") == "relaunch"
    )
    stopped_s = timeline.goodput_of(history, until=until).stopped_s
    return Costs(
        step_s=size_s / history.spec.gpus / steps,
        relaunch_s=max(0.0, stopped_s - delays_s) / len(spans),
        queue_s=parts["queued"] / len(spans),
        start_s=parts["starting"] / len(launches),
        load_s=parts["loading"] / max(1, sum(one.loads_from is not None for one in launches)),
        blocked_s=parts["blocked"] / max(1, saves),
        flush_s=parts["flushing"] / len(spans),
    )


class Saves:
    """The saves of one attempt that trains from `begin`: one after every `interval_s` seconds."""

    def __init__(self, interval_s: float, costs: Costs, begin: float) -> None:
        self._interval_s, self._costs, self._begin = interval_s, costs, begin
        self._cycle_s = interval_s + costs.blocked_s

    def reached(self, trained_s: float) -> float:
        """Return when so many seconds of training are done."""
        saves = max(0, math.ceil(trained_s / self._interval_s) - 1)
        return self._begin + trained_s + saves * self._costs.blocked_s

    def trained_s(self, at: float) -> float:
        """Return the seconds of training until `at`, without blocked time."""
        cycles, rest_s = divmod(max(0.0, at - self._begin), self._cycle_s)
        return cycles * self._interval_s + min(rest_s, self._interval_s)

    def durable_s(self, at: float) -> float:
        """Return the seconds of training that the newest durable save has at `at`."""
        since_s = at - self._begin - self._interval_s - self._costs.flush_s
        if since_s < 0:
            return 0.0
        return (1 + since_s // self._cycle_s) * self._interval_s

    def count(self, until: float) -> float:
        """Return about how many saves there are until `until`."""
        return max(0.0, until - self._begin) / self._cycle_s

    def held(self, until: float) -> Iterator[tuple[float, float]]:
        """Yield the periods in which saves block training."""
        if self._costs.blocked_s <= 0:
            return
        began = self._begin + self._interval_s
        while began < until:
            yield began, min(until, began + self._costs.blocked_s)
            began += self._cycle_s
