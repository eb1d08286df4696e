"""Prices of GPU time, and what a run's GPU hours cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.contracts.spec.recorded import section


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
