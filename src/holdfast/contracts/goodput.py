"""Where a run's time went: every second of it in one part, from its journal alone. Pure.

    queued     the scheduler has the attempt and no node yet
    starting   the attempt has its nodes, and its programs report no step yet
    loading    ranks restore the state
    training   reported steps that were not lost since: productive
    lost       steps that were trained again, or that no checkpoint kept when the last attempt ended
    blocked    training is held up by saves
    hung       ranks are silent, until they were ended for it
    flushing   training is over and its last state is on its way to storage
    stopped    no attempt has the run: waiting, paused, between attempts

A cursor goes through the run's attempts and launches in their order and never back, so that the
parts add up to the whole whatever the clocks of several machines say. ETTR, the effective training
time ratio, is productive time over wall time, queueing included (arXiv 2410.21680).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

SECONDS_PER_HOUR: Final = 3600.0
PARTS: Final = (
    "queued",
    "starting",
    "loading",
    "training",
    "lost",
    "blocked",
    "hung",
    "flushing",
    "stopped",
)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The account of a run: durations in seconds, steps in optimizer steps.

    What preemptions cost is the GPU time of the last flush of each preempted attempt, of the
    steps that it lost and of the next attempt's start and load. `on_demand_cost` is the price of
    all other GPU time without preemptions; `saved` is it less `cost`.
    """

    total_s: float
    queued_s: float
    starting_s: float
    loading_s: float
    training_s: float
    lost_s: float
    blocked_s: float
    hung_s: float
    flushing_s: float
    stopped_s: float
    ettr: float
    steps_lost: int
    gpu_hours: float
    preemption_gpu_hours: float
    cost: float | None
    preemption_cost: float | None
    on_demand_cost: float | None
    saved: float | None
    currency: str | None


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Of one GPU for an hour: as paid, and where nothing is ever preempted."""

    gpu_hour: float | None = None
    on_demand_per_gpu_hour: float | None = None
    currency: str = "USD"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of torchrun. Unix seconds; None for what nobody told.

    State is restored from `loads_from` to `trained_from`, ranks train until `hangs_from` or
    `trained_until`; `held` are the spans in which saves held them up.
    """

    started_at: float | None = None
    loads_from: float | None = None
    trained_from: float | None = None
    hangs_from: float | None = None
    trained_until: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    held: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Span:
    """One attempt. Unix seconds."""

    world_size: int
    is_preempted: bool = False
    submitted_at: float | None = None
    started_at: float | None = None
    stop_requested_at: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    launches: tuple[Launch, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A time in which one attempt, by its place among the spans, did one thing; Unix seconds."""

    span: int
    part: str
    began_at: float
    ended_at: float


@dataclass(kw_only=True)
class _Leg:
    """Steps trained without a break, and the seconds that they took.

    `pieces` are the times of it, without those in which a save held training up.
    """

    span: int
    pieces: list[tuple[float, float]]
    resumed_step: int | None
    last_step: int | None
    trained_s: float
    lost_s: float = 0.0
    steps_lost: int = 0


@dataclass(kw_only=True)
class _Account:
    """The parts so far, of all and by attempt, and the cursor, Unix seconds."""

    cursor: float
    until: float
    blocked_s_min: float = 0.0
    by_span: list[dict[str, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    segments: list[Segment] = field(default_factory=list)

    def go_to(self, moment: float | None, part: str, limit: float | None = None) -> float:
        """Give `part` the time up to `moment`, not beyond `limit`; nothing when it is past.

        Returns the seconds given.
        """
        if moment is None or math.isnan(moment):
            return 0.0
        end = min(moment, self.until, self.until if limit is None else limit)
        if end <= self.cursor:
            return 0.0
        seconds = end - self.cursor
        if part not in {"stopped", "training"}:
            self.segments.append(Segment(len(self.by_span) - 1, part, self.cursor, end))
        self.cursor = end
        self.add(part, seconds)
        return seconds

    def split(
        self, held: Sequence[tuple[float, float]], span: int, began_at: float
    ) -> list[tuple[float, float]]:
        """The times of training from `began_at` to the cursor, without what saves `held` up."""
        pieces = []
        for low, high in held:
            if high - low < self.blocked_s_min:
                continue
            self.segments.append(Segment(span, "blocked", low, high))
            pieces.append((began_at, low))
            began_at = high
        pieces.append((began_at, self.cursor))
        return [(low, high) for low, high in pieces if high > low]

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds
        if self.by_span:
            self.by_span[-1][part] += seconds


def prices_of(spec: Mapping[str, Any]) -> Prices:
    """The prices in a run's spec as plain data."""
    cost = spec.get("cost") or {}
    return Prices(**{key: cost[key] for key in Prices.__dataclass_fields__ if key in cost})


def account(
    spans: Sequence[Span],
    *,
    created_at: float,
    until: float,
    prices: Prices | None = None,
    safe_step: int | None = None,
) -> Goodput:
    """The account from `created_at` to `until`, the end of an ended run or now; Unix seconds.

    `spans` are the attempts in order of number. `safe_step` is the newest committed step, 0 without
    a checkpoint: once the last attempt has ended, the steps after it are lost. None is unknown.
    """
    kept, legs = _fold(spans, created_at, until, safe_step=safe_step)
    total_s = kept.until - created_at
    lost_s = sum(leg.lost_s for leg in legs)
    kept.parts["training"] -= lost_s
    kept.parts["lost"] += lost_s
    gpu_s = sum(s.world_size * _held_s(p) for s, p in zip(spans, kept.by_span, strict=False))
    preempted_s = _preemption_gpu_s(spans, kept.by_span, legs)
    parts: dict[str, Any] = {f"{part}_s": max(0.0, s) for part, s in kept.parts.items()}
    return Goodput(
        total_s=total_s,
        **parts,
        ettr=min(1.0, parts["training_s"] / total_s) if total_s else 0.0,
        steps_lost=sum(leg.steps_lost for leg in legs),
        gpu_hours=gpu_s / SECONDS_PER_HOUR,
        preemption_gpu_hours=preempted_s / SECONDS_PER_HOUR,
        **_costs(gpu_s / SECONDS_PER_HOUR, preempted_s / SECONDS_PER_HOUR, prices or Prices()),
    )


def segments(
    spans: Sequence[Span],
    *,
    created_at: float,
    until: float,
    blocked_s_min: float = 0.0,
    safe_step: int | None = None,
) -> list[Segment]:
    """The same account as `account`, as the times that each part took, in order of attempts.

    Times between attempts are left out. Saves that held training up for less than `blocked_s_min`
    seconds are shown as the training that they interrupted.
    """
    kept, legs = _fold(spans, created_at, until, blocked_s_min, safe_step)
    found = list(kept.segments)
    for leg in legs:
        left_s = leg.lost_s
        # What was trained again is the end of it.
        for began, ended in reversed(leg.pieces):
            cut = max(began, ended - left_s)
            left_s -= ended - cut
            found += [
                Segment(leg.span, part, low, high)
                for part, low, high in (("training", began, cut), ("lost", cut, ended))
                if high > low
            ]
    return sorted(found, key=lambda one: (one.span, one.began_at))


def _fold(
    spans: Sequence[Span],
    created_at: float,
    until: float,
    blocked_s_min: float = 0.0,
    safe_step: int | None = None,
) -> tuple[_Account, list[_Leg]]:
    """Move one cursor through all attempts; the account and the legs of training in it."""
    # A run whose clocks contradict each other has lasted for as long as any of them says.
    kept = _Account(cursor=created_at, until=max(created_at, until), blocked_s_min=blocked_s_min)
    legs: list[_Leg] = []
    is_told = any(one.trained_from is not None for span in spans for one in span.launches)
    for number, given in enumerate(spans):
        span = replace(given, launches=_launches(given, is_told=is_told))
        kept.go_to(_first(span.submitted_at, span.started_at), "stopped")
        kept.by_span.append(dict.fromkeys(PARTS, 0.0))
        legs += _walk(kept, span, number)
    kept.by_span.append(dict.fromkeys(PARTS, 0.0))
    kept.go_to(kept.until, "stopped")
    has_ended = bool(spans) and spans[-1].ended_at is not None
    _find_lost(legs, safe_step if has_ended else None)
    return kept, legs


def _launches(span: Span, *, is_told: bool) -> tuple[Launch, ...]:
    """The attempt's launches, each with the time from which it trained.

    `is_told` when any of the run says so. Else a launch that reports steps trained from its start,
    and one that reports none, as of a program without a session, never trained.
    """
    begins = span.started_at
    if not span.launches and span.last_step is not None:
        return (Launch(trained_from=begins, resumed_step=span.resumed_step),)
    if is_told:
        return span.launches
    return tuple(
        replace(one, trained_from=_first(one.started_at, begins))
        if one.last_step is not None or (one is span.launches[-1] and span.last_step is not None)
        else one
        for one in span.launches
    )


def _walk(kept: _Account, span: Span, number: int) -> list[_Leg]:
    """Move the cursor through one attempt; returns its legs."""
    begins = _first(span.started_at, span.ended_at, kept.until)
    kept.go_to(begins, "queued")
    if span.started_at is None:
        return []
    ends = min(_first(span.ended_at, kept.until) or kept.until, kept.until)
    legs = []
    for launch, after in zip(span.launches, (*span.launches[1:], None), strict=False):
        is_last = after is None
        over = _first(launch.ended_at, after.started_at if after else None, ends)
        limit = min(ends, over if over is not None else ends)
        kept.go_to(launch.started_at, "starting", limit)
        if launch.trained_from is None:
            # It never trained: all that it did was begin.
            kept.go_to(limit, "starting", limit)
        else:
            kept.go_to(launch.loads_from, "starting", limit)
            kept.go_to(launch.trained_from, "loading" if launch.loads_from else "starting", limit)
        asked = span.stop_requested_at if is_last else None
        trained_until = _first(launch.trained_until, asked, limit)
        window = kept.cursor
        trained_s = kept.go_to(_earliest(launch.hangs_from, trained_until), "training", limit)
        held = _overlaps(launch.held, window, kept.cursor)
        held_s = sum(end - begin for begin, end in held)
        pieces = kept.split(held, number, window)
        kept.add("training", -held_s)
        kept.add("blocked", held_s)
        kept.go_to(trained_until, "hung", limit)
        kept.go_to(limit, "flushing", limit)
        last_step = launch.last_step
        if last_step is None and is_last:
            last_step = span.last_step
        legs.append(
            _Leg(
                span=number,
                pieces=pieces,
                resumed_step=launch.resumed_step,
                last_step=last_step,
                trained_s=trained_s - held_s,
            )
        )
    # With no launch told of, what is known is that it began; else the rest is its end.
    kept.go_to(ends, "flushing" if span.launches else "starting", ends)
    return legs


def _overlaps(
    held: Sequence[tuple[float, float]], low: float, high: float
) -> list[tuple[float, float]]:
    """The times between `low` and `high` that any of the spans `held` covers, each once."""
    found, reached = [], low
    for begin, end in sorted(held):
        begin, end = max(begin, reached), min(end, high)
        if end > begin:
            found.append((begin, end))
            reached = end
    return found


def _find_lost(legs: Sequence[_Leg], safe_step: int | None) -> None:
    """Give each leg what of it was lost: the last of its steps, at its own pace.

    `safe_step` is where a next launch would resume; None while the last one goes on.
    """
    # Steps on the run's present branch, oldest first: (leg, after its first, up to its last).
    branch: list[tuple[_Leg, int, int]] = []

    def go_back(to: int | None) -> None:
        while to is not None and branch and branch[-1][2] > to:
            owner, first, last = branch.pop()
            kept_to = max(first, to)
            owner.steps_lost += last - kept_to
            if kept_to > first:
                branch.append((owner, first, kept_to))

    for leg in legs:
        go_back(leg.resumed_step)
        if leg.last_step is None:
            continue
        first = leg.resumed_step or (branch[-1][2] if branch else 0)
        if leg.last_step > first:
            branch.append((leg, first, leg.last_step))
    go_back(safe_step)
    for leg in legs:
        steps = (leg.last_step or 0) - (leg.resumed_step or 0)
        if leg.steps_lost and steps > 0:
            leg.lost_s = leg.trained_s * min(1.0, leg.steps_lost / steps)


def _held_s(parts: Mapping[str, float]) -> float:
    """Seconds for which an attempt held its GPUs."""
    return sum(seconds for part, seconds in parts.items() if part not in {"queued", "stopped"})


def _preemption_gpu_s(
    spans: Sequence[Span], by_span: Sequence[Mapping[str, float]], legs: Sequence[_Leg]
) -> float:
    """GPU seconds that would not have been spent without preemptions."""
    total_s = 0.0
    for number, span in enumerate(spans):
        if span.is_preempted:
            lost_s = sum(leg.lost_s for leg in legs if leg.span == number)
            total_s += span.world_size * (by_span[number]["flushing"] + lost_s)
        if number and spans[number - 1].is_preempted:
            begun_s = by_span[number]["starting"] + by_span[number]["loading"]
            total_s += span.world_size * begun_s
    return total_s


def _costs(hours: float, preempted_hours: float, prices: Prices) -> dict[str, Any]:
    paid, steady = prices.gpu_hour, prices.on_demand_per_gpu_hour
    cost = None if paid is None else hours * paid
    on_demand = None if steady is None else max(0.0, hours - preempted_hours) * steady
    return {
        "cost": cost,
        "preemption_cost": None if paid is None else preempted_hours * paid,
        "on_demand_cost": on_demand,
        "saved": None if cost is None or on_demand is None else on_demand - cost,
        "currency": None if paid is None and steady is None else prices.currency,
    }


def _first(*times: float | None) -> float | None:
    """The first time that is known."""
    return next((time for time in times if time is not None), None)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
