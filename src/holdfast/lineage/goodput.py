"""Where a run's time went. Pure.

Wall time is cut into parts that add up to it: queued, starting, training, lost, blocked and
stopped. ETTR, the effective training time ratio, is productive time over wall time, queueing
and restarts included (arXiv 2410.21680).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from typing_extensions import TypedDict

SECONDS_PER_HOUR: Final = 3600.0


class Goodput(TypedDict):
    """The account of a run: durations in seconds, steps in optimizer steps."""

    total_s: float
    queued_s: float
    starting_s: float
    training_s: float
    lost_s: float
    blocked_s: float
    stopped_s: float
    ettr: float
    steps_lost: int
    gpu_hours: float
    cost: float | None
    currency: str | None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of torchrun: `trained_from` is when its state was restored. Unix seconds."""

    started_at: float | None = None
    trained_from: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """One attempt, in order of number. Unix seconds."""

    world_size: int
    submitted_at: float | None = None
    started_at: float | None = None
    stop_requested_at: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    launches: tuple[Launch, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Steps trained without a break: from `resumed_step` to `last_step`, in `window_s` seconds."""

    resumed_step: int | None
    last_step: int | None
    window_s: float


def account(
    spans: Sequence[Span],
    *,
    created_at: float,
    until: float,
    blocked_s: float = 0.0,
    gpu_hour: float | None = None,
    currency: str | None = None,
) -> Goodput:
    """The account from `created_at` to `until`, the end of an ended run or now.

    `blocked_s` is the time that all saves of the run held training, `gpu_hour` the price of one
    GPU for an hour. Lost time is what the steps trained again had cost the first time.
    """
    told = any(launch.trained_from is not None for span in spans for launch in span.launches)
    legs = [leg for span in spans for leg in _legs(span, until, told=told)]
    held_s = sum(_held_s(span, until) for span in spans)
    # Clocks of several machines can contradict each other; the parts add up all the same.
    window_s = min(sum(leg.window_s for leg in legs), held_s)
    tail_s = sum(_tail_s(span, until) for span in spans)
    total_s = max(0.0, until - created_at, held_s)
    queued_s = min(sum(_queued_s(span, until) for span in spans), total_s - held_s)
    lost = _lost(legs)
    lost_s = min(sum(seconds for _, seconds in lost), window_s)
    blocked_s = min(blocked_s, window_s - lost_s)
    training_s = window_s - lost_s - blocked_s
    starting_s = max(0.0, held_s - window_s - tail_s)
    gpu_s = sum(span.world_size * _held_s(span, until) for span in spans)
    hours = gpu_s / SECONDS_PER_HOUR
    return Goodput(
        total_s=total_s,
        queued_s=queued_s,
        starting_s=starting_s,
        training_s=training_s,
        lost_s=lost_s,
        blocked_s=blocked_s,
        stopped_s=max(0.0, total_s - queued_s - starting_s - window_s),
        ettr=training_s / total_s if total_s else 0.0,
        steps_lost=sum(steps for steps, _ in lost),
        gpu_hours=hours,
        cost=None if gpu_hour is None else hours * gpu_hour,
        currency=None if gpu_hour is None else currency,
    )


def _queued_s(span: Span, until: float) -> float:
    if span.submitted_at is None:
        return 0.0
    return max(0.0, _first(span.started_at, span.ended_at, until) - span.submitted_at)


def _held_s(span: Span, until: float) -> float:
    """Seconds for which the attempt held its GPUs."""
    if span.started_at is None:
        return 0.0
    return max(0.0, _first(span.ended_at, until) - span.started_at)


def _tail_s(span: Span, until: float) -> float:
    """Seconds from the end of training to the end of the attempt: the last flush and the exit."""
    if span.started_at is None or (span.ended_at is None and span.stop_requested_at is None):
        return 0.0
    ended_at = _first(span.ended_at, until)
    return max(0.0, min(ended_at - _training_ends(span, ended_at), ended_at - span.started_at))


def _training_ends(span: Span, ended_at: float) -> float:
    last = span.launches[-1].ended_at if span.launches else None
    return min(_first(span.stop_requested_at, ended_at), _first(last, ended_at))


def _legs(span: Span, until: float, *, told: bool) -> list[Leg]:
    """The legs of one attempt; `told` when launches of this run say when training began."""
    if span.started_at is None:
        return []
    ended_at = _first(span.ended_at, until)
    training_ends = _training_ends(span, ended_at)
    if not span.launches:
        window_s = 0.0 if told else max(0.0, training_ends - span.started_at)
        return [Leg(resumed_step=span.resumed_step, last_step=span.last_step, window_s=window_s)]
    legs = []
    for launch in span.launches:
        is_last = launch is span.launches[-1]
        begins = launch.trained_from if told else _first(launch.started_at, span.started_at)
        ends = min(_first(launch.ended_at, ended_at), training_ends if is_last else ended_at)
        last_step = launch.last_step
        if last_step is None and is_last and launch.resumed_step is not None:
            last_step = span.last_step
        legs.append(
            Leg(
                resumed_step=launch.resumed_step,
                last_step=last_step,
                window_s=0.0 if begins is None else max(0.0, ends - begins),
            )
        )
    return legs


def _lost(legs: Sequence[Leg]) -> list[tuple[int, float]]:
    """(steps, seconds) trained again after each break."""
    lost = []
    reached: int | None = None
    step_s = 0.0
    for leg in legs:
        if leg.resumed_step is not None:
            if reached is not None and reached > leg.resumed_step:
                steps = reached - leg.resumed_step
                lost.append((steps, steps * step_s))
            reached = leg.resumed_step
        if leg.last_step is not None and (reached is None or leg.last_step >= reached):
            trained = leg.last_step - (leg.resumed_step or 0)
            step_s = leg.window_s / trained if trained > 0 else step_s
            reached = leg.last_step
    return lost


def _first(*times: float | None) -> float:
    """The first time that is known; the last one given always is."""
    found = next((time for time in times if time is not None), None)
    assert found is not None
    return found
