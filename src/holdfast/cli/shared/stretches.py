"""The table of a run's stretches: its time and cost at each place of `resources`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cli.shared.output import print_table, seconds_text

HEADINGS = ("place", "attempts", "time", "ETTR", "lost", "GPU hours", "cost", "on demand")


def print_stretches(stretches: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each stretch, as `Stretch.as_json` gives it."""
    print_table(HEADINGS, [_cells(one) for one in stretches])


def _cells(one: Mapping[str, Any]) -> tuple[object, ...]:
    is_single = one["first"] == one["last"]
    return (
        one["name"],
        one["first"] if is_single else f"{one['first']}–{one['last']}",
        seconds_text(one["ended_at"] - one["began_at"]),
        f"{one['ettr']:.1%}",
        one["steps_lost"],
        f"{one['gpu_hours']:.2f}",
        _price(one, "cost"),
        _price(one, "on_demand_cost"),
    )


def _price(one: Mapping[str, Any], key: str) -> str | None:
    return None if one[key] is None else f"{one[key]:,.2f} {one['currency']}"
