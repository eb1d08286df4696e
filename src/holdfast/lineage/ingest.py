"""Ingest: updates the rows of one run from its folder, in one transaction.

Any number of processes may ingest a run at any time. The folder is read without a lock; the lock
is held only while writing. A process writes only if the rows have not changed since it read the
folder, so the rows always come from the newest read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from holdfast.contracts.history import check_identity
from holdfast.contracts.history_cache import HistoryReader, load_tallied
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.redaction import redact
from holdfast.contracts.secrets import known_secrets
from holdfast.lineage.checkpoint_rows import deletions, deletions_in
from holdfast.lineage.claims import check_uid
from holdfast.lineage.clean import clean, redacted
from holdfast.lineage.database import Database
from holdfast.lineage.disk import (
    INGEST_VERSION,
    FoundCheckpoint,
    Row,
    is_same_state,
    read_checkpoints,
    survey,
    version_of,
)
from holdfast.lineage.journal_lines import NewLines, read_new_lines
from holdfast.lineage.metric_ingest import follow_metrics, write_metrics
from holdfast.lineage.rows import RunRows, attempt_of, build_rows
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
    conflicts, deleted = 0, dict[str, Row]()
    while conflicts < READS_MAX:
        with database.reading() as connection:
            before = _before(connection, record.uid, fresh=fresh)
        content = _read_folder(paths, before, deleted)
        with database.writing() as connection:
            lock_run(connection, record.uid)
            if _fingerprint(connection, record.uid) != before.fingerprint:
                conflicts += 1
                continue
            _write_state(connection, paths, record.uid, content, fresh=fresh)
        if content.is_whole:
            return
        fresh = False
        deleted |= _write_more_lines(database, paths, record.uid, content)
    with database.writing() as connection:
        # Other processes keep writing this run, so read the folder while holding the lock.
        lock_run(connection, record.uid)
        content = _read_folder(paths, _before(connection, record.uid, fresh=fresh), deleted)
        _write_state(connection, paths, record.uid, content, fresh=fresh)


@dataclass(frozen=True)
class _Before:
    """What the index had of a run before its folder was read. All else `is_ignored` if fresh."""

    fingerprint: str | None
    is_ignored: bool = False
    unknown_kinds: list[str] | None = None
    checkpoints: dict[str, Row] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Content:
    """The content of a run's folder. Unless it `is_whole`, more journal lines follow."""

    found: list[FoundCheckpoint]
    lines: list[NewLines]
    rows: RunRows
    secrets: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return all(one.is_whole for one in self.lines)


def _before(connection: Connection, uid: str, *, fresh: bool) -> _Before:
    query = select(RUNS.c.fingerprint, RUNS.c.unknown_kinds).where(RUNS.c.uid == uid)
    row = connection.execute(query).first()
    if row is None or fresh:
        return _Before(row.fingerprint if row else None, is_ignored=fresh)
    checkpoints, lines = _stored(connection, CHECKPOINTS, uid), _stored(connection, JOURNALS, uid)
    return _Before(
        row.fingerprint,
        unknown_kinds=row.unknown_kinds,
        checkpoints={one["name"]: one for one in checkpoints},
        lines={one["journal"]: one["lines"] for one in lines},
    )


def _read_folder(paths: RunPaths, before: _Before, deleted: Mapping[str, Row]) -> _Content:
    """Read the folder. `deleted` are the deletions in lines that were just written."""
    seen = survey(paths)
    history = HistoryReader(paths).load() if before.is_ignored else load_tallied(paths)
    # Another version, which knows other event kinds, may have counted the lines differently.
    is_other = version_of(before.fingerprint or "") != INGEST_VERSION or (
        before.unknown_kinds != sorted(history.tally.unknown_kinds)
    )
    lines = list(read_new_lines(paths, {} if is_other else before.lines))
    found = read_checkpoints(seen.records, before.checkpoints)
    is_whole = all(one.is_whole for one in lines)
    known = before.checkpoints if not any(one.is_replaced for one in lines) else {}
    new = [event for one in lines for event in one.events]
    rows = build_rows(
        history,
        found,
        deletions([*history.events, *new], {**deletions_in(known), **deleted}),
        # Without a digest, the next ingest continues.
        seen.fingerprint if is_whole else f"{INGEST_VERSION}:",
    )
    secrets = known_secrets(history.record.spec, paths)
    return _Content(found, lines, redacted(rows, secrets), secrets)


def _write_more_lines(
    database: Database, paths: RunPaths, uid: str, content: _Content
) -> dict[str, Row]:
    """Write the lines that follow, except the last ones; return the deletions that they record.

    Ends early if another process ingests the run.
    """
    found: dict[str, Row] = {}
    fingerprint = content.rows.run["fingerprint"]
    while True:
        with database.reading() as connection:
            stored = _stored(connection, JOURNALS, uid)
        lines = list(read_new_lines(paths, {one["journal"]: one["lines"] for one in stored}))
        if all(one.is_whole for one in lines):
            return found
        with database.writing() as connection:
            lock_run(connection, uid)
            if _fingerprint(connection, uid) != fingerprint:
                return found
            _write_lines(connection, uid, lines, content.secrets, stored)
        found = deletions((event for one in lines for event in one.events), found)


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
    known = connection.scalar(select(RUNS.c.uid).where(RUNS.c.uid == uid))
    checkpoints = _stored(connection, CHECKPOINTS, known)
    rows = content.rows
    upsert(connection, RUNS, [clean(rows.run)])
    _sync(connection, ATTEMPTS, rows.attempts, _stored(connection, ATTEMPTS, known))
    _sync(connection, LAUNCHES, rows.launches, _stored(connection, LAUNCHES, known))
    _sync(connection, NODES, rows.nodes, _stored(connection, NODES, known))
    _sync(connection, CHECKPOINTS, rows.checkpoints, checkpoints)
    _write_files(connection, uid, content.found, bool(checkpoints))
    _sync(connection, EDGES, rows.edges, _stored(connection, EDGES, known))
    stored = _stored(connection, JOURNALS, known)
    _write_lines(connection, uid, content.lines, content.secrets, stored)


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
    connection: Connection,
    uid: str,
    lines: Sequence[NewLines],
    secrets: Sequence[str],
    stored: Sequence[Row],
) -> None:
    """Add the new lines of the journals, which are append-only."""
    replaced = [one.journal for one in lines if one.is_replaced]
    if replaced:
        # A journal with fewer lines was replaced, so write all its lines again.
        connection.execute(
            delete(EVENTS).where(EVENTS.c.run_uid == uid, EVENTS.c.journal.in_(replaced))
        )
    wanted = [{"run_uid": uid, "journal": one.journal, "lines": one.lines} for one in lines]
    _sync(connection, JOURNALS, wanted, stored)
    rows = (_event_row(uid, one, event, secrets) for one in lines for event in one.events)
    upsert(connection, EVENTS, rows, is_new=not stored)


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
