"""Prices of GPU time, and what a run's GPU hours cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The price of one GPU hour: the price paid, and the price without preemptions."""

    gpu_hour: float | None = None
    on_demand_per_gpu_hour: float | None = None
    currency: str = "USD"


def prices_of(spec: Mapping[str, Any]) -> Prices:
    """Return the prices in a run's spec, given as plain data."""
    cost = spec.get("cost") or {}
    return Prices(**{key: cost[key] for key in Prices.__dataclass_fields__ if key in cost})


def costs_of(hours: float, preempted_hours: float, prices: Prices) -> dict[str, Any]:
    """Return the cost fields of `goodput.Goodput` for GPU hours; None for unknown prices."""
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
