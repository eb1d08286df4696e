"""The time and cost of a run by stretch: attempts in a row at one place of `resources`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from holdfast.contracts.account.goodput import account, held_by_attempt
from holdfast.contracts.account.prices import Prices, costs_of
from holdfast.contracts.records.tally import Span
from holdfast.contracts.spec.resources import Resources


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
