"""Ingest: updates the rows of one run from its folder.

Any number of processes may ingest a run at any time. The folder is read without a lock; the lock
is held only while writing. A process writes only if the rows have not changed since it read the
folder, so the rows always come from the newest read.

A full look surveys all files. Then only what differs from the rows is read and written. A process
that updates a run again and again looks only at what usually changes, see `following`.
"""

from __future__ import annotations

import contextlib
import secrets as random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, delete, select
from sqlalchemy.exc import DataError, IntegrityError

from holdfast.contracts import errors
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths, precedence
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import RunHistory, load_record
from holdfast.contracts.records.history_cache import HistoryReader, load_tallied
from holdfast.contracts.spec.secrets import known_secrets
from holdfast.lineage.database.tables import RUNS, lock_run
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.ingest import disk, run_changes, run_writes
from holdfast.lineage.ingest.checkpoint_totals import CheckpointTotals
from holdfast.lineage.ingest.following import IndexProgress, OvertakenError, State, update
from holdfast.lineage.ingest.journal_lines import NewLines, read_new_lines
from holdfast.lineage.ingest.metrics import follow_metrics, write_metrics
from holdfast.lineage.ingest.rows import run_row

# The check for copied run folders: two folders with the same uid.


def check_uid(database: Database, paths: RunPaths, uid: str) -> None:
    """Raise `UnreadableRunError` if another folder with the same uid has precedence.

    The rows belong to the folder that is first by `contracts.paths.precedence`. A folder that was
    moved causes no error, because its old path no longer exists.
    """
    with database.reading() as connection:
        known = connection.scalar(select(RUNS.c.directory).where(RUNS.c.uid == uid))
    if known is None or known == str(paths.directory):
        return
    rival = RunPaths(Path(known))
    try:
        record = read_document(RunRecord, rival.spec)
        if record is None or record.uid != uid or precedence(paths) < precedence(rival):
            return
    except (errors.HoldfastError, OSError):
        return
    raise errors.UnreadableRunError(
        f"{paths.directory}: has the same uid as the run in {rival.directory} ({uid}); move the "
        "copy out of the root"
    )


# The number of reads without the lock, if other processes keep writing the rows meanwhile.
READS_MAX: Final = 3
# Checkpoints whose manifests are in memory at a time.
CHECKPOINTS_MAX: Final = 500


def ingest_run(
    database: Database,
    paths: RunPaths,
    *,
    fresh: bool = False,
    progress: IndexProgress | None = None,
) -> None:
    """Update the rows of the run at `paths` from its folder. Cheap if nothing has changed.

    With `fresh`, all files are read and all rows are written again. With the `progress` of this
    process, an update costs as much as what is new, see `following`. Raises `NotFoundError` if
    the folder is not a run, `UnreadableRunError` if its files are invalid, and `LineageError` if
    the database cannot be used.
    """
    paths = RunPaths(paths.directory.resolve())
    # Before anything is written: a copied folder must not take over the rows of the original.
    record = load_record(paths)
    with errors.reading_run(paths.directory):
        try:
            if progress is None or not update(database, paths, record, progress):
                check_uid(database, paths, record.uid)
                state = _ingest(database, paths, record.uid, fresh=fresh)
                if progress is not None:
                    progress.begin(record.uid, state)
        except errors.LineageError as error:
            # Only these two errors blame the data. All others blame the database.
            if not isinstance(error.__cause__, DataError | IntegrityError):
                raise
            raise errors.UnreadableRunError(
                f"{paths.directory}: the database rejected the run's data: {error.__cause__.orig}; "
                "restore the damaged file, or move the folder out of the root"
            ) from error


def _ingest(database: Database, paths: RunPaths, uid: str, *, fresh: bool) -> State | None:
    """Look at all files; return the state for `following`, or None if nothing was to be done."""
    # Read without the lock, because reading a large folder takes long and other processes write
    # too.
    for _ in range(READS_MAX):
        with contextlib.suppress(OvertakenError):
            return _Look(database, paths, uid, fresh=fresh).run()
    with database.writing() as connection:
        # Other processes keep writing this run, so read the folder while holding the lock.
        lock_run(connection, uid)
        return _Look(database, paths, uid, fresh=fresh, held=connection).run()


class _Look:
    """One look at all files of a run. A large change takes several transactions.

    The last one writes the fingerprint. Until then, the rows have one that no folder has, so that
    the next ingest continues. In a `held` transaction, there is only that one.
    """

    def __init__(
        self,
        database: Database,
        paths: RunPaths,
        uid: str,
        *,
        fresh: bool,
        held: Connection | None = None,
    ) -> None:
        self._database, self._paths, self._uid = database, paths, uid
        self._fresh, self._held = fresh, held
        self._is_begun = False
        self._load = HistoryReader(paths).load if fresh else partial(load_tallied, paths)
        # The fingerprint of the rows, and the lines in them.
        self._fingerprint: str | None = None
        self._stored: dict[str, int] = {}
        self._secrets: tuple[str, ...] = ()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection]:
        if self._held is not None:
            yield self._held
            return
        with self._database.reading() as connection:
            yield connection

    @contextlib.contextmanager
    def _writing(self, history: RunHistory, fingerprint: str = "") -> Iterator[Connection]:
        """Yield a connection that may write. Raises `OvertakenError` if another process wrote."""
        if self._held is not None:
            self._begin(self._held, history)
            yield self._held
            return
        with self._database.writing() as connection:
            lock_run(connection, self._uid)
            # Another process has written since the folder was read. Its rows may be newer.
            if run_writes.fingerprint_in(connection, self._uid) != self._fingerprint:
                raise OvertakenError
            self._begin(connection, history)
            yield connection
            if not fingerprint:
                # A fingerprint that no folder has. If this process is killed between two
                # transactions, the next ingest sees that the rows are incomplete.
                fingerprint = f"{disk.INGEST_VERSION}:~{random.token_hex(8)}"
                mine = RUNS.c.uid == self._uid
                connection.execute(RUNS.update().where(mine).values(fingerprint=fingerprint))
        self._fingerprint, self._is_begun = fingerprint, True

    @property
    def _has_rows(self) -> bool:
        """False while the index has no rows of the run, or only some that are deleted first."""
        return self._is_begun or (self._fingerprint is not None and not self._fresh)

    def _begin(self, connection: Connection, history: RunHistory) -> None:
        """Delete the rows of another run, and all with `fresh`; write a first row of the run."""
        if self._is_begun:
            return
        self._is_begun = self._held is not None
        uid, mine = self._uid, RUNS.c
        if self._fresh:
            # All other tables of the run refer to this row, so they are emptied with it.
            connection.execute(delete(RUNS).where(mine.uid == uid))
        row = run_row(history, CheckpointTotals(), f"{disk.INGEST_VERSION}:")
        # Delete the rows of an earlier run in this folder. A root of another cluster can have the
        # same path, so compare `root_id` too.
        connection.execute(
            delete(RUNS).where(
                mine.run == self._paths.name,
                mine.directory == str(self._paths.directory),
                mine.root_id == row["root_id"],
                mine.uid != uid,
            )
        )
        if self._fresh or self._fingerprint is None:
            run_writes.write_run(connection, row, self._secrets)
            self._stored = {}

    def run(self) -> State | None:
        columns = RUNS.c
        query = select(columns.fingerprint, columns.unknown_kinds).where(columns.uid == self._uid)
        with self._reading() as connection:
            stored = connection.execute(query).first()
            self._fingerprint = stored.fingerprint if stored else None
            self._stored = run_writes.lines_in(connection, self._uid) if stored else {}
        # The survey comes first: a change after it gives another fingerprint at the next ingest.
        seen = disk.survey(self._paths)
        if (
            stored
            and not self._fresh
            and _is_current(stored.fingerprint, stored.unknown_kinds, seen)
        ):
            return self._leave_as_is(seen)
        history = self._load()
        self._secrets = known_secrets(history.record.spec, self._paths)
        # Another version, which knows other event kinds, may have counted the lines differently.
        is_other = (
            stored is None
            or disk.version_of(stored.fingerprint or "") != disk.INGEST_VERSION
            or stored.unknown_kinds != sorted(history.tally.unknown_kinds)
        )
        lines, named, is_replaced = self._write_former_lines(history, is_all=is_other)
        # Lines that come from now on are new for the next update too.
        history = self._load(late=True)
        work = _Work(seen, history, lines, named, is_all=self._fresh or is_other or is_replaced)
        return self._write(work)

    def _leave_as_is(self, seen: disk.Survey) -> State | None:
        if self._held is not None:
            write_metrics(self._held, self._paths, self._uid)
        else:
            follow_metrics(self._database, self._paths, self._uid)
        if self._fingerprint != seen.fingerprint:
            # Rows of a newer program are kept, never replaced by those of an older one, see
            # decision 41.
            # A newer version wrote these rows.
            return None
        with self._reading() as connection:
            totals = run_writes.totals_in(connection, self._uid)
        return State.of(seen, self._fingerprint, self._stored, totals)

    def _write_former_lines(
        self, history: RunHistory, *, is_all: bool
    ) -> tuple[list[NewLines], set[str], bool]:
        """Write the new journal lines, except the last ones, which are returned.

        Also return the checkpoints that the lines name, and whether a journal was replaced.
        """
        known = {} if self._fresh or is_all else self._stored
        named: set[str] = set()
        is_replaced, is_rebuilt = False, self._fresh or is_all
        while True:
            lines = list(read_new_lines(self._paths, known, self._paths.attempt_numbers()))
            named |= run_changes.named_in(lines)
            is_replaced |= (is_new := any(one.is_replaced for one in lines))
            is_rebuilt |= is_replaced
            is_rest = all(one.is_whole for one in lines) and not is_new
            if is_rest and not (is_rebuilt and run_changes.deleted_in(lines)):
                return lines, named, is_replaced
            with self._writing(history) as connection:
                run_writes.write_lines(connection, self._uid, lines, self._secrets, self._stored)
            known = {one.journal: one.lines for one in lines}
            self._stored = self._stored | known

    def _write(self, work: _Work) -> State | None:
        """Write everything that differs from the rows, with the last lines."""
        history, builder = work.history, work.builder(self._secrets)
        fingerprint = work.seen.fingerprint
        changes: list[run_writes.Change] = []
        for names, deletions in self._some_at_a_time(work):
            if changes:
                with self._writing(history) as connection:
                    run_writes.write_checkpoints(connection, self._uid, changes)
            changes = self._read(builder, work, deletions, names)
        with self._writing(history, fingerprint) as connection:
            run_writes.write_checkpoints(connection, self._uid, changes)
            totals = run_writes.totals_in(connection, self._uid)
            groups = {0: builder.own()}
            groups |= {view.number: builder.attempt(view, totals) for view in history.attempts}
            run_writes.write_attempts(connection, self._uid, groups, is_all=True)
            journals = [one.journal for one in work.lines]
            run_writes.forget_journals(connection, self._uid, self._stored.keys() - set(journals))
            run_writes.write_lines(connection, self._uid, work.lines, self._secrets, self._stored)
            row = run_row(history, totals, fingerprint)
            run_writes.write_run(connection, row, self._secrets)
            write_metrics(connection, self._paths, self._uid)
        lines = {one.journal: one.lines for one in work.lines}
        state = State.of(work.seen, fingerprint, lines, totals)
        state.past = history.past
        state.digests = {number: run_changes.digest_of(rows) for number, rows in groups.items()}
        state.watch(work.lines, work.seen.stamps)
        return state if history.state.is_live else None

    def _some_at_a_time(self, work: _Work) -> Iterator[tuple[list[str], dict[str, disk.Row]]]:
        """Yield the checkpoints whose rows may change, with who deleted which of them."""
        names, deletions = self._find_changes(work), run_changes.deleted_in(work.lines)
        if work.is_all and self._has_rows:
            # All lines are in the index, except those that came since.
            place: run_writes.Place | None = None
            while True:
                with self._reading() as connection:
                    found, place = run_writes.deletions_after(connection, self._uid, place)
                if not found:
                    break
                names -= found.keys()
                yield sorted(found), found
        elif not work.is_all:
            unknown = {
                name
                for name in names - deletions.keys()
                if not disk.is_there(work.seen.stamps.get(name, ""))
            }
            with self._reading() as connection:
                deletions = run_writes.deletions_in(connection, self._uid, unknown) | deletions
        ordered = sorted(names | (deletions.keys() if work.is_all else work.named))
        for start in range(0, len(ordered), CHECKPOINTS_MAX):
            yield ordered[start : start + CHECKPOINTS_MAX], deletions

    def _find_changes(self, work: _Work) -> set[str]:
        """Return the checkpoints whose stamps have changed, or all of them."""
        stamps = work.seen.stamps
        if not self._has_rows:
            return set(stamps)
        with self._reading() as connection:
            names = {
                name
                for name, stamp in run_writes.stamps_in(connection, self._uid)
                if work.is_all or stamps.get(name, "") != stamp
            }
            known = {name for name, _ in run_writes.stamps_in(connection, self._uid)}
        names |= stamps.keys() - known
        if run_changes.is_ambiguous(work.history, names):
            work.is_all = True
        return names | known | stamps.keys() if work.is_all else names

    def _read(
        self,
        builder: run_changes.Builder,
        work: _Work,
        deletions: dict[str, disk.Row],
        names: Sequence[str],
    ) -> list[run_writes.Change]:
        """Return how the rows of some checkpoints change."""
        rows: dict[str, disk.Row] = {}
        if self._has_rows:
            with self._reading() as connection:
                rows = run_writes.checkpoints_in(connection, self._uid, names)
        return [
            builder.checkpoint(
                name,
                work.seen.stamps.get(name, ""),
                old := rows.get(name),
                run_changes.deletion_of(name, old, deletions, is_ignored=work.is_all),
            )
            for name in names
        ]


def forget_run(database: Database, uid: str) -> None:
    """Delete all rows of a run whose folder no longer exists."""
    with database.writing() as connection:
        lock_run(connection, uid)
        connection.execute(delete(RUNS).where(RUNS.c.uid == uid))


class _Work:
    """What a look has found. With `is_all`, all rows of checkpoints are built again."""

    def __init__(
        self,
        seen: disk.Survey,
        history: RunHistory,
        lines: list[NewLines],
        named: set[str],
        *,
        is_all: bool,
    ) -> None:
        self.seen, self.history, self.lines, self.named = seen, history, lines, named
        self.is_all = is_all

    def builder(self, secrets: Sequence[str]) -> run_changes.Builder:
        _, journaled = run_changes.journaled_of(self.history.lines, None)
        return run_changes.Builder.of(self.history, secrets, journaled)


def _is_current(fingerprint: str, unknown_kinds: Sequence[str], seen: disk.Survey) -> bool:
    """Return True if the folder has not changed and this version would not build more rows.

    Rows that a newer version wrote are kept.
    """
    # This program knows a kind that the one before could not read, so the run is read again.
    known = {str(kind) for kind in EventKind}
    return not known.intersection(unknown_kinds) and disk.is_same_state(
        fingerprint, seen.fingerprint
    )
