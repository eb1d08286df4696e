"""Lists from the index: runs, checkpoints, events and storage.

Every list takes a filter (`where`), the cursor of the previous page (`after`) and a `limit`, and
returns a `RowPage`. A limit of None means all rows on one page. All functions raise `QueryError`
for an invalid cursor or limit, `NotFoundError` for an unknown run, and `LineageError` if the
database cannot be used.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict

from holdfast.contracts.disk.journal import Event, EventKind, problem_with_facts
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.keep_rules import ranked
from holdfast.contracts.spec.part import section
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.lineage.database import documents, permissions, tables
from holdfast.lineage.database.states import CheckpointState, EdgeKind
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.ingest.reasons import NOTHING_KEEPS, candidates, explain
from holdfast.lineage.queries import views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT, RowOrder, RowPage, fetch_page
from holdfast.lineage.queries.find import RUN_UID, Row, is_under, rows_of, run_row

FILTER_VALUES_MAX: Final = 200
NEWEST_EVENTS_MAX: Final = 200

# Why the checkpoints of a run are kept or would be deleted, according to the index.

_SPEC = documents.valid_json(tables.RUNS.c.spec)
# The columns that the keep rules need.
_RULE_COLUMNS = ("name", "step", "committed_at", "metrics", "state", "rolled_back")
_STEPS = (tables.CHECKPOINTS.c.step, tables.CHECKPOINTS.c.attempt, tables.CHECKPOINTS.c.launch)
# The conditions for checkpoints that a run can resume from.
_ON_BRANCH = (
    tables.CHECKPOINTS.c.state == CheckpointState.COMMITTED.value,
    tables.CHECKPOINTS.c.rolled_back.is_(False),
)

_BRANCH: Final = (
    sa.select(*(tables.CHECKPOINTS.c[name] for name in _RULE_COLUMNS))
    .where(tables.CHECKPOINTS.c.run_uid == RUN_UID, *_ON_BRANCH)
    .order_by(*(column.desc() for column in _STEPS))
)
_BRANCH_END: Final = _BRANCH.limit(1)
_NEWEST_SIZED: Final = (
    _BRANCH_END.with_only_columns(
        tables.CHECKPOINTS.c.name, tables.CHECKPOINTS.c.world_size, tables.CHECKPOINTS.c.topology
    )
).where(tables.CHECKPOINTS.c.world_size > 0)
_RESUMED: Final = sa.select(tables.ATTEMPTS.c.number, tables.ATTEMPTS.c.resumed_from).where(
    tables.ATTEMPTS.c.run_uid == RUN_UID,
    tables.ATTEMPTS.c.state.not_in([str(state) for state in AttemptState if state.is_terminal]),
    tables.ATTEMPTS.c.resumed_from.is_not(None),
)
_SOURCES: Final = tables.RUNS.alias("source")
# The exports and forks from and to a run, each with the state of the run it comes from.
_USES: Final = (
    sa.select(tables.EDGES, _SOURCES.c.state)
    .outerjoin(_SOURCES, _SOURCES.c.uid == tables.EDGES.c.source_uid)
    .where(sa.or_(tables.EDGES.c.target_uid == RUN_UID, tables.EDGES.c.source_uid == RUN_UID))
    .where(tables.EDGES.c.kind.in_([EdgeKind.EXPORTED_TO.value, EdgeKind.FORKED_FROM.value]))
    .order_by(tables.EDGES.c.id)
)


def reasons_of(connection: sa.Connection, run: Row, checkpoints: Sequence[Row]) -> list[str]:
    """Return why each of `checkpoints`, which belong to `run`, is kept or was deleted."""
    keep = keep_of(run)
    branch = _branch(connection, run, whole=keep.is_limited)
    return explain(checkpoints, _uses(connection, run), keep, branch=branch)


def best_of(connection: sa.Connection, run: Row) -> str | None:
    """Return the directory name of the best checkpoint by the spec's `checkpoint.keep.best`.

    It is None without such a rule, and if no checkpoint of the branch has the metric.
    """
    rule = keep_of(run).best
    if rule is None:
        return None
    ranking = ranked(candidates(_branch(connection, run, whole=True)), rule.metric, rule.mode)
    return ranking[0][1] if ranking else None


def newest_on_branch(database: Database, run_uid: str) -> Row | None:
    """Return name, world size and topology of the newest checkpoint the run can resume from.

    A checkpoint whose manifest has no world size is passed over. It is None without one. The
    caller knows that this account may read the run.
    """
    with database.reading() as connection:
        found = rows_of(connection, _NEWEST_SIZED, run_uid=run_uid)
    return found[0] if found else None


def keep_of(run: Row) -> Keep:
    """Return the keep rules in a run's spec; those of the default if they cannot be read."""
    with contextlib.suppress(ValueError):
        return Keep.read(section(run["spec"], "checkpoint", "keep"))
    return Keep()


def _branch(connection: sa.Connection, run: Row, *, whole: bool) -> list[Row]:
    """Return the checkpoints the run can resume from, oldest first; unless `whole`, the newest."""
    # Without a rule, only the newest checkpoint needs a reason, and a run may have thousands.
    query = _BRANCH if whole else _BRANCH_END
    return rows_of(connection, query, run_uid=run["uid"])[::-1]


def _uses(connection: sa.Connection, run: Row) -> dict[str, list[str]]:
    uses: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name, use in (*_resumes(connection, run), *_exports_and_forks(connection, run)):
        uses[name][use] = None
    return {name: list(texts) for name, texts in uses.items()}


def _resumes(connection: sa.Connection, run: Row) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints that live attempts resumed from."""
    for number, identity in connection.execute(_RESUMED, {"run_uid": run["uid"]}):
        yield identity.rpartition(":")[2], f"in use: attempt {number} resumed from it"


def _exports_and_forks(connection: sa.Connection, run: Row) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints that were exported, and those that live runs were forked from."""
    live = [str(state) for state in RunState if state.is_live]
    # A fork of another account protects a checkpoint, but its name is not shown, see decision 93.
    seen = permissions.may_see(connection, tables.EDGES.c.run_uid)
    query = _USES if seen is None else _USES.add_columns(seen.label("is_seen"))
    for edge in rows_of(connection, query, run_uid=run["uid"]):
        # A fork that is not in the index may be live.
        is_live = edge["state"] in (None, *live)
        if edge["kind"] == EdgeKind.EXPORTED_TO and edge["source_uid"] == run["uid"]:
            yield edge["source"], f"exported to {edge['target']}"
        elif edge["kind"] == EdgeKind.FORKED_FROM and edge["target_uid"] == run["uid"] and is_live:
            fork = (
                f"run {edge['source_run']}"
                if edge.get("is_seen", True)
                else "a run that you may not read"
            )
            yield edge["target"], f"in use as the parent of {fork}"


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
    """Return columns that sort by a number; rows without it count as the smallest."""
    # Without the default, rows without a number would sort differently in SQLite and PostgreSQL.
    return sa.func.coalesce(value, -1, type_=sa.Double()).label("sort_key"), tables.RUNS.c.uid


def _is_live() -> Any:
    live = [str(state) for state in RunState if state.is_live]
    return sa.func.coalesce(
        sa.case((tables.RUNS.c.state.in_(live), 1.0)), 0.0, type_=sa.Double()
    ).label("sort_key")


def _goodput(name: str) -> Any:
    return documents.number_in(tables.RUNS.c.goodput, name)


def partition_column() -> Any:
    """Return the Slurm partition of a run's spec, which is NULL for Slurm's default."""
    return sa.cast(_SPEC["resources"]["partition"].as_string(), sa.Text)


def account_column() -> Any:
    """Return the Slurm account of a run's spec, which is NULL for the user's default."""
    return sa.cast(_SPEC["resources"]["account"].as_string(), sa.Text)


def _each_tag(connection: sa.Connection) -> Any:
    """Return a column with each tag of a run, of a function's table."""
    if connection.dialect.name == "sqlite":
        each = sa.func.json_each(documents.valid_json(tables.RUNS.c.tags))
    else:
        is_list = sa.func.jsonb_typeof(tables.RUNS.c.tags) == "array"
        each = sa.func.jsonb_array_elements_text(sa.case((is_list, tables.RUNS.c.tags)))
    return each.table_valued("value").c.value


def _newest(table: Any, name: str, *order: str) -> Any:
    """Return a column of the last of a run's rows in `table`, sorted by the columns `order`."""
    last = [table.c[column].desc() for column in order]
    query = (
        sa.select(table.c[name])
        .where(table.c.run_uid == tables.RUNS.c.uid)
        .order_by(*last)
        .limit(1)
    )
    return query.scalar_subquery().label(name)


# The default direction of each sort: names and states ascending, all others descending. The
# sorts in `INDEXED` use a database index; the others read the whole table of runs.
RUN_ORDERS: dict[RunSort, RowOrder] = {
    # Live runs come before ended ones.
    "live": RowOrder(
        "live", (_is_live(), tables.RUNS.c.created_at, tables.RUNS.c.uid), descending=True
    ),
    "created": RowOrder("created", (tables.RUNS.c.created_at, tables.RUNS.c.uid), descending=True),
    "updated": RowOrder("updated", (tables.RUNS.c.updated_at, tables.RUNS.c.uid), descending=True),
    "name": RowOrder("name", (tables.RUNS.c.name, tables.RUNS.c.uid)),
    "state": RowOrder("state", (tables.RUNS.c.state, tables.RUNS.c.uid)),
    "step": RowOrder("step", _figure(tables.RUNS.c.step), descending=True),
    "attempts": RowOrder("attempts", (tables.RUNS.c.attempts, tables.RUNS.c.uid), descending=True),
    "gpus": RowOrder("gpus", _figure(tables.RUNS.c.world_size), descending=True),
    "checkpoint": RowOrder("checkpoint", _figure(tables.RUNS.c.committed_at), descending=True),
    "goodput": RowOrder("goodput", _figure(_goodput("ettr")), descending=True),
    "cost": RowOrder("cost", _figure(_goodput("cost")), descending=True),
    "kept": RowOrder("kept", (tables.RUNS.c.kept, tables.RUNS.c.uid), descending=True),
    "kept_bytes": RowOrder(
        "kept_bytes", (tables.RUNS.c.kept_bytes, tables.RUNS.c.uid), descending=True
    ),
    "damaged": RowOrder("damaged", (tables.RUNS.c.damaged, tables.RUNS.c.uid), descending=True),
    "deleted": RowOrder("deleted", (tables.RUNS.c.deleted, tables.RUNS.c.uid), descending=True),
}
INDEXED: tuple[RunSort, ...] = ("created", "updated", "name")
_CAUSE = _newest(tables.ATTEMPTS, "cause", "number")
# The columns of `views.run_row`. Of the spec, which may be large, two keys.
_LISTED = (
    *(tables.RUNS.c[name] for name in views.RunRow.__annotations__ if name in tables.RUNS.c),
    tables.RUNS.c.directory,
    _SPEC["config"].label("config"),
    partition_column().label("partition"),
    _CAUSE,
    _newest(tables.ATTEMPTS, "job_id", "number"),
    _newest(tables.METRIC_FILES, "spark", "attempt", "launch"),
)


class Filter(BaseModel):
    """The base of all filters. Fields that are not set do not filter."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunFilter(Filter):
    """A filter of runs by state, text in name or folder, creation time (inclusive) and root.

    `users` submitted them, `causes` are those of the newest attempt, and `partitions` and
    `accounts` those of the spec. Runs have all of `tags`. An empty tuple of `uids` matches nothing.
    """

    states: tuple[RunState, ...] = ()
    search: str | None = None
    users: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    uids: tuple[str, ...] | None = None
    created_from: float | None = None
    created_to: float | None = None
    root: Path | None = None


class CheckpointFilter(Filter):
    """A filter of a run's checkpoints; `step_to` is inclusive."""

    states: tuple[CheckpointState, ...] = ()
    pinned: bool | None = None
    step_from: int | None = None
    step_to: int | None = None


class EventFilter(Filter):
    """A filter of a run's journal lines."""

    kinds: tuple[str, ...] = ()
    attempt: int | None = None


def list_runs(
    database: Database,
    where: RunFilter | None = None,
    *,
    sort: RunSort = "created",
    order: SortOrder | None = None,
    after: str | None = None,
    limit: int | None = PAGE_DEFAULT,
) -> RowPage[views.RunRow]:
    """Return one page of runs, by default newest first.

    Without `order`, the sort has its default direction in `RUN_ORDERS`.
    """
    with database.reading() as connection:
        page = _page_of_runs(connection, where, sort, order, after, limit, _LISTED)
    return page.map(views.run_row)


class FilterValues(TypedDict):
    """The values of runs by which they can be filtered, sorted, `FILTER_VALUES_MAX` of each."""

    users: list[str]
    causes: list[str]
    partitions: list[str]
    accounts: list[str]
    tags: list[str]


def filter_values(database: Database) -> FilterValues:
    """Return the values of all readable runs by which they can be filtered."""
    with database.reading() as connection:

        def distinct(column: Any, query: sa.Select[Any]) -> list[str]:
            query = query.where(column.is_not(None), column != "")
            found = connection.scalars(query.distinct().order_by(column).limit(FILTER_VALUES_MAX))
            return [str(one) for one in found]

        user, cause = tables.RUNS.c.created_by, tables.ATTEMPTS.c.cause
        partition, account = partition_column(), account_column()
        tag = _each_tag(connection)
        tagged = sa.select(tag).select_from(tables.RUNS.join(tag.table, sa.true()))
        return FilterValues(
            users=distinct(user, permissions.readable(connection, sa.select(user))),
            causes=distinct(
                cause, permissions.readable(connection, sa.select(cause), tables.ATTEMPTS.c.run_uid)
            ),
            partitions=distinct(partition, permissions.readable(connection, sa.select(partition))),
            accounts=distinct(account, permissions.readable(connection, sa.select(account))),
            tags=distinct(tag, permissions.readable(connection, tagged)),
        )


def list_checkpoints(
    database: Database,
    run: str,
    where: CheckpointFilter | None = None,
    *,
    newest_first: bool = True,
    after: str | None = None,
    limit: int | None = PAGE_DEFAULT,
) -> RowPage[views.CheckpointView]:
    """Return one page of a run's checkpoints, deleted ones included, each with its reason."""
    with database.reading() as connection:
        row = run_row(connection, run)
        return checkpoints_of(
            connection, row, where, newest_first=newest_first, after=after, limit=limit
        )


def checkpoints_of(
    connection: sa.Connection,
    run: Row,
    where: CheckpointFilter | None,
    *,
    newest_first: bool,
    after: str | None,
    limit: int | None,
) -> RowPage[views.CheckpointView]:
    """Return `list_checkpoints` of a run's row."""
    query = _wanted_checkpoints(run, where or CheckpointFilter())
    order = _by("step", _STEPS, newest_first)
    page = fetch_page(connection, query, order, after, limit)
    reasons = reasons_of(connection, run, page.items)
    reason_of = {one["name"]: reason for one, reason in zip(page.items, reasons, strict=True)}
    return page.map(lambda one: views.checkpoint_view(run["run"], one, reason_of[one["name"]]))


def list_events(
    database: Database,
    run: str,
    where: EventFilter | None = None,
    *,
    newest_first: bool = True,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> RowPage[views.EventView]:
    """Return one page of a run's journal lines, sorted by time, then by journal and number."""
    with database.reading() as connection:
        row = run_row(connection, run)
        query = _wanted_events(row, where or EventFilter())
        order = _by("time", tables.IN_ORDER, newest_first)
        page = fetch_page(connection, query, order, after, limit)
    return page.map(lambda event: views.event_view(row["run"], event))


def newest_events(
    database: Database, run: str, kinds: Sequence[EventKind], attempt: int | None = None
) -> list[Event]:
    """Return the newest `NEWEST_EVENTS_MAX` events of these kinds, oldest first.

    With `attempt`, only those of that attempt count.
    """
    where = EventFilter(kinds=tuple(str(kind) for kind in kinds), attempt=attempt)
    page = list_events(database, run, where, limit=NEWEST_EVENTS_MAX)
    return _events(page.items[::-1])


def newest_lines(
    database: Database, run_uid: str, groups: Sequence[tuple[str, ...]], limit: int
) -> list[list[Row]]:
    """Return the newest `limit` journal lines of each group of kinds, oldest first.

    One statement reads all groups. The caller knows that this account may read the run.
    """
    found: list[list[Row]] = [[] for _ in groups]
    with database.reading() as connection:
        given = {"run_uid": run_uid, "most": limit}
        for row in connection.execute(_newest_lines(tuple(groups)), given).mappings():
            found[row["which"]].append(dict(row))
    for lines in found:
        lines.sort(key=lambda row: tuple(row[column.name] for column in tables.IN_ORDER))
    return found


def newest_of_each(
    database: Database, run_uid: str, groups: Sequence[Sequence[EventKind]]
) -> list[list[Event]]:
    """Return `newest_lines` of each group as events, at most `NEWEST_EVENTS_MAX` of a group."""
    kinds = [tuple(str(kind) for kind in group) for group in groups]
    found = newest_lines(database, run_uid, kinds, NEWEST_EVENTS_MAX)
    return [_events(lines) for lines in found]


def _events(rows: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return rows as events, without those that a journal would not contain."""
    found = []
    for row in rows:
        at = row["time"]
        # No version wrote a row that is not an event.
        with contextlib.suppress(ValueError):
            event = Event(
                writer=Path(row["journal"]).stem,
                opening=row["opening"],
                sequence=row["sequence"],
                time=unix_time(at) or 0.0 if isinstance(at, str) else at,
                kind=EventKind(row["kind"]),
                data=row["data"],
            )
            if problem_with_facts(event.kind, event.data) is None:
                found.append(event)
    return found


@functools.lru_cache(maxsize=64)
def _newest_lines(groups: tuple[tuple[str, ...], ...]) -> sa.CompoundSelect[Any]:
    run, most = sa.bindparam("run_uid", type_=sa.Text()), sa.bindparam("most", type_=sa.Integer())
    order = [column.desc() for column in tables.IN_ORDER]
    parts = [
        sa.select(sa.literal(which).label("which"), tables.EVENTS)
        .where(tables.EVENTS.c.run_uid == run, tables.EVENTS.c.kind.in_(kinds))
        .order_by(*order)
        .limit(most)
        .subquery()
        for which, kinds in enumerate(groups)
    ]
    return sa.union_all(*(sa.select(part) for part in parts))


def list_storage(
    database: Database,
    where: RunFilter | None = None,
    *,
    sort: RunSort = "created",
    order: SortOrder | None = None,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> RowPage[views.StorageRow]:
    """Return one page of runs with their storage, and what the next prune would delete."""
    with database.reading() as connection:
        page = _page_of_runs(connection, where, sort, order, after, limit, tuple(tables.RUNS.c))
        rows = [_storage(connection, run) for run in page.items]
    return RowPage(rows, page.next)


def _page_of_runs(
    connection: sa.Connection,
    where: RunFilter | None,
    sort: RunSort,
    order: SortOrder | None,
    after: str | None,
    limit: int | None,
    shown: Sequence[Any],
) -> RowPage[Row]:
    """Return one page of runs with the columns `shown`, among them the uid."""
    usual = RUN_ORDERS[sort]
    descending = usual.descending if order is None else order == "desc"
    chosen = _by(sort, usual.columns, descending)
    if limit is None:
        query = wanted_runs(connection, sa.select(*shown), where or RunFilter())
        query = query.add_columns(*(one for one in usual.columns if one.name == "sort_key"))
        return fetch_page(connection, query, chosen, after, limit)
    # Sorted by narrow rows, often of an index: specs and subqueries are read for this page only.
    keys = wanted_runs(connection, sa.select(*usual.columns), where or RunFilter())
    page = fetch_page(connection, keys, chosen, after, limit)
    uids = [one["uid"] for one in page.items]
    rows = rows_of(connection, sa.select(*shown).where(tables.RUNS.c.uid.in_(uids)))
    found = {one["uid"]: one for one in rows}
    return RowPage([found[uid] for uid in uids if uid in found], page.next)


def _by(name: str, columns: tuple[Any, ...], descending: bool) -> RowOrder:
    """Return an order whose cursors fit its direction only."""
    return RowOrder(f"{name} {'desc' if descending else 'asc'}", columns, descending)


def wanted_runs(
    connection: sa.Connection, query: sa.Select[Any], where: RunFilter
) -> sa.Select[Any]:
    columns = tables.RUNS.c
    query = permissions.readable(connection, query)
    if where.states:
        query = query.where(columns.state.in_([str(state) for state in where.states]))
    if where.search:
        # PostgreSQL refuses a NUL in a text.
        text = where.search.replace("\0", "")
        named = (one.icontains(text, autoescape=True) for one in (columns.name, columns.run))
        query = query.where(sa.or_(*named, columns.uid == text))
    if where.users:
        query = query.where(columns.created_by.in_(where.users))
    if where.causes:
        query = query.where(_CAUSE.in_([str(cause) for cause in where.causes]))
    if where.partitions:
        query = query.where(partition_column().in_(where.partitions))
    if where.accounts:
        query = query.where(account_column().in_(where.accounts))
    for one in where.tags:
        tag = _each_tag(connection)
        query = query.where(sa.exists(sa.select(tag).where(tag == one)))
    if where.uids is not None:
        query = query.where(columns.uid.in_(where.uids))
    if where.created_from is not None:
        query = query.where(columns.created_at >= where.created_from)
    if where.created_to is not None:
        query = query.where(columns.created_at <= where.created_to)
    if where.root is not None:
        query = query.where(is_under(where.root))
    return query


def _wanted_events(run: Row, where: EventFilter) -> sa.Select[Any]:
    columns = tables.EVENTS.c
    query = sa.select(tables.EVENTS).where(columns.run_uid == run["uid"])
    if where.kinds:
        query = query.where(columns.kind.in_(where.kinds))
    if where.attempt is not None:
        query = query.where(columns.attempt == where.attempt)
    return query


def _wanted_checkpoints(run: Row, where: CheckpointFilter) -> sa.Select[Any]:
    columns = tables.CHECKPOINTS.c
    query = sa.select(tables.CHECKPOINTS).where(columns.run_uid == run["uid"])
    if where.states:
        query = query.where(columns.state.in_([str(state) for state in where.states]))
    if where.pinned is not None:
        query = query.where(columns.pinned.is_(where.pinned))
    if where.step_from is not None:
        query = query.where(columns.step >= where.step_from)
    if where.step_to is not None:
        query = query.where(columns.step <= where.step_to)
    return query


def _storage(connection: sa.Connection, run: Row) -> views.StorageRow:
    """Return one run's storage. A prune deletes only if the keep rules limit what is kept."""
    prunable: list[Row] = []
    if keep_of(run).is_limited:
        query = _wanted_checkpoints(run, CheckpointFilter(states=(CheckpointState.COMMITTED,)))
        there = rows_of(connection, query.order_by(*_STEPS))
        reasons = reasons_of(connection, run, there)
        prunable = [one for one, why in zip(there, reasons, strict=True) if why == NOTHING_KEEPS]
    return views.storage_row(run, prunable)
