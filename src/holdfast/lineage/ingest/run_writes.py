"""Reads and writes the rows of one run, inside the transactions of `ingest` and `following`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, and_, bindparam, delete, select, tuple_

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.redaction import redact
from holdfast.lineage.database import tables
from holdfast.lineage.database.states import EdgeKind
from holdfast.lineage.ingest.checkpoint_totals import COLUMNS, CheckpointTotals
from holdfast.lineage.ingest.clean import clean, redacted
from holdfast.lineage.ingest.disk import FoundCheckpoint, Row
from holdfast.lineage.ingest.journal_lines import NewLines
from holdfast.lineage.ingest.rows import AttemptRows, add_deletion, attempt_node, attempt_of, bare

# Rows that a stream reads at a time.
STREAMED: Final = 2000
NAMES_MAX: Final = 500

Change = tuple[str, Row | None, Row | None, FoundCheckpoint | None]


def fingerprint_in(connection: Connection, uid: str) -> str | None:
    """Return the fingerprint of the run's rows; None if it has none."""
    return connection.scalar(select(tables.RUNS.c.fingerprint).where(tables.RUNS.c.uid == uid))


def lines_in(connection: Connection, uid: str, journals: Sequence[str] = ()) -> dict[str, int]:
    """Return the number of lines of the run's `journals`, or of all."""
    query = select(tables.JOURNALS.c.journal, tables.JOURNALS.c.lines).where(
        tables.JOURNALS.c.run_uid == uid
    )
    if journals:
        query = query.where(tables.JOURNALS.c.journal.in_(journals))
    return {row.journal: row.lines for row in connection.execute(query)}


def stamps_in(connection: Connection, uid: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the stamp of each checkpoint."""
    query = select(tables.CHECKPOINTS.c.name, tables.CHECKPOINTS.c.stamp).where(
        tables.CHECKPOINTS.c.run_uid == uid
    )
    yield from _streamed(connection, query)


def totals_in(connection: Connection, uid: str) -> CheckpointTotals:
    """Return the totals of all checkpoints."""
    columns = [tables.CHECKPOINTS.c[name] for name in COLUMNS]
    query = select(*columns).where(tables.CHECKPOINTS.c.run_uid == uid)
    return CheckpointTotals.of(row._mapping for row in _streamed(connection, query))


def checkpoints_in(connection: Connection, uid: str, names: Sequence[str]) -> dict[str, Row]:
    """Return the rows of some checkpoints, by name."""
    found: dict[str, Row] = {}
    for start in range(0, len(names), NAMES_MAX):
        some = tables.CHECKPOINTS.c.name.in_(names[start : start + NAMES_MAX])
        found |= {row["name"]: row for row in _stored(connection, tables.CHECKPOINTS, uid, some)}
    return found


def deletions_in(connection: Connection, uid: str, names: set[str]) -> dict[str, Row]:
    """Return the newest deletion of each of `names` from the stored journal lines."""
    found: dict[str, Row] = {}
    if not names:
        return found
    columns = tables.EVENTS.c
    newest_first = (column.desc() for column in tables.IN_ORDER)
    # From the newest line back, so the search ends as soon as each name has its deletion.
    query = select(columns.time, columns.data).where(*_deletions(uid)).order_by(*newest_first)
    for time, data in _streamed(connection, query):
        if bare(data.get("checkpoint")) in names:
            add_deletion(found, data, time, is_later=False)
            if len(found) == len(names):
                break
    return found


def deletions_after(
    connection: Connection, uid: str, place: Place | None
) -> tuple[dict[str, Row], Place | None]:
    """Return the next `NAMES_MAX` deletions in the stored lines, and the place of the last one."""
    columns = tables.EVENTS.c
    query = (
        select(*tables.IN_ORDER, columns.data).where(*_deletions(uid)).order_by(*tables.IN_ORDER)
    )
    if place is not None:
        # The first condition is the one that an index serves. The second one finds the exact place.
        query = query.where(columns.time >= place[0], tuple_(*tables.IN_ORDER) > place)
    found: dict[str, Row] = {}
    for row in connection.execute(query.limit(NAMES_MAX)):
        add_deletion(found, row.data, row.time)
        place = tuple(row[:4])
    return found, place


Place = tuple[Any, ...]


def _deletions(uid: str) -> tuple[ColumnElement[bool], ...]:
    is_deletion: ColumnElement[bool] = tables.EVENTS.c.kind == EventKind.CHECKPOINT_DELETED.value
    return tables.EVENTS.c.run_uid == uid, is_deletion


def _streamed(connection: Connection, query: Any) -> Iterator[Any]:
    with connection.execute(query, execution_options={"yield_per": STREAMED}) as rows:
        yield from rows


def write_attempts(
    connection: Connection, uid: str, groups: Mapping[int, AttemptRows], *, is_all: bool
) -> None:
    """Write the rows of some attempts, or of all of them."""
    if is_all:
        _sync_attempts(connection, uid, list(groups.values()), None)
        return
    for number, rows in groups.items():
        _sync_attempts(connection, uid, [rows], number)


def _sync_attempts(
    connection: Connection, uid: str, groups: Sequence[AttemptRows], number: int | None
) -> None:
    """Write the rows of one attempt, or those of all if `number` is None."""

    def sync(table: Table, rows: Iterable[Sequence[Row]], own: ColumnElement[bool]) -> None:
        wanted = [row for some in rows for row in some]
        where = [] if number is None else [own]
        _sync(connection, table, wanted, _stored(connection, table, uid, *where))

    if number != 0:
        sync(tables.ATTEMPTS, (one.attempts for one in groups), tables.ATTEMPTS.c.number == number)
        sync(tables.LAUNCHES, (one.launches for one in groups), tables.LAUNCHES.c.attempt == number)
        sync(tables.NODES, (one.nodes for one in groups), tables.NODES.c.attempt == number)
    # Both the attempts' rows and the run's own are in one table of edges, and each write replaces
    # its part only.
    is_resumed = and_(
        tables.EDGES.c.kind == EdgeKind.RESUMED_FROM.value, tables.EDGES.c.source_uid == uid
    )
    own = and_(is_resumed, tables.EDGES.c.source == attempt_node(number)) if number else ~is_resumed
    sync(tables.EDGES, (one.edges for one in groups), own)


def write_checkpoints(connection: Connection, uid: str, changes: Sequence[Change]) -> None:
    """Write the rows of checkpoints that have changed, and those of their files."""
    gone = [name for name, old, new, _ in changes if old is not None and new is None]
    for start in range(0, len(gone), NAMES_MAX):
        some = tables.CHECKPOINTS.c.name.in_(gone[start : start + NAMES_MAX])
        connection.execute(
            delete(tables.CHECKPOINTS).where(tables.CHECKPOINTS.c.run_uid == uid, some)
        )
    # A first write has no rows to replace, which is faster.
    is_new = not any(old for _, old, _, _ in changes)
    rows = [new for _, old, new, _ in changes if new is not None and new != old]
    tables.upsert(connection, tables.CHECKPOINTS, rows, is_new=is_new)
    # Manifests that were not read have their file rows already.
    read = [(name, one) for name, _, _, one in changes if one is not None and one.files is not None]
    if read and not is_new:
        matches = [
            tables.FILES.c.run_uid == bindparam("uid"),
            tables.FILES.c.checkpoint == bindparam("of"),
        ]
        connection.execute(
            delete(tables.FILES).where(*matches), [{"uid": uid, "of": name} for name, _ in read]
        )
    files = (row for name, one in read for row in _file_rows(uid, name, one))
    tables.upsert(connection, tables.FILES, files, is_new=is_new)


def _file_rows(uid: str, name: str, found: FoundCheckpoint) -> Iterator[Row]:
    for number, (path, size, checksum) in enumerate(found.files or ()):
        yield {
            "run_uid": uid,
            "checkpoint": name,
            "number": number,
            "path": clean(path),
            "bytes": size,
            "checksum": clean(checksum),
        }


def write_run(connection: Connection, row: Row, secrets: Sequence[str]) -> None:
    tables.upsert(connection, tables.RUNS, [clean(redacted(row, secrets))])


def write_lines(
    connection: Connection,
    uid: str,
    lines: Sequence[NewLines],
    secrets: Sequence[str],
    stored: Mapping[str, int],
) -> None:
    """Add the new lines of journals, which are append-only. `stored` are the lines in the index."""
    replaced = [one.journal for one in lines if one.is_replaced]
    if replaced:
        # A journal with fewer lines was replaced, so write all its lines again.
        connection.execute(
            delete(tables.EVENTS).where(
                tables.EVENTS.c.run_uid == uid, tables.EVENTS.c.journal.in_(replaced)
            )
        )
    counts = [
        {"run_uid": uid, "journal": one.journal, "lines": one.lines}
        for one in lines
        if stored.get(one.journal) != one.lines
    ]
    tables.upsert(connection, tables.JOURNALS, counts, is_new=not stored)
    rows = (_event_row(uid, one, event, secrets) for one in lines for event in one.events)
    tables.upsert(connection, tables.EVENTS, rows, is_new=not stored)


def forget_journals(connection: Connection, uid: str, journals: Iterable[str]) -> None:
    """Delete the rows of journals that no longer exist, with their lines."""
    for journal in journals:
        connection.execute(
            delete(tables.JOURNALS).where(
                tables.JOURNALS.c.run_uid == uid, tables.JOURNALS.c.journal == journal
            )
        )


def _event_row(uid: str, part: NewLines, event: Event, secrets: Sequence[str]) -> Row:
    row: Row = clean(
        {
            "run_uid": uid,
            "journal": part.journal,
            "opening": event.opening,
            "sequence": event.sequence,
            "attempt": attempt_of(event, part.attempt),
            "time": event.time,
            "kind": str(event.kind),
            # Masked here as well: a journal line may quote an error with a secret in it.
            "data": redact(event.data, secrets),
        }
    )
    return row


def _stored(
    connection: Connection, table: Table, uid: str, *where: ColumnElement[bool]
) -> list[Row]:
    found = connection.execute(select(table).where(table.c.run_uid == uid, *where))
    return [dict(row) for row in found.mappings()]


def _sync(
    connection: Connection, table: Table, wanted: Sequence[Row], stored: Sequence[Row]
) -> None:
    """Write the rows that differ from the stored ones, and delete the stored rows not wanted."""
    keys = [column.name for column in table.primary_key]
    key_of = itemgetter(*keys)
    there = {key_of(row): row for row in stored}
    rows = {key_of(row): clean(row) for row in wanted}
    gone = [{name: there[key][name] for name in keys} for key in there.keys() - rows.keys()]
    if gone:
        matches = [table.c[key] == bindparam(f"key_{key}") for key in keys]
        connection.execute(
            delete(table).where(and_(*matches)),
            [{f"key_{key}": value for key, value in one.items()} for one in gone],
        )
    # Only rows that differ: an update must cost as much as what is new, see decision 86.
    changed = [row for key, row in rows.items() if there.get(key) != row]
    tables.upsert(connection, table, changed, is_new=not there)
