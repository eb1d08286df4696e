"""Updates the rows of a run that this process has updated before, by what usually changes.

A supervisor updates the index in each turn. The files of a run that is a year old are many: those
of former attempts, manifests and tombstones. Nearly all changes are announced by new journal
lines. So an update reads the run's own files and those of attempts that are not long ended,
and the checkpoints that new lines name. The fingerprint is a sum with one number for each file,
so it can be kept up to date without reading the others.

All files are read, as in any other process, if the rows are not those that are known
here, and every `AGAIN_S` seconds. It finds changes that no line announces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from sqlalchemy import Connection, select

from holdfast.contracts.account.timeline import KnownAccount
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import RunRecord
from holdfast.contracts.records.history import Lines
from holdfast.contracts.records.history_cache import AGAIN_S, load_tallied
from holdfast.contracts.records.tally import COUNTED
from holdfast.contracts.spec.secrets import known_secrets
from holdfast.lineage.database.states import CheckpointState
from holdfast.lineage.database.tables import RUNS, lock_run
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.ingest import disk, run_changes, run_writes
from holdfast.lineage.ingest.checkpoint_totals import STORAGE, CheckpointTotals
from holdfast.lineage.ingest.journal_lines import NewLines, read_new_lines
from holdfast.lineage.ingest.metrics import follow_metrics
from holdfast.lineage.ingest.rows import OF_EDGES, AttemptRows, Journaled, bare, run_row

# Checkpoints that an update inspects. A larger change needs a full look.
NAMES_MAX: Final = 200
# Checkpoints that lines named and that have not changed yet.
WATCHED_MAX: Final = 16
# Checkpoints whose manifests' stamps are in memory, the newest ones.
STAMPS_MAX: Final = 512


def attempt_of_journal(name: str) -> int:
    """Return the attempt of a journal's path in the run's folder; 0 for one of the run itself."""
    folder, _, rest = name.partition("/")
    return int(rest.partition("/")[0]) if folder == "attempts" else 0


class OvertakenError(Exception):
    """Another process has written the run's rows meanwhile."""


@dataclass
class State:
    """The rows of a run as this process last wrote or saw them.

    `number` is the sum behind the fingerprint, `parts` the part of each attempt's files in it.
    `lines` has the number of lines of each journal, by attempt; attempt 0 is the run itself.
    `stamps` has the newest committed checkpoints. `watched` are those of which a line said that
    they are committed (False) or deleted (True), and they were not yet.
    """

    fingerprint: str
    number: int
    parts: dict[int, int]
    lines: dict[int, dict[str, int]]
    totals: CheckpointTotals
    stamps: dict[str, str]
    looked_at: float
    past: frozenset[int] = frozenset()
    watched: dict[str, bool] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    account: KnownAccount = field(default_factory=KnownAccount)
    journaled: tuple[Lines, Journaled] | None = None

    @classmethod
    def of(
        cls, seen: disk.Survey, fingerprint: str, lines: Mapping[str, int], totals: CheckpointTotals
    ) -> Self:
        """Return the state after all files were read."""
        by_attempt: dict[int, dict[str, int]] = {}
        for name, count in lines.items():
            by_attempt.setdefault(attempt_of_journal(name), {})[name] = count
        there = [(name, stamp) for name, stamp in seen.stamps.items() if not disk.is_deleted(stamp)]
        return cls(
            fingerprint=fingerprint,
            number=sum(seen.parts.values()) + disk.sum_of(seen.stamps),
            parts=dict(seen.parts),
            lines=by_attempt,
            totals=totals,
            stamps=dict(there[-STAMPS_MAX:]),
            looked_at=time.monotonic(),
        )

    def watch(self, lines: Iterable[NewLines], stamps: Mapping[str, str]) -> None:
        """Look again at checkpoints that are not yet as a line said: committed or deleted."""
        found = dict(self.watched)
        for one in lines:
            for event in one.events:
                if event.kind in {EventKind.COMMITTED, EventKind.CHECKPOINT_DELETED}:
                    is_gone = event.kind is EventKind.CHECKPOINT_DELETED
                    found[bare(event.data.get("checkpoint"))] = is_gone
        for name, is_gone in list(found.items()):
            stamp = stamps.get(name, "")
            if not name or (stamp and disk.is_deleted(stamp) >= is_gone):
                del found[name]
        self.watched = dict(list(found.items())[-WATCHED_MAX:])

    def lines_of(self, attempts: Iterable[int]) -> dict[str, int]:
        """Return the lines in the index of the run's own journals and those of some attempts."""
        found: dict[str, int] = {}
        for number in (0, *attempts):
            found |= self.lines.get(number, {})
        return found


class IndexProgress:
    """How far this process has updated the rows of one run. Hold the lock while using it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uid = ""
        self.state: State | None = None

    def begin(self, uid: str, state: State | None) -> None:
        """Continue from a full look."""
        self.uid, self.state = uid, state


def update(database: Database, paths: RunPaths, record: RunRecord, progress: IndexProgress) -> bool:
    """Update the run's rows by what usually changes. Return False if a full look is needed."""
    state = progress.state
    if state is None or progress.uid != record.uid:
        return False
    # Changes that no line announces, such as a document that was edited by hand, are found now and
    # then.
    if time.monotonic() - state.looked_at >= AGAIN_S:
        return False
    news = _look(paths, state)
    if news is None:
        return False
    # Without the lock: the rows are compared again under it before anything is written.
    try:
        with database.reading() as connection:
            seen = _compare(connection, paths, record.uid, state, news)
        if seen is None:
            return False
        if not seen.is_mine:
            progress.state = _adopt(database, record.uid, state, news, seen)
        elif news.is_new(state) or seen.has_changed(news):
            progress.state = _write(database, paths, record.uid, state, news, seen)
    except OvertakenError:
        return False
    follow_metrics(database, paths, record.uid, attempts=news.attempts)
    return True


@dataclass(frozen=True)
class _News:
    """What a run's open files have, and what they had in the last update.

    `attempts` are the open ones. `names` are the checkpoints that may have changed.
    """

    attempts: tuple[int, ...]
    parts: dict[int, int]
    lines: list[NewLines]
    names: list[str]
    stamps: dict[str, str]

    def is_new(self, state: State) -> bool:
        return any(part != state.parts.get(number) for number, part in self.parts.items())

    def parts_added(self, state: State) -> int:
        return sum(part - state.parts.get(number, 0) for number, part in self.parts.items())


@dataclass(frozen=True)
class _Seen:
    """The run's row, and the rows of the checkpoints in `_News.names`. `number` is the new sum."""

    is_mine: bool
    run: disk.Row
    rows: dict[str, disk.Row]
    lines: dict[str, int]
    number: int

    def has_changed(self, news: _News) -> bool:
        return any(_stamp_in(self.rows.get(name)) != news.stamps[name] for name in news.names)


def _stamp_in(row: disk.Row | None) -> str:
    return row["stamp"] if row else ""


def _look(paths: RunPaths, state: State) -> _News | None:
    """Look at the open files; return None if a full look is needed."""
    numbers = paths.attempt_numbers()
    # An attempt's folder is gone, so its numbers cannot be taken out of the sum one by one.
    if state.parts.keys() - {0, *numbers}:
        return None
    attempts = tuple(number for number in numbers if number not in state.past)
    parts = disk.survey_parts(paths, (0, *attempts))
    known = state.lines_of(attempts)
    lines = list(read_new_lines(paths, known, attempts))
    if any(one.is_replaced or not one.is_whole for one in lines):
        return None
    if known.keys() - {one.journal for one in lines}:
        return None
    # An attempt that ended long ago has a new line. Its rows are not built here.
    if any(_is_late(event.kind, event.data, state) for one in lines for event in one.events):
        return None
    names = sorted(run_changes.named_in(lines) | state.watched.keys())
    if len(names) > NAMES_MAX:
        return None
    stamps = {name: disk.survey_checkpoint(paths, name) for name in names}
    return _News(attempts, parts, lines, names, stamps)


def _is_late(kind: str, data: Mapping[str, Any], state: State) -> bool:
    """Return True for a line about an attempt whose rows are not built again otherwise."""
    return kind not in COUNTED and data.get("attempt") in state.past


def _compare(
    connection: Connection, paths: RunPaths, uid: str, state: State, news: _News
) -> _Seen | None:
    """Compare the rows with those that are known here. Return None if they are others."""
    columns = [RUNS.c.fingerprint, RUNS.c.directory]
    columns += [RUNS.c[name] for name in STORAGE] + [RUNS.c[f"{name}_bytes"] for name in STORAGE]
    run = connection.execute(select(*columns).where(RUNS.c.uid == uid)).mappings().first()
    # The folder was moved. A full look decides whose rows these are.
    if run is None or run["directory"] != str(paths.directory):
        return None
    rows = run_writes.checkpoints_in(connection, uid, news.names)
    is_mine = run["fingerprint"] == state.fingerprint
    number = state.number + news.parts_added(state)
    for name, stamp in news.stamps.items():
        old = _stamp_in(rows.get(name)) if is_mine else state.stamps.get(name, "")
        number += disk.hash_of(name, stamp) - disk.hash_of(name, old)
    # Another process has done the same work if the fingerprint is the one that this update would
    # write. Otherwise a full look must compare everything, see decision 86.
    if not is_mine and run["fingerprint"] != disk.fingerprint_of(number):
        return None
    journals = [one.journal for one in news.lines]
    lines = {} if is_mine else run_writes.lines_in(connection, uid, journals)
    return _Seen(is_mine, dict(run), rows, lines, number)


def _adopt(database: Database, uid: str, state: State, news: _News, seen: _Seen) -> State:
    """Return the state after another process has written what this update would have written."""
    totals = state.totals.copy()
    for row in seen.rows.values():
        # Whatever the row was before, it counted at most as much as this one.
        most = {"state": CheckpointState.COMMITTED, "rolled_back": False, "checksum": "any"}
        totals.replace({**row, **most}, row)
    totals.is_stale |= any(name in state.stamps for name in news.names if name not in seen.rows)
    if totals.is_stale:
        with database.reading() as connection:
            totals = run_writes.totals_in(connection, uid)
    else:
        totals.count_again(seen.run)
    touched = {row["attempt"] for row in seen.rows.values()}
    digests = {
        number: digest
        for number, digest in state.digests.items()
        if number in state.past and number not in touched
    }
    found = _advanced(state, news, seen)
    for number, own in found.lines.items():
        if number in news.parts:
            found.lines[number] = {name: seen.lines[name] for name in own if name in seen.lines}
    return replace(found, totals=totals, digests=digests)


def _write(
    database: Database, paths: RunPaths, uid: str, state: State, news: _News, seen: _Seen
) -> State | None:
    """Write what is new; return the new state. Raises `OvertakenError`."""
    history = load_tallied(paths, late=False)
    if history.record.uid != uid or run_changes.is_ambiguous(history, news.names):
        raise OvertakenError
    secrets = known_secrets(history.record.spec, paths)
    journaled = run_changes.journaled_of(history.lines, state.journaled)
    builder = run_changes.Builder.of(history, secrets, journaled[1])
    changes = _changes(database, uid, builder, news, seen)
    totals = state.totals.copy()
    for _, old, new, _ in changes:
        totals.replace(old, new)
    found = replace(_advanced(state, news, seen), journaled=journaled, past=history.past)
    with database.writing() as connection:
        lock_run(connection, uid)
        # Again under the lock: another process may have written since `_compare`.
        if run_writes.fingerprint_in(connection, uid) != state.fingerprint:
            raise OvertakenError
        run_writes.write_checkpoints(connection, uid, changes)
        if totals.is_stale:
            totals = run_writes.totals_in(connection, uid)
        groups = _groups(builder, state, news, changes, totals)
        digests = {number: run_changes.digest_of(rows) for number, rows in groups.items()}
        differing = {n: rows for n, rows in groups.items() if digests[n] != state.digests.get(n)}
        is_all = not state.digests
        run_writes.write_attempts(connection, uid, differing, is_all=is_all)
        known = state.lines_of(news.attempts)
        run_writes.write_lines(connection, uid, news.lines, secrets, known)
        row = run_row(history, totals, found.fingerprint, state.account)
        run_writes.write_run(connection, row, secrets)
    found = replace(found, totals=totals, digests=state.digests | digests)
    # The state is kept for live runs only, because the others change no more.
    return found if history.state.is_live else None


def _changes(
    database: Database, uid: str, builder: run_changes.Builder, news: _News, seen: _Seen
) -> list[run_writes.Change]:
    """Return the rows of checkpoints that differ from those in the index."""
    added = run_changes.deleted_in(news.lines)
    unknown = {
        name
        for name in news.names
        if name not in added
        and not disk.is_there(news.stamps[name])
        and (disk.is_deleted(news.stamps[name]) or name in seen.rows)
        and (name not in seen.rows or seen.rows[name]["deleted_at"] is None)
    }
    if unknown:
        with database.reading() as connection:
            added |= run_writes.deletions_in(connection, uid, unknown)
    found = []
    for name in news.names:
        old = seen.rows.get(name)
        deletion = run_changes.deletion_of(name, old, added)
        change = builder.checkpoint(name, news.stamps[name], old, deletion)
        is_read = change[3] is not None and change[3].files is not None
        if change[2] != old or is_read:
            found.append(change)
    return found


def _groups(
    builder: run_changes.Builder,
    state: State,
    news: _News,
    changes: Sequence[run_writes.Change],
    totals: CheckpointTotals,
) -> dict[int, AttemptRows]:
    """Return the rows of the attempts that may have changed, and of the run itself as 0."""
    touched = {row["attempt"] for _, old, new, _ in changes for row in (old, new) if row}
    groups = {
        view.number: builder.attempt(view, totals)
        for view in builder.history.attempts
        if view.number not in state.digests
        or view.number not in state.past
        or view.number in touched
    }
    kinds = {event.kind for one in news.lines for event in one.events}
    if 0 not in state.digests or kinds.intersection(OF_EDGES):
        groups[0] = builder.own()
    return groups


def _advanced(state: State, news: _News, seen: _Seen) -> State:
    """Return the state with the new fingerprint, lines and stamps."""
    stamps = dict(state.stamps)
    for name, stamp in news.stamps.items():
        stamps.pop(name, None)
        if disk.is_there(stamp):
            stamps[name] = stamp
    for name in list(stamps)[: max(0, len(stamps) - STAMPS_MAX)]:
        del stamps[name]
    lines = dict(state.lines)
    lines |= {number: {} for number in news.parts}
    for one in news.lines:
        lines[one.attempt or 0][one.journal] = one.lines
    found = replace(
        state,
        fingerprint=disk.fingerprint_of(seen.number),
        number=seen.number,
        parts=state.parts | news.parts,
        lines=lines,
        stamps=stamps,
    )
    found.watch(news.lines, news.stamps)
    return found
