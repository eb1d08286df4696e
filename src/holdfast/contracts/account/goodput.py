"""The account of a run's wall time in nine parts, computed from its journal alone. Pure functions.

    queued     the attempt waits in the scheduler's queue
    starting   the attempt has its nodes, but no rank has reported a step yet
    loading    ranks restore the state
    training   reported steps that were not lost later: productive time
    lost       steps that were trained again, or that are in no checkpoint after the last attempt
    blocked    a save blocks training
    hung       ranks are silent, until they report again or the launch ends
    flushing   training is over, and the last state is being written to storage
    stopped    no attempt runs: waiting, paused or between attempts

A cursor moves through the run's attempts and launches in order and never goes back. So the parts
add up to the wall time even if the clocks of the machines differ. ETTR, the effective training
time ratio, is productive time divided by wall time, including the queue (arXiv 2410.21680).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final

from holdfast.contracts.records.tally import LaunchSpan, Span
from holdfast.contracts.spec.part import section
from holdfast.contracts.spec.resources import Resources


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The price of one GPU hour: the price paid, and the price without preemptions."""

    gpu_hour: float | None = None
    on_demand_per_gpu_hour: float | None = None
    currency: str = "USD"


def prices_of(spec: Mapping[str, Any]) -> Prices:
    """Return the prices in a run's spec, given as plain data."""
    cost = section(spec, "cost")
    numbers = {key: cost.get(key) for key in ("gpu_hour", "on_demand_per_gpu_hour")}
    found: dict[str, Any] = {key: one for key, one in numbers.items() if type(one) in {int, float}}
    if isinstance(cost.get("currency"), str):
        found["currency"] = cost["currency"]
    return Prices(**found)


@dataclass(frozen=True)
class Held:
    """GPU hours of an attempt, and those of them that preemptions cost.

    `gpu_hour` is the price where the attempt ran; None for that of the run.
    """

    hours: float
    preempted_hours: float
    gpu_hour: float | None = None


def costs_of(held: Sequence[Held], prices: Prices) -> dict[str, Any]:
    """Return the cost fields of `goodput.Goodput` for GPU hours; None for unknown prices."""
    held, steady = [one for one in held if one.hours], prices.on_demand_per_gpu_hour
    paid = [prices.gpu_hour if one.gpu_hour is None else one.gpu_hour for one in held]
    known = [price for price in paid if price is not None]
    # One unknown price makes the sum unknown. A cost without some of its hours would look too
    # small.
    is_known = len(known) == len(held) and (bool(held) or prices.gpu_hour is not None)
    cost = sum(one.hours * price for one, price in zip(held, known, strict=False))
    lost = sum(one.preempted_hours * price for one, price in zip(held, known, strict=False))
    # On demand, nothing would have been preempted, so those hours would not have been needed.
    useful = max(0.0, sum(one.hours - one.preempted_hours for one in held))
    on_demand = None if steady is None else useful * steady
    return {
        "cost": cost if is_known else None,
        "preemption_cost": lost if is_known else None,
        "on_demand_cost": on_demand,
        "saved": on_demand - cost if is_known and on_demand is not None else None,
        "currency": None if not is_known and steady is None else prices.currency,
    }


SECONDS_PER_HOUR: Final = 3600.0
PARTS: Final = (
    *("queued", "starting", "loading", "training", "lost", "blocked", "hung", "flushing"),
    "stopped",
)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The account of a run. Durations are in seconds, steps are optimizer steps.

    The cost of preemptions is the GPU time of the last flush of each preempted attempt, of the
    steps that it lost, and of the next attempt's start and load. `on_demand_cost` is the on-demand
    price of all other GPU time. `saved` is `on_demand_cost` minus `cost`.
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


@dataclass(frozen=True)
class Segment:
    """A period of one part in one attempt. `span` is the attempt's index. Times: Unix seconds."""

    span: int
    part: str
    began_at: float
    ended_at: float


@dataclass
class _Leg:
    """The steps of one launch, and the seconds that they took.

    `pieces` are the periods of training, without those in which a save blocked it.
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
    """The parts so far, in total and by attempt, and the cursor in Unix seconds."""

    cursor: float
    until: float
    blocked_s_min: float = 0.0
    by_span: list[dict[str, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    segments: list[Segment] = field(default_factory=list)

    def go_to(self, moment: float | None, part: str, limit: float | None = None) -> float:
        """Add the time up to `moment`, but not beyond `limit`, to `part`. Return the seconds added.

        Adds nothing if `moment` is before the cursor.
        """
        if moment is None or math.isnan(moment):
            return 0.0
        end = min(moment, self.until, self.until if limit is None else limit)
        if end <= self.cursor:
            return 0.0
        seconds = end - self.cursor
        # `segments` adds the periods of training, once it is known which of their steps were lost.
        if part not in {"stopped", "training"}:
            self.segments.append(Segment(len(self.by_span) - 1, part, self.cursor, end))
        self.cursor = end
        self.add(part, seconds)
        return seconds

    def split(
        self, held: Sequence[tuple[float, float]], span: int, began_at: float
    ) -> list[tuple[float, float]]:
        """Return the periods of training from `began_at` to the cursor, without those in `held`."""
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


def account(
    spans: Sequence[Span],
    *,
    created_at: float,
    until: float,
    prices: Prices | None = None,
    safe_step: int | None = None,
    known: KnownSpans | None = None,
) -> Goodput:
    """Return the account from `created_at` to `until` (the run's end, or now), in Unix seconds.

    `spans` are the attempts in order of number. `safe_step` is the newest committed step, 0 without
    a checkpoint, None if unknown. Once the last attempt has ended, the steps after it are lost.
    With `known`, spans that were the same objects in the last call need little time.
    """
    kept, legs = _fold(spans, created_at, until, safe_step=safe_step, known=known)
    total_s = kept.until - created_at
    lost_s = sum(leg.lost_s for leg in legs)
    # Lost time was counted as training while the cursor passed it. Only a later resume shows that
    # those steps were trained again.
    kept.parts["training"] -= lost_s
    kept.parts["lost"] += lost_s
    held = _held(spans, kept, legs)
    parts: dict[str, Any] = {f"{part}_s": max(0.0, s) for part, s in kept.parts.items()}
    return Goodput(
        total_s=total_s,
        **parts,
        # Rounding can bring the quotient above 1.
        ettr=min(1.0, parts["training_s"] / total_s) if total_s else 0.0,
        steps_lost=sum(leg.steps_lost for leg in legs),
        gpu_hours=sum(one.hours for one in held),
        preemption_gpu_hours=sum(one.preempted_hours for one in held),
        **costs_of(held, prices or Prices()),
    )


def held_by_attempt(
    spans: Sequence[Span], *, created_at: float, until: float, safe_step: int | None = None
) -> list[Held]:
    """Return the GPU hours of each attempt, which `account` adds up."""
    kept, legs = _fold(spans, created_at, until, safe_step=safe_step)
    return _held(spans, kept, legs)


def segments(
    spans: Sequence[Span],
    *,
    created_at: float,
    until: float,
    blocked_s_min: float = 0.0,
    safe_step: int | None = None,
) -> list[Segment]:
    """Return the periods behind `account`, in order of attempts.

    Times between attempts are left out. Saves that blocked training for less than `blocked_s_min`
    seconds count as training.
    """
    kept, legs = _fold(spans, created_at, until, blocked_s_min, safe_step)
    found = list(kept.segments)
    for leg in legs:
        left_s = leg.lost_s
        # The lost steps are the last ones of the leg.
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
    known: KnownSpans | None = None,
) -> tuple[_Account, list[_Leg]]:
    """Move one cursor through all attempts. Return the account and its legs of training."""
    # If clocks contradict each other, the run must not end before it was created.
    until = max(created_at, until)
    has_times = any(one.trained_from is not None for span in spans for one in span.launches)
    found = known and known.start(spans, created_at, until, has_times=has_times)
    kept, legs = found or (
        _Account(cursor=created_at, until=until, blocked_s_min=blocked_s_min),
        [],
    )
    _walk_all(kept, legs, spans, has_times=has_times)
    kept.by_span.append(dict.fromkeys(PARTS, 0.0))
    kept.go_to(kept.until, "stopped")
    # While the run continues, nobody knows which steps a next launch would train again.
    _find_lost(legs, safe_step if spans and spans[-1].ended_at is not None else None)
    return kept, legs


def _walk_all(kept: _Account, legs: list[_Leg], spans: Sequence[Span], *, has_times: bool) -> None:
    """Move the cursor through the attempts that it has not passed yet."""
    for number in range(len(kept.by_span), len(spans)):
        given = spans[number]
        span = replace(given, launches=_launches(given, has_times=has_times))
        queued_at = span.started_at if span.submitted_at is None else span.submitted_at
        kept.go_to(queued_at, "stopped")
        kept.by_span.append(dict.fromkeys(PARTS, 0.0))
        legs += _walk(kept, span, number)


class KnownSpans:
    """The account of the first attempts of a run, which had not changed at the last call."""

    def __init__(self) -> None:
        self._last: Sequence[Span] = ()
        self._facts: tuple[float, bool] | None = None
        self._kept: _Account | None = None
        self._legs: list[_Leg] = []

    def start(
        self, spans: Sequence[Span], created_at: float, until: float, *, has_times: bool
    ) -> tuple[_Account, list[_Leg]] | None:
        """Return the account before the first span that is new, or None if there is none."""
        pairs = enumerate(zip(spans, self._last, strict=False))
        most = min(len(spans), len(self._last))
        # The caller keeps the span of an attempt that has not changed, so identity is enough and
        # costs nothing.
        same = next((number for number, (new, old) in pairs if new is not old), most)
        self._last = spans
        kept, facts = self._kept, (created_at, has_times)
        # If an attempt that was counted has changed, or the run's beginning, all are counted again.
        if kept is None or facts != self._facts or len(kept.by_span) > same:
            # Without an end, because a later call may have a later one.
            kept = _Account(cursor=created_at, until=math.inf)
            self._kept, self._facts, self._legs = kept, facts, []
        _walk_all(kept, self._legs, spans[:same], has_times=has_times)
        if kept.cursor > until:
            return None
        # Legs are reused between calls, and what is lost depends on the steps that came later.
        for leg in self._legs:
            leg.lost_s, leg.steps_lost = 0.0, 0
        # Only the last attempt may still grow, so only its dictionary is copied.
        by_span = [*kept.by_span[:-1], *map(dict, kept.by_span[-1:])]
        segments, parts = list(kept.segments), dict(kept.parts)
        again = replace(kept, until=until, by_span=by_span, parts=parts, segments=segments)
        return again, list(self._legs)


def _launches(span: Span, *, has_times: bool) -> tuple[LaunchSpan, ...]:
    """Return the attempt's launches, each with the time at which training started.

    With `has_times`, some launch of the run recorded that time. Otherwise a launch with steps
    trained from its start, and a launch without steps, as of a program without a session, never
    trained.
    """
    begins = span.started_at
    if not span.launches and span.last_step is not None:
        return (LaunchSpan(trained_from=begins, resumed_step=span.resumed_step),)
    if has_times:
        return span.launches
    return tuple(
        replace(one, trained_from=begins if one.started_at is None else one.started_at)
        if one.last_step is not None or (one is span.launches[-1] and span.last_step is not None)
        else one
        for one in span.launches
    )


def _walk(kept: _Account, span: Span, number: int) -> list[_Leg]:
    """Move the cursor through one attempt. Return its legs."""
    begins = _first(span.started_at, span.ended_at, kept.until)
    kept.go_to(begins, "queued")
    if span.started_at is None:
        return []
    ends = min(span.ended_at or kept.until, kept.until)
    legs = []
    for launch, after in zip(span.launches, (*span.launches[1:], None), strict=False):
        over = _first(launch.ended_at, after.started_at if after else None, ends)
        # After the request to stop, the last launch saves and ends. Earlier launches did not hear
        # it.
        asked = None if after else span.stop_requested_at
        last_step = launch.last_step
        if last_step is None and after is None:
            last_step = span.last_step
        pieces, trained_s = _walk_launch(kept, launch, number, min(ends, over), asked)
        legs.append(_Leg(number, pieces, launch.resumed_step, last_step, trained_s))
    # Without a recorded launch, the attempt only started. Otherwise the rest is its last flush.
    kept.go_to(ends, "flushing" if span.launches else "starting", ends)
    return legs


def _walk_launch(
    kept: _Account, launch: LaunchSpan, span: int, limit: float, asked: float | None
) -> tuple[list[tuple[float, float]], float]:
    """Move the cursor through one launch. Return its periods of training and their seconds."""
    kept.go_to(launch.started_at, "starting", limit)
    if launch.trained_from is None:
        # The launch never trained.
        kept.go_to(limit, "starting", limit)
    else:
        kept.go_to(launch.loads_from, "starting", limit)
        kept.go_to(launch.trained_from, "loading" if launch.loads_from else "starting", limit)
    trained_until = _first(launch.trained_until, asked, limit)
    began_at = kept.cursor
    hangs_from = _first(launch.hangs_from, launch.silent_from, trained_until)
    worked_until = min(trained_until, hangs_from)
    trained_s = kept.go_to(worked_until, "training", limit)
    held = _overlaps(launch.held, began_at, kept.cursor)
    # Saves of several ranks overlap. Their union is the time for which training was blocked.
    held_s = sum(end - begin for begin, end in held)
    if launch.blocked is not None:
        # A tally is a sum, so its saves may lie outside of these periods.
        held_s = min(trained_s, held_s + launch.blocked.within(began_at, kept.cursor))
    pieces = kept.split(held, span, began_at)
    kept.add("training", -held_s)
    kept.add("blocked", held_s)
    kept.go_to(trained_until, "hung", limit)
    kept.go_to(limit, "flushing", limit)
    return pieces, trained_s - held_s


def _overlaps(
    held: Sequence[tuple[float, float]], low: float, high: float
) -> list[tuple[float, float]]:
    """Return the union of the periods in `held`, limited to `low` to `high`."""
    found, reached = [], low
    for begin, end in sorted(held):
        begin, end = max(begin, reached), min(end, high)
        if end > begin:
            found.append((begin, end))
            reached = end
    return found


def _find_lost(legs: Sequence[_Leg], safe_step: int | None) -> None:
    """Set the lost steps and seconds of each leg: its last steps, at its average pace.

    `safe_step` is the step that a next launch would resume from, or None while the run continues.
    """
    # Steps on the run's current branch, oldest first: (leg, step before its first, its last step).
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
        first = leg.resumed_step or (branch[-1][2] if branch else 0)
        if leg.last_step is not None and leg.last_step > first:
            branch.append((leg, first, leg.last_step))
    go_back(safe_step)
    for leg in legs:
        steps = (leg.last_step or 0) - (leg.resumed_step or 0)
        if leg.steps_lost and steps > 0:
            leg.lost_s = leg.trained_s * min(1.0, leg.steps_lost / steps)


def _held(spans: Sequence[Span], kept: _Account, legs: Sequence[_Leg]) -> list[Held]:
    preempted = _preemption_gpu_s(spans, kept.by_span, legs)
    return [
        # `by_span` has one more entry, the time after the last attempt.
        Held(span.gpus * _held_s(own) / SECONDS_PER_HOUR, lost / SECONDS_PER_HOUR, span.gpu_hour)
        for span, own, lost in zip(spans, kept.by_span, preempted, strict=False)
    ]


def _held_s(parts: Mapping[str, float]) -> float:
    """Return the seconds for which an attempt held its GPUs."""
    # A sum over names takes several times as long, and a run can have a thousand attempts.
    busy_s = parts["starting"] + parts["loading"] + parts["training"] + parts["lost"]
    return busy_s + parts["blocked"] + parts["hung"] + parts["flushing"]


def _preemption_gpu_s(
    spans: Sequence[Span], by_span: Sequence[Mapping[str, float]], legs: Sequence[_Leg]
) -> list[float]:
    """Return the GPU seconds of each attempt that preemptions cost, see `Goodput`."""
    found = []
    lost_s: defaultdict[int, float] = defaultdict(float)
    for leg in legs:
        lost_s[leg.span] += leg.lost_s
    for number, (span, own) in enumerate(zip(spans, by_span, strict=False)):
        seconds = 0.0
        if span.is_preempted:
            seconds += own["flushing"] + lost_s[number]
        if number and spans[number - 1].is_preempted:
            seconds += own["starting"] + own["loading"]
        found.append(span.gpus * seconds)
    return found


def _first(*times: float | None) -> float:
    """Return the first time that is not None. The last one never is."""
    return next(time for time in times if time is not None)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The attempts `first` to `last`, counted from 1, at one place. Times are Unix seconds.

    `place` is 0 for the first choice of `resources`, and n for the n-th fallback. `costs` are the
    fields of `prices.costs_of`.
    """

    place: int
    name: str
    first: int
    last: int
    began_at: float
    ended_at: float
    ettr: float
    steps_lost: int
    gpu_hours: float
    costs: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        values = {name: value for name, value in vars(self).items() if name != "costs"}
        return {**values, **self.costs}


def stretches_of(
    spans: Sequence[Span],
    resources: Resources,
    *,
    created_at: float,
    until: float,
    prices: Prices,
    safe_step: int,
) -> list[Stretch]:
    """Return the stretches in order. Their times, GPU hours and costs add up to those of the run.

    The time between two attempts belongs to the later one, and `until` ends the last stretch. For
    `safe_step`, see `goodput.account`.
    """
    held = held_by_attempt(spans, created_at=created_at, until=until, safe_step=safe_step)
    found = []
    began_at, first = created_at, 0
    for place, grouped in groupby(spans, key=lambda span: span.place):
        own = list(grouped)
        end = first + len(own)
        is_last = end == len(spans)
        ended_at = until if is_last else min(own[-1].ended_at or until, until)
        # Steps after the one that the next attempt resumed from were trained again there, so they
        # are lost here.
        resumed = safe_step if is_last else _resumed_step(spans[end], safe_step)
        time = account(own, created_at=began_at, until=ended_at, safe_step=resumed)
        found.append(
            Stretch(
                place=place,
                name=place_name(resources, place),
                first=first + 1,
                last=end,
                began_at=began_at,
                ended_at=ended_at,
                ettr=time.ettr,
                steps_lost=time.steps_lost,
                gpu_hours=sum(one.hours for one in held[first:end]),
                costs=costs_of(held[first:end], prices),
            )
        )
        began_at, first = ended_at, end
    return found


def _resumed_step(span: Span, safe_step: int) -> int:
    """Return the step from which an attempt continued; `safe_step` if that is unknown."""
    steps = (span.resumed_step, *(launch.resumed_step for launch in span.launches))
    return next((step for step in steps if step is not None), safe_step)


def place_name(resources: Resources, place: int) -> str:
    """Return a place in words: what it changes, or the partition of the first choice."""
    if place == 0:
        return resources.partition or "first choice"
    found = resources.fallbacks[place - 1]
    parts = {
        "": found.partition,
        "QOS ": found.qos,
        "account ": found.account,
        "GPU ": found.gpu_type,
    }
    return ", ".join(f"{kind}{value}" for kind, value in parts.items() if value)
