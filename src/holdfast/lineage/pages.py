"""Lists of the index by pages: runs, attempts, checkpoints, events, storage.

Every list takes what to show (`where`), a cursor of the page before (`after`) and a `limit`, and
gives a `Page`. Raises of all: `QueryError` for a cursor or a limit that cannot be meant,
`NotFoundError` for a run that is not there, `LineageError` when the database cannot be used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, Double, Select, and_, case, func, or_, select

from holdfast.contracts.states import AttemptState, RunState
from holdfast.lineage import views
from holdfast.lineage.cursors import PAGE_DEFAULT, Order, Page, fetch_page
from holdfast.lineage.database import Database
from holdfast.lineage.find import Row, is_under, rows_of, run_row
from holdfast.lineage.models import CheckpointState
from holdfast.lineage.reasons import NOTHING_KEEPS
from holdfast.lineage.retained import keep_of, reasons_of
from holdfast.lineage.series import sparks
from holdfast.lineage.tables import ATTEMPTS, CHECKPOINTS, EVENTS, LAUNCHES, RUNS

RunSort = Literal[
    "live",
    "created",
    "updated",
    "name",
    "state",
    "step",
    "attempts",
    "gpus",
    "checkpoint",
    "goodput",
    "cost",
    "kept",
    "kept_bytes",
    "damaged",
    "deleted",
]
SortOrder = Literal["asc", "desc"]


def _figure(value: Any) -> tuple[Any, ...]:
    """A figure to sort by; rows without it count as less than all others."""
    return func.coalesce(value, -1, type_=Double()).label("sort_key"), RUNS.c.uid


def _is_live() -> Any:
    live = [str(state) for state in RunState if state.is_live]
    return func.coalesce(case((RUNS.c.state.in_(live), 1.0)), 0.0, type_=Double()).label("sort_key")


def _goodput(name: str) -> Any:
    return RUNS.c.goodput[name].as_float()


# What a list of runs begins with unless it is told: names by the alphabet, all else greatest
# first. Those with an index come first; the others read the table of runs, not its pages.
RUN_ORDERS: dict[RunSort, Order] = {
    # Runs under way come before all that have ended.
    "live": Order("live", (_is_live(), RUNS.c.created_at, RUNS.c.uid), descending=True),
    "created": Order("created", (RUNS.c.created_at, RUNS.c.uid), descending=True),
    "updated": Order("updated", (RUNS.c.updated_at, RUNS.c.uid), descending=True),
    "name": Order("name", (RUNS.c.name, RUNS.c.uid)),
    "state": Order("state", (RUNS.c.state, RUNS.c.uid)),
    "step": Order("step", _figure(RUNS.c.step), descending=True),
    "attempts": Order("attempts", (RUNS.c.attempts, RUNS.c.uid), descending=True),
    "gpus": Order("gpus", _figure(RUNS.c.world_size), descending=True),
    "checkpoint": Order("checkpoint", _figure(RUNS.c.committed_at), descending=True),
    "goodput": Order("goodput", _figure(_goodput("ettr")), descending=True),
    "cost": Order("cost", _figure(_goodput("cost")), descending=True),
    "kept": Order("kept", (RUNS.c.kept, RUNS.c.uid), descending=True),
    "kept_bytes": Order("kept_bytes", (RUNS.c.kept_bytes, RUNS.c.uid), descending=True),
    "damaged": Order("damaged", (RUNS.c.damaged, RUNS.c.uid), descending=True),
    "deleted": Order("deleted", (RUNS.c.deleted, RUNS.c.uid), descending=True),
}
INDEXED: tuple[RunSort, ...] = ("created", "updated", "name")
_STEPS = (CHECKPOINTS.c.step, CHECKPOINTS.c.attempt, CHECKPOINTS.c.launch)
_LINES = (EVENTS.c.time, EVENTS.c.journal, EVENTS.c.launch, EVENTS.c.sequence)


class Filter(BaseModel):
    """What of a list is wanted; what is not given does not matter."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunFilter(Filter):
    """Which runs: of some states, with a text in name or folder, created in a time, of a root."""

    states: tuple[RunState, ...] = ()
    search: str | None = None
    created_from: float | None = None
    created_to: float | None = None
    root: Path | None = None


class AttemptFilter(Filter):
    """Which attempts of a run."""

    states: tuple[AttemptState, ...] = ()


class CheckpointFilter(Filter):
    """Which checkpoints of a run; `step_to` is still among them."""

    states: tuple[CheckpointState, ...] = ()
    pinned: bool | None = None
    step_from: int | None = None
    step_to: int | None = None


class EventFilter(Filter):
    """Which journal lines of a run."""

    kinds: tuple[str, ...] = ()
    attempt: int | None = None


def list_runs(
    database: Database,
    where: RunFilter | None = None,
    *,
    sort: RunSort = "created",
    order: SortOrder | None = None,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> Page[views.RunRow]:
    """Runs, newest first, or sorted by another column, in its usual order or the given one."""
    with database.reading() as connection:
        page = _page_of_runs(connection, where, sort, order, after, limit)
        uids = [run["uid"] for run in page.items]
        newest = _newest_attempts(connection, uids)
        spark = sparks(connection, uids)
    rows = []
    for run in page.items:
        last, count = newest.get(run["uid"], (None, 0))
        rows.append(views.run_row(run, last, count, spark.get(run["uid"], [])))
    return Page(rows, page.next)


def list_attempts(
    database: Database,
    run: str,
    where: AttemptFilter | None = None,
    *,
    root: Path | None = None,
    newest_first: bool = False,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> Page[views.AttemptView]:
    """The attempts of a run with their launches."""
    where = where or AttemptFilter()
    columns = ATTEMPTS.c
    with database.reading() as connection:
        row = run_row(connection, run, root)
        query = select(ATTEMPTS).where(columns.run_uid == row["uid"])
        if where.states:
            query = query.where(columns.state.in_([str(state) for state in where.states]))
        order = Order("attempt", (columns.number,), descending=newest_first)
        page = fetch_page(connection, query, order, after, limit)
        launches = _launches(connection, row, [attempt["number"] for attempt in page.items])
    return page.map(
        lambda one: views.attempt_view(
            one, [views.launch_view(launch) for launch in launches[one["number"]]]
        )
    )


def list_checkpoints(
    database: Database,
    run: str,
    where: CheckpointFilter | None = None,
    *,
    root: Path | None = None,
    newest_first: bool = True,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> Page[views.CheckpointView]:
    """The checkpoints that were ever committed in a run, with why each is kept or gone."""
    with database.reading() as connection:
        row = run_row(connection, run, root)
        query = _wanted_checkpoints(row, where or CheckpointFilter())
        order = Order("step", _STEPS, descending=newest_first)
        page = fetch_page(connection, query, order, after, limit)
        reasons = reasons_of(connection, row, page.items)
    told = {one["name"]: why for one, why in zip(page.items, reasons, strict=True)}
    return page.map(lambda one: views.checkpoint_view(row["run"], one, told[one["name"]]))


def list_events(
    database: Database,
    run: str,
    where: EventFilter | None = None,
    *,
    root: Path | None = None,
    newest_first: bool = True,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> Page[views.EventView]:
    """The journal lines of a run by their time, then by journal and number."""
    where = where or EventFilter()
    with database.reading() as connection:
        row = run_row(connection, run, root)
        query = select(EVENTS).where(EVENTS.c.run_uid == row["uid"])
        if where.kinds:
            query = query.where(EVENTS.c.kind.in_(where.kinds))
        if where.attempt is not None:
            query = query.where(EVENTS.c.attempt == where.attempt)
        order = Order("time", _LINES, descending=newest_first)
        page = fetch_page(connection, query, order, after, limit)
    return page.map(lambda event: views.event_view(row["run"], event))


def list_storage(
    database: Database,
    where: RunFilter | None = None,
    *,
    sort: RunSort = "created",
    order: SortOrder | None = None,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> Page[views.StorageRow]:
    """What each run's checkpoints take, and what the next prune would give back."""
    with database.reading() as connection:
        page = _page_of_runs(connection, where, sort, order, after, limit)
        rows = [_storage(connection, run) for run in page.items]
    return Page(rows, page.next)


def _page_of_runs(
    connection: Connection,
    where: RunFilter | None,
    sort: RunSort,
    order: SortOrder | None,
    after: str | None,
    limit: int,
) -> Page[Row]:
    usual = RUN_ORDERS[sort]
    descending = usual.descending if order is None else order == "desc"
    chosen = Order(f"{sort} {'desc' if descending else 'asc'}", usual.columns, descending)
    query = wanted_runs(select(RUNS), where or RunFilter())
    query = query.add_columns(*(one for one in usual.columns if one.name == "sort_key"))
    return fetch_page(connection, query, chosen, after, limit)


def wanted_runs(query: Select[*tuple[Any, ...]], where: RunFilter) -> Select[*tuple[Any, ...]]:
    """The query of runs for those alone that are wanted."""
    columns = RUNS.c
    if where.states:
        query = query.where(columns.state.in_([str(state) for state in where.states]))
    if where.search:
        text = where.search.replace("\0", "")
        query = query.where(
            or_(
                columns.name.icontains(text, autoescape=True),
                columns.run.icontains(text, autoescape=True),
                columns.uid == text,
            )
        )
    if where.created_from is not None:
        query = query.where(columns.created_at >= where.created_from)
    if where.created_to is not None:
        query = query.where(columns.created_at <= where.created_to)
    if where.root is not None:
        query = query.where(is_under(where.root))
    return query


def _wanted_checkpoints(run: Row, where: CheckpointFilter) -> Select[Any]:
    columns = CHECKPOINTS.c
    query = select(CHECKPOINTS).where(columns.run_uid == run["uid"])
    if where.states:
        query = query.where(columns.state.in_([str(state) for state in where.states]))
    if where.pinned is not None:
        query = query.where(columns.pinned.is_(where.pinned))
    if where.step_from is not None:
        query = query.where(columns.step >= where.step_from)
    if where.step_to is not None:
        query = query.where(columns.step <= where.step_to)
    return query


def _newest_attempts(connection: Connection, uids: Sequence[str]) -> dict[str, tuple[Row, int]]:
    """By run: its newest attempt, and how many there are."""
    counts = (
        select(
            ATTEMPTS.c.run_uid,
            func.max(ATTEMPTS.c.number).label("newest"),
            func.count().label("count"),
        )
        .where(ATTEMPTS.c.run_uid.in_(uids))
        .group_by(ATTEMPTS.c.run_uid)
        .subquery()
    )
    query = select(ATTEMPTS, counts.c.count).join(
        counts,
        and_(ATTEMPTS.c.run_uid == counts.c.run_uid, ATTEMPTS.c.number == counts.c.newest),
    )
    return {row["run_uid"]: (row, row["count"]) for row in rows_of(connection, query)}


def _launches(
    connection: Connection, run: Row, numbers: Sequence[int]
) -> defaultdict[int, list[Row]]:
    columns = LAUNCHES.c
    query = (
        select(LAUNCHES)
        .where(columns.run_uid == run["uid"], columns.attempt.in_(numbers))
        .order_by(columns.attempt, columns.number)
    )
    launches: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows_of(connection, query):
        launches[row["attempt"]].append(row)
    return launches


def _storage(connection: Connection, run: Row) -> views.StorageRow:
    """One run's line; only keep rules that limit anything make a prune delete."""
    prunable: list[Row] = []
    if keep_of(run).is_limited:
        query = _wanted_checkpoints(run, CheckpointFilter(states=(CheckpointState.COMMITTED,)))
        there = rows_of(connection, query.order_by(*_STEPS))
        reasons = reasons_of(connection, run, there)
        prunable = [one for one, why in zip(there, reasons, strict=True) if why == NOTHING_KEEPS]
    return views.storage_row(run, prunable)
