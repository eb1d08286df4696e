"""Queries about machines: their attempts and the failures that are attributed to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sqlalchemy import func, select

from holdfast.contracts.errors import NotFoundError
from holdfast.lineage.database.permissions import readable
from holdfast.lineage.database.tables import NODES, RUNS
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import reports, views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT, Order, Page, fetch_page
from holdfast.lineage.queries.find import Row, rows_of

FAULTS_SHOWN_MAX = 20


def list_nodes(
    database: Database, *, after: str | None = None, limit: int = PAGE_DEFAULT
) -> Page[reports.NodeRow]:
    """Return one page of the hosts that attempts ran on, by name, with their faults by cause.

    Raises `QueryError` for an invalid cursor or limit.
    """
    columns = NODES.c
    hosts = select(columns.host).group_by(columns.host)
    with database.reading() as connection:
        hosts = readable(connection, hosts, columns.run_uid)
        page = fetch_page(connection, hosts, Order("host", (columns.host,)), after, limit)
        hosts_shown = [row["host"] for row in page.items]
        found = (columns.host, columns.fault, func.count().label("count"))
        newest = (func.max(columns[name]).label(name) for name in ("started_at", "ended_at"))
        query = select(*found, *newest).where(columns.host.in_(hosts_shown))
        query = readable(connection, query, columns.run_uid)
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
    columns = NODES.c
    query = (
        select(NODES, RUNS.c.run)
        .join(RUNS, RUNS.c.uid == columns.run_uid)
        .where(columns.host == host, columns.fault.is_not(None))
        .order_by(columns.started_at.desc(), columns.run_uid, columns.attempt)
        .limit(FAULTS_SHOWN_MAX)
    )
    with database.reading() as connection:
        faults = [_node_fault(row) for row in rows_of(connection, readable(connection, query))]
        known = select(columns.host).where(columns.host == host).limit(1)
        known = readable(connection, known, columns.run_uid)
        if not faults and not rows_of(connection, known):
            raise NotFoundError(f"{host!r}: no attempt ran on a machine with this name")
    return faults


def _node_fault(row: Row) -> reports.NodeFault:
    return reports.NodeFault(
        run=row["run"],
        attempt=row["attempt"],
        cause=row["fault"],
        started_at=views.iso(row["started_at"]),
        ended_at=views.iso(row["ended_at"]),
    )


def _newest(times: Iterable[float | None]) -> str | None:
    return views.iso(max((time for time in times if time is not None), default=None))
