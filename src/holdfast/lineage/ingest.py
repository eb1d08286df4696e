"""Ingest: the rows of one run brought in line with its folder, in one transaction.

Any process may do it at any time, several at once, as often as they like. The folder is read
without a lock. The lock is held only to write, and only what was read since the rows were last
written is written: the last process to write is also the last one that looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from sqlalchemy import Connection, Table, and_, bindparam, delete, select
from sqlalchemy.exc import DataError, IntegrityError

from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import (
    LineageError,
    NotFoundError,
    UnreadableRunError,
    reading_run,
)
from holdfast.contracts.history import check_identity, load_history
from holdfast.contracts.journal import EventKind
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.redaction import redact
from holdfast.contracts.secrets import known_secrets
from holdfast.lineage.claims import check_uid
from holdfast.lineage.clean import clean, redacted
from holdfast.lineage.database import Database
from holdfast.lineage.disk import (
    INGEST_VERSION,
    FoundCheckpoint,
    JournalLines,
    Row,
    is_same_state,
    read_checkpoints,
    read_lines,
    survey,
    version_of,
)
from holdfast.lineage.metric_ingest import follow_metrics, write_metrics
from holdfast.lineage.rows import RunRows, attempt_of, build_rows, in_order
from holdfast.lineage.tables import (
    ATTEMPTS,
    CHECKPOINTS,
    EDGES,
    EVENTS,
    FILES,
    JOURNALS,
    LAUNCHES,
    NODES,
    RUNS,
    lock_run,
    upsert,
)

# So often the folder is read again because somebody else has written its rows meanwhile.
LOOKS_MAX: Final = 3


def ingest_run(database: Database, paths: RunPaths, *, fresh: bool = False) -> None:
    """Make the rows of the run at `paths` what its folder says; costs little if nothing changed.

    With `fresh` everything is read again and written again, whatever the rows held. Raises
    `NotFoundError` when there is no run there, `UnreadableRunError` when its files cannot be
    believed, `LineageError` when the database cannot be used.
    """
    paths = RunPaths(paths.directory.resolve())
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(
            f"{paths.directory}: no run here (no spec.json); `holdfast runs` lists those there are"
        )
    check_identity(paths, record)
    with reading_run(paths.directory):
        try:
            _ingest(database, paths, record, fresh=fresh)
        except LineageError as error:
            if not isinstance(error.__cause__, DataError | IntegrityError):
                raise
            raise UnreadableRunError(
                f"{paths.directory}: the index refuses what lies there: {error.__cause__.orig}; "
                "restore the file that is damaged, or move the folder out of the root"
            ) from error


def _ingest(database: Database, paths: RunPaths, record: RunRecord, *, fresh: bool) -> None:
    check_uid(database, paths, record.uid)
    if not fresh and _is_current(database, paths, record.uid):
        follow_metrics(database, paths, record.uid)
        return
    for _ in range(LOOKS_MAX):
        with database.reading() as connection:
            stored = _before(connection, record.uid, fresh=fresh)
        look = _read_folder(paths, *stored, fresh=fresh)
        with database.writing() as connection:
            lock_run(connection, record.uid)
            if _fingerprint(connection, record.uid) == look.fingerprint_before:
                _write_state(connection, paths, record.uid, look, fresh=fresh)
                return
    with database.writing() as connection:
        # Others write this run all the time; with the lock held nobody comes in between.
        lock_run(connection, record.uid)
        stored = _before(connection, record.uid, fresh=fresh)
        look = _read_folder(paths, *stored, fresh=fresh)
        _write_state(connection, paths, record.uid, look, fresh=fresh)


@dataclass(frozen=True)
class _Look:
    """What a run's folder held, and what the index held just before it was read."""

    fingerprint_before: str | None
    found: list[FoundCheckpoint]
    lines: list[JournalLines]
    rows: RunRows
    secrets: tuple[str, ...]


def _before(connection: Connection, uid: str, *, fresh: bool) -> tuple[str | None, list[Row]]:
    """The run's fingerprint in the index, and the checkpoints that need no second reading."""
    return _fingerprint(connection, uid), [] if fresh else _stored(connection, CHECKPOINTS, uid)


def _read_folder(
    paths: RunPaths, before: str | None, checkpoints: Sequence[Row], *, fresh: bool
) -> _Look:
    seen = survey(paths)
    found = read_checkpoints(seen.records, {row["name"]: row for row in checkpoints})
    lines = read_lines(paths, fresh=fresh)
    told = in_order(lines)
    history = load_history(paths, [one.event for one in told])
    secrets = known_secrets(history.record.spec, paths)
    rows = redacted(build_rows(history, found, told, seen.fingerprint), secrets)
    return _Look(before, found, lines, rows, secrets)


def _fingerprint(connection: Connection, uid: str) -> str | None:
    return connection.scalar(select(RUNS.c.fingerprint).where(RUNS.c.uid == uid))


def _write_state(
    connection: Connection, paths: RunPaths, uid: str, look: _Look, *, fresh: bool
) -> None:
    if fresh:
        connection.execute(delete(RUNS).where(RUNS.c.uid == uid))
    # Another run once had this folder; on disk it is no more. Another root may have the same path.
    connection.execute(
        delete(RUNS).where(
            RUNS.c.run == paths.name,
            RUNS.c.directory == str(paths.directory),
            RUNS.c.root_id == look.rows.run["root_id"],
            RUNS.c.uid != uid,
        )
    )
    _write_run(connection, uid, look)
    write_metrics(connection, paths, uid)


def forget_run(database: Database, uid: str) -> None:
    """Delete all rows of a run whose folder is gone."""
    with database.writing() as connection:
        lock_run(connection, uid)
        connection.execute(delete(RUNS).where(RUNS.c.uid == uid))


def _is_current(database: Database, paths: RunPaths, uid: str) -> bool:
    """True when nothing has changed, and this program would not understand more of it.

    A newer program's rows are kept.
    """
    query = select(RUNS.c.fingerprint, RUNS.c.unknown_kinds).where(RUNS.c.uid == uid)
    with database.reading() as connection:
        stored = connection.execute(query).first()
    if stored is None or not stored.fingerprint:
        return False
    known = {str(kind) for kind in EventKind}
    return not known.intersection(stored.unknown_kinds) and is_same_state(
        stored.fingerprint, survey(paths).fingerprint
    )


def _write_run(connection: Connection, uid: str, look: _Look) -> None:
    # Without its own row a run has no others, and they need not be asked for.
    query = select(RUNS.c.uid, RUNS.c.fingerprint, RUNS.c.unknown_kinds).where(RUNS.c.uid == uid)
    row = connection.execute(query).first()
    known = row.uid if row else None
    # A program that understands other lines has counted them differently.
    is_other = row is not None and (
        version_of(row.fingerprint) != INGEST_VERSION
        or row.unknown_kinds != look.rows.run["unknown_kinds"]
    )
    checkpoints = _stored(connection, CHECKPOINTS, known)
    rows = look.rows
    upsert(connection, RUNS, [clean(rows.run)])
    _sync(connection, ATTEMPTS, rows.attempts, _stored(connection, ATTEMPTS, known))
    _sync(connection, LAUNCHES, rows.launches, _stored(connection, LAUNCHES, known))
    _sync(connection, NODES, rows.nodes, _stored(connection, NODES, known))
    _sync(connection, CHECKPOINTS, rows.checkpoints, checkpoints)
    _write_files(connection, uid, look.found, bool(checkpoints))
    _sync(connection, EDGES, rows.edges, _stored(connection, EDGES, known))
    stored = _stored(connection, JOURNALS, known)
    _write_lines(connection, uid, look, stored, is_other=is_other)


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
    connection: Connection, uid: str, look: _Look, stored: Sequence[Row], *, is_other: bool
) -> None:
    """Add the journal lines that are new; lines are only ever added to a journal.

    With `is_other` all lines are written: another program read the journals before.
    """
    lines = look.lines
    counts = {row["journal"]: 0 if is_other else row["lines"] for row in stored}
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
                    "launch": event.launch,
                    "sequence": event.sequence,
                    "attempt": attempt_of(event, part.attempt),
                    "time": event.time,
                    "kind": str(event.kind),
                    "data": redact(event.data, look.secrets),
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
