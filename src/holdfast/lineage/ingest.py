"""Ingest: the rows of one run brought in line with its folder, in one transaction.

Any process may do it at any time, several at once, as often as they like. The run's lock is
taken before its folder is read, so the last to write is also the last to have looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from sqlalchemy import Connection, Table, and_, bindparam, delete, select

from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import RunPaths
from holdfast.lineage.clean import clean
from holdfast.lineage.database import Database
from holdfast.lineage.disk import (
    FoundCheckpoint,
    JournalLines,
    Row,
    read_checkpoints,
    read_lines,
    survey,
)
from holdfast.lineage.metric_ingest import follow_metrics, write_metrics
from holdfast.lineage.rows import attempt_of, build_rows, in_order
from holdfast.lineage.tables import (
    ATTEMPTS,
    CHECKPOINTS,
    EDGES,
    EVENTS,
    FILES,
    INCARNATIONS,
    JOURNALS,
    NODES,
    RUNS,
    lock_run,
    upsert,
)


def ingest_run(database: Database, paths: RunPaths, *, fresh: bool = False) -> None:
    """Make the rows of the run at `paths` what its folder says; costs little if nothing changed.

    With `fresh` everything is read again and written anew, whatever the rows held. Raises
    `NotFoundError` when there is no run there, `LineageError` when the database cannot be used.
    """
    paths = RunPaths(paths.directory.resolve())
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(
            f"{paths.directory}: no run here (no spec.json); `holdfast runs` lists those there are"
        )
    if not fresh and _is_current(database, paths, record.uid):
        follow_metrics(database, paths, record.uid)
        return
    with database.writing() as connection:
        lock_run(connection, record.uid)
        if fresh:
            connection.execute(delete(RUNS).where(RUNS.c.uid == record.uid))
        # Another run once had this folder; on disk it is no more.
        connection.execute(
            delete(RUNS).where(
                RUNS.c.run == paths.name,
                RUNS.c.directory == str(paths.directory),
                RUNS.c.uid != record.uid,
            )
        )
        _write_run(connection, paths, record.uid)
        write_metrics(connection, paths, record.uid)


def forget_run(database: Database, uid: str) -> None:
    """Delete all rows of a run whose folder is gone."""
    with database.writing() as connection:
        lock_run(connection, uid)
        connection.execute(delete(RUNS).where(RUNS.c.uid == uid))


def _is_current(database: Database, paths: RunPaths, uid: str) -> bool:
    with database.reading() as connection:
        stored = connection.scalar(select(RUNS.c.fingerprint).where(RUNS.c.uid == uid))
    return bool(stored) and stored == survey(paths).fingerprint


def _write_run(connection: Connection, paths: RunPaths, uid: str) -> None:
    seen = survey(paths)
    # Without its own row a run has no others, and they need not be asked for.
    known = connection.scalar(select(RUNS.c.uid).where(RUNS.c.uid == uid))
    checkpoints = _stored(connection, CHECKPOINTS, known)
    found = read_checkpoints(seen.records, {row["name"]: row for row in checkpoints})
    lines = read_lines(paths)
    told = in_order(lines)
    history = load_history(paths, [one.event for one in told])
    rows = build_rows(history, found, told, seen.fingerprint)
    upsert(connection, RUNS, [clean(rows.run)])
    _sync(connection, ATTEMPTS, rows.attempts, _stored(connection, ATTEMPTS, known))
    _sync(connection, INCARNATIONS, rows.incarnations, _stored(connection, INCARNATIONS, known))
    _sync(connection, NODES, rows.nodes, _stored(connection, NODES, known))
    _sync(connection, CHECKPOINTS, rows.checkpoints, checkpoints)
    _write_files(connection, uid, found, bool(checkpoints))
    _sync(connection, EDGES, rows.edges, _stored(connection, EDGES, known))
    _write_lines(connection, uid, lines, _stored(connection, JOURNALS, known))


def _write_files(
    connection: Connection, uid: str, found: Sequence[FoundCheckpoint], is_known: bool
) -> None:
    """Write the file tables of manifests that were read; the others' are there already."""
    read = [one for one in found if one.files is not None]
    if is_known and read:
        matches = [FILES.c.run_uid == bindparam("uid"), FILES.c.checkpoint == bindparam("of")]
        connection.execute(
            delete(FILES).where(*matches), [{"uid": uid, "of": str(one.name)} for one in read]
        )
    upsert(
        connection,
        FILES,
        (
            {
                "run_uid": uid,
                "checkpoint": str(one.name),
                "number": number,
                "path": clean(path),
                "bytes": size,
                "checksum": clean(checksum),
            }
            for one in read
            for number, (path, size, checksum) in enumerate(one.files or ())
        ),
        is_new=not is_known,
    )


def _write_lines(
    connection: Connection, uid: str, lines: Sequence[JournalLines], stored: Sequence[Row]
) -> None:
    """Add the journal lines that are new; lines are only ever added to a journal."""
    counts = {row["journal"]: row["lines"] for row in stored}
    wanted = [{"run_uid": uid, "journal": j.journal, "lines": len(j.events)} for j in lines]
    shrunk = [j.journal for j in lines if len(j.events) < counts.get(j.journal, 0)]
    if shrunk:
        # Not the file that was read before: its lines are taken from the start.
        connection.execute(
            delete(EVENTS).where(EVENTS.c.run_uid == uid, EVENTS.c.journal.in_(shrunk))
        )
    _sync(connection, JOURNALS, wanted, stored)
    begins = {j.journal: 0 if j.journal in shrunk else counts.get(j.journal, 0) for j in lines}
    upsert(
        connection,
        EVENTS,
        (
            clean(
                {
                    "run_uid": uid,
                    "journal": part.journal,
                    "incarnation": event.incarnation,
                    "sequence": event.sequence,
                    "attempt": attempt_of(event, part.attempt),
                    "time": event.time,
                    "kind": str(event.kind),
                    "data": event.data,
                }
            )
            for part in lines
            for event in part.events[begins[part.journal] :]
        ),
        is_new=not stored,
    )


def _stored(connection: Connection, table: Table, uid: str | None) -> list[Row]:
    if uid is None:
        return []
    found = connection.execute(select(table).where(table.c.run_uid == uid))
    return [dict(row) for row in found.mappings()]


def _sync(
    connection: Connection, table: Table, wanted: Sequence[Row], stored: Sequence[Row]
) -> None:
    """Write the rows that differ from the stored ones and delete those that are no longer."""
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
    changed = [row for key, row in rows.items() if there.get(key) != row]
    upsert(connection, table, changed, is_new=not there)
