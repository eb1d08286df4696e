"""Totals over all runs: the storage of their checkpoints, their goodput and their cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from sqlalchemy import Double, func, select
from sqlalchemy import cast as sql_cast
from typing_extensions import TypedDict

from holdfast.lineage.database.tables import RUNS
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries.find import rows_of
from holdfast.lineage.queries.pages import RunFilter, wanted_runs

_STORED: Final = (*("kept", "kept_bytes", "damaged", "damaged_bytes", "deleted", "deleted_bytes"),)
_ADDED: Final = (
    *("total_s", "queued_s", "starting_s", "loading_s", "training_s", "lost_s", "blocked_s"),
    *("hung_s", "flushing_s", "stopped_s", "steps_lost", "gpu_hours", "preemption_gpu_hours"),
)
_MONEY: Final = ("cost", "preemption_cost", "on_demand_cost", "saved")


class StorageTotals(TypedDict):
    """Checkpoints and bytes of all matching runs, by state."""

    runs: int
    kept: int
    kept_bytes: int
    damaged: int
    damaged_bytes: int
    deleted: int
    deleted_bytes: int


class Money(TypedDict):
    """Totals in one currency; a value is null if no run in this currency has the price."""

    currency: str
    cost: float | None
    preemption_cost: float | None
    on_demand_cost: float | None
    saved: float | None


class GoodputTotals(TypedDict):
    """The goodput of all matching runs: seconds by part, GPU hours and lost steps.

    `ettr` is productive time divided by total time, or null if the total is 0.
    """

    runs: int
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
    ettr: float | None
    steps_lost: int
    gpu_hours: float
    preemption_gpu_hours: float
    money: list[Money]


def storage_totals(database: Database, where: RunFilter) -> StorageTotals:
    """Return the total storage of the checkpoints of all matching runs, from the runs table."""
    # Sum as floating point: the sum of many integers could overflow in SQLite.
    columns = {name: sql_cast(RUNS.c[name], Double) for name in _STORED}
    sums = [func.coalesce(func.sum(column), 0).label(name) for name, column in columns.items()]
    with database.reading() as connection:
        query = wanted_runs(connection, select(func.count().label("runs"), *sums), where)
        (row,) = rows_of(connection, query)
    return cast(StorageTotals, {name: int(value) for name, value in row.items()})


def goodput_totals(database: Database, where: RunFilter) -> GoodputTotals:
    """Return the total goodput of all matching runs, each up to the last update of its row."""
    with database.reading() as connection:
        found = rows_of(connection, wanted_runs(connection, select(RUNS.c.goodput), where))
    accounts = [row["goodput"] for row in found]
    sums = {name: sum(one.get(name) or 0 for one in accounts) for name in _ADDED}
    total_s, training_s = sums["total_s"], sums["training_s"]
    ettr = training_s / total_s if total_s > 0 else None
    totals = {"runs": len(accounts), "ettr": ettr, "money": _money(accounts), **sums}
    return cast(GoodputTotals, totals)


def _money(accounts: Iterable[Mapping[str, Any]]) -> list[Money]:
    """Return totals by currency of the accounts that have a price."""
    by_currency: defaultdict[str, dict[str, float | None]] = defaultdict(
        lambda: dict.fromkeys(_MONEY)
    )
    for account in accounts:
        for name in _MONEY:
            value = account.get(name)
            if value is not None:
                sums = by_currency[str(account.get("currency") or "")]
                sums[name] = (sums[name] or 0.0) + value
    return [
        cast(Money, {"currency": currency, **sums})
        for currency, sums in sorted(by_currency.items())
    ]
