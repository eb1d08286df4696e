"""Ingest: updates the rows of one run from its folder, in one transaction.

Any number of processes may ingest a run at any time. The folder is read without a lock; the lock
is held only while writing. A process writes only if the rows have not changed since it read the
folder, so the rows always come from the newest read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from holdfast.contracts.journal import Event, EventKind
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

# The number of reads without the lock, if other processes keep writing the rows meanwhile.
READS_MAX: Final = 3


def ingest_run(database: Database, paths: RunPaths, *, fresh: bool = False) -> None:
    """Update the rows of the run at `paths` from its folder. Cheap if nothing has changed.

    With `fresh`, all files are read and all rows are written again. Raises `NotFoundError` if
    the folder is not a run, `UnreadableRunError` if its files are invalid, and `LineageError` if
    the database cannot be used.
    """
    paths = RunPaths(paths.directory.resolve())
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(
            f"{paths.directory}: no run here (no spec.json); `holdfast runs` lists the runs"
        )
    check_identity(paths, record)
    with reading_run(paths.directory):
        try:
            _ingest(database, paths, record, fresh=fresh)
        except LineageError as error:
            if not isinstance(error.__cause__, DataError | IntegrityError):
                raise
            raise UnreadableRunError(
                f"{paths.directory}: the database rejected the run's data: {error.__cause__.orig}; "
                "restore the damaged file, or move the folder out of the root"
            ) from error


def _ingest(database: Database, paths: RunPaths, record: RunRecord, *, fresh: bool) -> None:
    check_uid(database, paths, record.uid)
    if not fresh and _is_current(database, paths, record.uid):
        follow_metrics(database, paths, record.uid)
        return
    for _ in range(READS_MAX):
        with database.reading() as connection:
            stored = _before(connection, record.uid, fresh=fresh)
        content = _read_folder(paths, *stored, fresh=fresh)
        with database.writing() as connection:
            lock_run(connection, record.uid)
            if _fingerprint(connection, record.uid) == content.fingerprint_before:
                _write_state(connection, paths, record.uid, content, fresh=fresh)
                return
    with database.writing() as connection:
        # Other processes keep writing this run, so read the folder while holding the lock.
        lock_run(connection, record.uid)
        stored = _before(connection, record.uid, fresh=fresh)
        content = _read_folder(paths, *stored, fresh=fresh)
        _write_state(connection, paths, record.uid, content, fresh=fresh)


@dataclass(frozen=True)
class _Content:
    """The content of a run's folder, and the fingerprint that the index had before the read."""

    fingerprint_before: str | None
    found: list[FoundCheckpoint]
    lines: list[JournalLines]
    rows: RunRows
    secrets: tuple[str, ...]


def _before(connection: Connection, uid: str, *, fresh: bool) -> tuple[str | None, list[Row]]:
    """Return the run's fingerprint and its checkpoint rows (none if `fresh`) in the index."""
    return _fingerprint(connection, uid), [] if fresh else _stored(connection, CHECKPOINTS, uid)


def _read_folder(
    paths: RunPaths, before: str | None, checkpoints: Sequence[Row], *, fresh: bool
) -> _Content:
    seen = survey(paths)
    found = read_checkpoints(seen.records, {row["name"]: row for row in checkpoints})
    lines = read_lines(paths, fresh=fresh)
    events = in_order(lines)
    history = load_history(paths, [one.event for one in events])
    secrets = known_secrets(history.record.spec, paths)
    rows = redacted(build_rows(history, found, events, seen.fingerprint), secrets)
    return _Content(before, found, lines, rows, secrets)


def _fingerprint(connection: Connection, uid: str) -> str | None:
    return connection.scalar(select(RUNS.c.fingerprint).where(RUNS.c.uid == uid))


def _write_state(
    connection: Connection, paths: RunPaths, uid: str, content: _Content, *, fresh: bool
) -> None:
    if fresh:
        connection.execute(delete(RUNS).where(RUNS.c.uid == uid))
    # Delete the rows of an earlier run in this folder. A root of another cluster can have the
    # same path, so compare `root_id` too.
    connection.execute(
        delete(RUNS).where(
            RUNS.c.run == paths.name,
            RUNS.c.directory == str(paths.directory),
            RUNS.c.root_id == content.rows.run["root_id"],
            RUNS.c.uid != uid,
        )
    )
    _write_run(connection, uid, content)
    write_metrics(connection, paths, uid)


def forget_run(database: Database, uid: str) -> None:
    """Delete all rows of a run whose folder no longer exists."""
    with database.writing() as connection:
        lock_run(connection, uid)
        connection.execute(delete(RUNS).where(RUNS.c.uid == uid))


def _is_current(database: Database, paths: RunPaths, uid: str) -> bool:
    """Return True if the folder has not changed and this version would not build more rows.

    Rows that a newer version wrote are kept.
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


def _write_run(connection: Connection, uid: str, content: _Content) -> None:
    # A run without a row in `runs` has no other rows, so they need no query.
    query = select(RUNS.c.uid, RUNS.c.fingerprint, RUNS.c.unknown_kinds).where(RUNS.c.uid == uid)
    row = connection.execute(query).first()
    known = row.uid if row else None
    # Another version, which knows other event kinds, may have counted the lines differently.
    is_other = row is not None and (
        version_of(row.fingerprint) != INGEST_VERSION
        or row.unknown_kinds != content.rows.run["unknown_kinds"]
    )
    checkpoints = _stored(connection, CHECKPOINTS, known)
    rows = content.rows
    upsert(connection, RUNS, [clean(rows.run)])
    _sync(connection, ATTEMPTS, rows.attempts, _stored(connection, ATTEMPTS, known))
    _sync(connection, LAUNCHES, rows.launches, _stored(connection, LAUNCHES, known))
    _sync(connection, NODES, rows.nodes, _stored(connection, NODES, known))
    _sync(connection, CHECKPOINTS, rows.checkpoints, checkpoints)
    _write_files(connection, uid, content.found, bool(checkpoints))
    _sync(connection, EDGES, rows.edges, _stored(connection, EDGES, known))
    _write_lines(connection, uid, content, _stored(connection, JOURNALS, known), is_other=is_other)


def _write_files(
    connection: Connection, uid: str, found: Sequence[FoundCheckpoint], is_known: bool
) -> None:
    """Write the file rows of the manifests that were read; the others have theirs already."""
    read = [one for one in found if one.files is not None]
    if is_known and read:
        matches = [FILES.c.run_uid == bindparam("uid"), FILES.c.checkpoint == bindparam("of")]
        connection.execute(
            delete(FILES).where(*matches), [{"uid": uid, "of": str(one.name)} for one in read]
        )
    rows = (row for one in read for row in _file_rows(uid, one))
    upsert(connection, FILES, rows, is_new=not is_known)


def _file_rows(uid: str, found: FoundCheckpoint) -> Iterator[Row]:
    for number, (path, size, checksum) in enumerate(found.files or ()):
        yield {
            "run_uid": uid,
            "checkpoint": str(found.name),
            "number": number,
            "path": clean(path),
            "bytes": size,
            "checksum": clean(checksum),
        }


def _write_lines(
    connection: Connection, uid: str, content: _Content, stored: Sequence[Row], *, is_other: bool
) -> None:
    """Add the new lines of the journals, which are append-only.

    With `is_other`, all lines are written, because another version read the journals before.
    """
    lines = content.lines
    counts = {row["journal"]: 0 if is_other else row["lines"] for row in stored}
    wanted = [{"run_uid": uid, "journal": j.journal, "lines": len(j.events)} for j in lines]
    shrunk = [j.journal for j in lines if len(j.events) < counts.get(j.journal, 0)]
    if shrunk:
        # A journal with fewer lines was replaced, so write all its lines again.
        connection.execute(
            delete(EVENTS).where(EVENTS.c.run_uid == uid, EVENTS.c.journal.in_(shrunk))
        )
    _sync(connection, JOURNALS, wanted, stored)
    begins = {j.journal: 0 if j.journal in shrunk else counts.get(j.journal, 0) for j in lines}
    rows = (
        _event_row(uid, part, event, content.secrets)
        for part in lines
        for event in part.events[begins[part.journal] :]
    )
    upsert(connection, EVENTS, rows, is_new=not stored)


def _event_row(uid: str, part: JournalLines, event: Event, secrets: Sequence[str]) -> Row:
    row: Row = clean(
        {
            "run_uid": uid,
            "journal": part.journal,
            "opening": event.opening,
            "sequence": event.sequence,
            "attempt": attempt_of(event, part.attempt),
            "time": event.time,
            "kind": str(event.kind),
            "data": redact(event.data, secrets),
        }
    )
    return row


def _stored(connection: Connection, table: Table, uid: str | None) -> list[Row]:
    if uid is None:
        return []
    found = connection.execute(select(table).where(table.c.run_uid == uid))
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
    changed = [row for key, row in rows.items() if there.get(key) != row]
    upsert(connection, table, changed, is_new=not there)
