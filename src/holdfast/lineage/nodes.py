"""Queries about machines: their attempts and the failures that are attributed to them."""

from __future__ import annotations

from sqlalchemy import func, select

from holdfast.lineage import reports, views
from holdfast.lineage.cursors import PAGE_DEFAULT, Order, Page, fetch_page
from holdfast.lineage.database import Database
from holdfast.lineage.find import rows_of
from holdfast.lineage.tables import NODES, RUNS

FAULTS_SHOWN_MAX = 20


def list_nodes(
    database: Database, *, after: str | None = None, limit: int = PAGE_DEFAULT
) -> Page[reports.NodeRow]:
    """Return one page of the hosts that attempts ran on, by name, with their faults by cause.

    Raises `QueryError` for an invalid cursor or limit.
    """
    columns = NODES.c
    order = Order("host", (columns.host,))
    hosts = select(columns.host).group_by(columns.host)
    with database.reading() as connection:
        page = fetch_page(connection, hosts, order, after, limit)
        chosen = [row["host"] for row in page.items]
        counts = rows_of(
            connection,
            select(
                columns.host,
                columns.fault,
                func.count().label("count"),
                func.max(columns.started_at).label("started_at"),
                func.max(columns.ended_at).label("ended_at"),
            )
            .where(columns.host.in_(chosen))
            .group_by(columns.host, columns.fault),
        )
    rows = {
        host: reports.NodeRow(
            host=host, attempts=0, failures=0, faults={}, last_started_at=None, last_failed_at=None
        )
        for host in chosen
    }
    for one in counts:
        row = rows[one["host"]]
        row["attempts"] += one["count"]
        row["last_started_at"] = _later(row["last_started_at"], views.iso(one["started_at"]))
        if one["fault"]:
            row["failures"] += one["count"]
            row["faults"][one["fault"]] = one["count"]
            row["last_failed_at"] = _later(row["last_failed_at"], views.iso(one["ended_at"]))
    return Page(list(rows.values()), page.next)


def node_faults(database: Database, host: str) -> list[reports.NodeFault]:
    """Return the newest faults of a host with attempt and cause, at most `FAULTS_SHOWN_MAX`."""
    columns = NODES.c
    query = (
        select(NODES, RUNS.c.run)
        .join(RUNS, RUNS.c.uid == columns.run_uid)
        .where(columns.host == host, columns.fault.is_not(None))
        .order_by(columns.started_at.desc(), columns.run_uid, columns.attempt)
        .limit(FAULTS_SHOWN_MAX)
    )
    with database.reading() as connection:
        found = rows_of(connection, query)
    return [
        reports.NodeFault(
            run=one["run"],
            attempt=one["attempt"],
            cause=one["fault"],
            started_at=views.iso(one["started_at"]),
            ended_at=views.iso(one["ended_at"]),
        )
        for one in found
    ]


def _later(one: str | None, other: str | None) -> str | None:
    return max((moment for moment in (one, other) if moment), default=None)
