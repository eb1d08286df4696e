"""Queries for the pages of the web UI: machines, metrics by step, and totals over all runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, cast

from sqlalchemy import Double, func, select
from sqlalchemy import cast as sql_cast
from typing_extensions import TypedDict

from holdfast.contracts.errors import NotFoundError
from holdfast.lineage.database import permissions, tables
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import pages, reports, views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT, RowOrder, RowPage, fetch_page
from holdfast.lineage.queries.find import RUN_UID, Row, rows_of, run_row

# Queries for a run's metrics and its speed, by launch.

POINTS_DEFAULT: Final = 1000
_NUMBERS: Final = frozenset({int, float, type(None)})
_BUCKETS: Final = (
    select(*(tables.METRICS.c[name] for name in ("attempt", "launch", "step", "time", "data")))
    .where(tables.METRICS.c.run_uid == RUN_UID)
    .order_by(tables.METRICS.c.attempt, tables.METRICS.c.launch, tables.METRICS.c.bucket)
)


def metric_series(
    database: Database,
    run: str,
    *,
    names: Sequence[str] = (),
    points: int = POINTS_DEFAULT,
) -> list[reports.Series]:
    """Return the metrics of each launch of a run, in order, with about `points` points in total.

    `names` selects metrics; by default all are returned. A point covers a range of steps and has
    the last, lowest and highest value, so spikes stay visible. Raises `NotFoundError` for an
    unknown run.
    """
    with database.reading() as connection:
        row = run_row(connection, run)
        found = rows_of(connection, _BUCKETS, run_uid=row["uid"])
    by_launch: dict[tuple[int, int], list[Row]] = {}
    for one in found:
        by_launch.setdefault((one["attempt"], one["launch"]), []).append(one)
    every = max(1, -(-len(found) // max(1, points)))
    return [
        reports.Series(
            attempt=key[0],
            launch=key[1],
            points=_points(buckets, every, names),
        )
        for key, buckets in by_launch.items()
    ]


def _points(buckets: Sequence[Row], every: int, names: Sequence[str]) -> list[reports.Point]:
    """Merge each `every` buckets into one point; the rate is between the ends of two points."""
    points: list[reports.Point] = []
    for start in range(0, len(buckets), every):
        group = buckets[start : start + every]
        step, time = group[-1]["step"], group[-1]["time"]
        before = points[-1] if points else None
        took = time - before["time_s"] if before else 0.0
        points.append(
            reports.Point(
                step=step,
                time=views.iso_time(time),
                time_s=time,
                steps_per_s=(step - before["step"]) / took if before and took > 0 else None,
                values=_spreads(group, names),
            )
        )
    return points


def _spreads(group: Sequence[Row], names: Sequence[str]) -> dict[str, reports.Spread]:
    """Return the spread of each metric over all buckets of `group`, by name."""
    values: dict[str, reports.Spread] = {}
    for bucket in group:
        for name, spread in bucket["data"].items():
            if (not names or name in names) and _is_spread(spread):
                values[name] = _join(values.get(name), *spread[1:])
    return values


def _is_spread(value: Any) -> bool:
    """Return True for the step, last, lowest and highest value of a metric."""
    return isinstance(value, list) and len(value) == 4 and {*map(type, value)} <= _NUMBERS


def _join(
    so_far: reports.Spread | None, last: float | None, low: float | None, high: float | None
) -> reports.Spread:
    if so_far is None:
        return reports.Spread(last=last, low=low, high=high)
    lows = [v for v in (so_far["low"], low) if v is not None]
    highs = [v for v in (so_far["high"], high) if v is not None]
    return reports.Spread(last=last, low=min(lows, default=None), high=max(highs, default=None))


# Queries about machines: their attempts and the failures that are attributed to them.

FAULTS_SHOWN_MAX = 20


def list_nodes(
    database: Database, *, after: str | None = None, limit: int = PAGE_DEFAULT
) -> RowPage[reports.NodeRow]:
    """Return one page of the hosts that attempts ran on, by name, with their faults by cause.

    Raises `QueryError` for an invalid cursor or limit.
    """
    columns = tables.NODES.c
    hosts = select(columns.host).group_by(columns.host)
    with database.reading() as connection:
        hosts = permissions.readable(connection, hosts, columns.run_uid)
        page = fetch_page(connection, hosts, RowOrder("host", (columns.host,)), after, limit)
        hosts_shown = [row["host"] for row in page.items]
        found = (columns.host, columns.fault, func.count().label("count"))
        newest = (func.max(columns[name]).label(name) for name in ("started_at", "ended_at"))
        query = select(*found, *newest).where(columns.host.in_(hosts_shown))
        query = permissions.readable(connection, query, columns.run_uid)
        counts = rows_of(connection, query.group_by(columns.host, columns.fault))
    by_host = defaultdict(list)
    for one in counts:
        by_host[one["host"]].append(one)
    return page.map(lambda row: _node_row(row["host"], by_host[row["host"]]))


def _node_row(host: str, counts: Sequence[Row]) -> reports.NodeRow:
    """Return a host's row; `counts` has a row for each fault, and one for the other attempts."""
    failed = [one for one in counts if one["fault"]]
    return reports.NodeRow(
        host=host,
        attempts=sum(one["count"] for one in counts),
        failures=sum(one["count"] for one in failed),
        faults={one["fault"]: one["count"] for one in failed},
        last_started_at=_newest(one["started_at"] for one in counts),
        last_failed_at=_newest(one["ended_at"] for one in failed),
    )


def node_faults(database: Database, host: str) -> list[reports.NodeFault]:
    """Return the newest faults of a host with attempt and cause, at most `FAULTS_SHOWN_MAX`.

    Raises `NotFoundError` for a host on which no attempt ran.
    """
    columns = tables.NODES.c
    query = (
        select(tables.NODES, tables.RUNS.c.run)
        .join(tables.RUNS, tables.RUNS.c.uid == columns.run_uid)
        .where(columns.host == host, columns.fault.is_not(None))
        .order_by(columns.started_at.desc(), columns.run_uid, columns.attempt)
        .limit(FAULTS_SHOWN_MAX)
    )
    with database.reading() as connection:
        faults = [
            reports.NodeFault(
                run=row["run"],
                attempt=row["attempt"],
                cause=row["fault"],
                started_at=views.iso(row["started_at"]),
                ended_at=views.iso(row["ended_at"]),
            )
            for row in rows_of(connection, permissions.readable(connection, query))
        ]
        known = select(columns.host).where(columns.host == host).limit(1)
        known = permissions.readable(connection, known, columns.run_uid)
        # The same answer for a host of other accounts' runs as for one that does not exist.
        if not faults and not rows_of(connection, known):
            raise NotFoundError(f"{host!r}: no attempt ran on a machine with this name")
    return faults


def _newest(times: Iterable[float | None]) -> str | None:
    return views.iso(max((time for time in times if time is not None), default=None))


# Totals over all runs: the storage of their checkpoints, their goodput and their cost.


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


GroupBy = Literal["user", "partition", "account", "tag"]


class GoodputGroup(TypedDict):
    """The totals of one user, partition, account or tag.

    `name` is null for Slurm's default partition or account, and for the runs without a tag.
    """

    name: str | None
    totals: GoodputTotals


# What is added up over the runs.
_STORED: Final = [name for name in StorageTotals.__annotations__ if name != "runs"]
_MONEY: Final = [name for name in Money.__annotations__ if name != "currency"]
_ADDED: Final = [
    name for name in GoodputTotals.__annotations__ if name not in {"runs", "ettr", "money"}
]


def storage_totals(database: Database, where: pages.RunFilter) -> StorageTotals:
    """Return the total storage of the checkpoints of all matching runs, from the runs table."""
    # Sum as floating point: the sum of many integers could overflow in SQLite.
    columns = {name: sql_cast(tables.RUNS.c[name], Double) for name in _STORED}
    sums = [func.coalesce(func.sum(column), 0).label(name) for name, column in columns.items()]
    with database.reading() as connection:
        query = pages.wanted_runs(connection, select(func.count().label("runs"), *sums), where)
        (row,) = rows_of(connection, query)
    return cast(StorageTotals, {name: int(value) for name, value in row.items()})


def goodput_totals(database: Database, where: pages.RunFilter) -> GoodputTotals:
    """Return the total goodput of all matching runs, each up to the last update of its row.

    A run without attempts, such as an imported one, has used no time and does not count.
    """
    query = select(tables.RUNS.c.goodput).where(tables.RUNS.c.attempts > 0)
    with database.reading() as connection:
        found = rows_of(connection, pages.wanted_runs(connection, query, where))
    return _totals_of(row["goodput"] for row in found)


def goodput_groups(database: Database, where: pages.RunFilter, by: GroupBy) -> list[GoodputGroup]:
    """Return the totals of all matching runs by user, partition, account or tag.

    The groups with most GPU hours come first. A run with several tags counts in the group of each.
    """
    columns = {
        "user": tables.RUNS.c.created_by,
        "partition": pages.partition_column(),
        "account": pages.account_column(),
        "tag": tables.RUNS.c.tags,
    }
    query = select(tables.RUNS.c.goodput, columns[by].label("name")).where(
        tables.RUNS.c.attempts > 0
    )
    with database.reading() as connection:
        found = rows_of(connection, pages.wanted_runs(connection, query, where))
    accounts: defaultdict[str | None, list[Any]] = defaultdict(list)
    for row in found:
        for name in (row["name"] or [None]) if by == "tag" else [row["name"]]:
            accounts[name].append(row["goodput"])
    groups = [GoodputGroup(name=name, totals=_totals_of(all_)) for name, all_ in accounts.items()]
    return sorted(groups, key=lambda one: (-one["totals"]["gpu_hours"], one["name"] or ""))


def _totals_of(goodputs: Iterable[Any]) -> GoodputTotals:
    accounts = list(goodputs)
    sums = {name: sum(one.get(name) or 0 for one in accounts) for name in _ADDED}
    # Another version may have recorded a fraction.
    sums["steps_lost"] = int(sums["steps_lost"])
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
