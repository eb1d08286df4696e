"""The tables for SQLAlchemy Core, and functions that write rows.

Times are Unix seconds, durations are in seconds and sizes are in bytes. Text columns are unbounded.
All rows are derived from disk. A checkpoint is identified by its run's uid and its directory name,
because runs in two roots can have the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from importlib import import_module
from operator import itemgetter
from typing import Any, Final, get_args

import orjson
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.lineage.database.documents import ACCOUNT, NUMBERS, OBJECT, TEXTS, DocumentColumn
from holdfast.lineage.database.states import STORED_EDGES, CheckpointState

ROWS_PER_STATEMENT_MAX: Final = 1000
# For fewer rows the temporary table costs more than it saves.
COPY_ROWS_MIN: Final = 50

Row = dict[str, Any]

# The names of constraints are the same in every database.
METADATA: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


_TYPES: Final[Mapping[Any, Any]] = {
    str: sa.Text,
    int: sa.BigInteger,
    float: sa.Double,
    bool: sa.Boolean,
    dict: OBJECT,
    list: TEXTS,
}
_KEY: Final = {"primary_key": True, "autoincrement": False}
TEXT_KEY: Final = (str, _KEY)
NUMBER_KEY: Final = (sa.Integer, _KEY)
BIG_NUMBER_KEY: Final = (int, _KEY)


def _table(name: str, columns: Mapping[str, Any], *rules: Any) -> sa.Table:
    """Return a table. A column is a type, or one with SQLAlchemy's options for it."""
    return sa.Table(name, METADATA, *(_column(*one) for one in columns.items()), *rules)


def _column(name: str, given: Any) -> sa.Column[Any]:
    kind, options = given if isinstance(given, tuple) else (given, {})
    kinds = get_args(kind) or (kind,)
    return sa.Column(name, _TYPES.get(kinds[0], kinds[0]), nullable=len(kinds) > 1, **options)


def _listing(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


def _one_of(column: str, values: type[StrEnum]) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} IN ({_listing(values)})", name=column)


def _part_of(table: str, **columns: str) -> sa.ForeignKeyConstraint:
    """Return a key that refers to the same run in `table`; `columns` maps own to other names."""
    own = {"run_uid": "run_uid", **columns}
    others = [f"{table}.{name}" for name in own.values()]
    return sa.ForeignKeyConstraint(list(own), others, ondelete="CASCADE")


# The tags and the newest note of a run or a checkpoint, see `contracts.records.annotations`.
_ANNOTATION: Final[Mapping[str, Any]] = {
    "tags": (list, {"server_default": "[]"}),
    "note": str | None,
    "note_by": str | None,
    "note_at": float | None,
}

# One run: its `spec.json` and a summary of its attempts and journals.
# `updated_at` is the newest time in its folder. `goodput` covers the time until the end of the
# run, or until `updated_at` if it is live. `root_id` is the UUID of its root. `unknown_kinds`
# are the event kinds that the version which wrote the row did not know. `world_size` is that of
# the newest attempt. `kept`, `damaged` and `deleted` count checkpoints by state. `owner_uid`,
# `reader_gid` and `is_public` say who may read the folder, see `permissions`.
RUNS: Final = _table(
    "runs",
    {
        "uid": TEXT_KEY,
        "run": str,
        "name": str,
        "root": str,
        "directory": str,
        "state": str,
        "reason": str | None,
        "spec": dict,
        "spec_digest": str,
        "command_digest": str | None,
        "created_at": float,
        "created_by": str,
        "ended_at": float | None,
        "forked_from": str | None,
        "forked_uid": str | None,
        "forked_path": str | None,
        "step": int | None,
        "flow_run": str | None,
        "updated_at": float,
        "committed_at": float | None,
        "goodput": ACCOUNT,
        "fingerprint": str,
        "root_id": (str, {"server_default": ""}),
        "unknown_kinds": (list, {"server_default": "[]"}),
        "attempts": (int, {"server_default": "0"}),
        "world_size": int | None,
        "kept": (int, {"server_default": "0"}),
        "kept_bytes": (int, {"server_default": "0"}),
        "damaged": (int, {"server_default": "0"}),
        "damaged_bytes": (int, {"server_default": "0"}),
        "deleted": (int, {"server_default": "0"}),
        "deleted_bytes": (int, {"server_default": "0"}),
        "owner_uid": int | None,
        "reader_gid": int | None,
        "is_public": (bool, {"server_default": sa.false()}),
        **_ANNOTATION,
    },
    _one_of("state", RunState),
    sa.Index(None, "created_at", "uid"),
    sa.Index(None, "updated_at", "uid"),
    sa.Index(None, "name", "uid"),
    sa.Index(None, "run", "created_at"),
    sa.Index(None, "state", "created_at", "uid"),
    sa.Index(None, "owner_uid"),
    # PostgreSQL has a hash index, because a path may be too long for a B-tree. The migration says
    # so, because the option would import PostgreSQL's dialect here.
    sa.Index(None, "root"),
)

# One attempt: one scheduler job of a run. The digests are from its request.
ATTEMPTS: Final = _table(
    "attempts",
    {
        "run_uid": TEXT_KEY,
        "number": NUMBER_KEY,
        "state": str,
        "cause": str | None,
        "evidence": list,
        "reason": str | None,
        "executor": str | None,
        "job_id": str | None,
        "job_name": str | None,
        "hosts": list,
        "nodes": int | None,
        "world_size": int,
        "command_digest": str | None,
        "resumed_from": str | None,
        "resumed_step": int | None,
        "first_step": int | None,
        "last_step": int | None,
        "committed_step": int | None,
        "created_at": float | None,
        "submitted_at": float | None,
        "started_at": float | None,
        "stop_requested_at": float | None,
        "stop_committed_at": float | None,
        "ended_at": float | None,
        "traceback": str | None,
        "failed_rank": int | None,
        "code_commit": str | None,
        "code_digest": str | None,
        "config_digest": str | None,
        "data_digest": str | None,
        "environment_digest": str | None,
    },
    _part_of("runs", run_uid="uid"),
    _one_of("state", AttemptState),
    _one_of("cause", Cause),
    sa.Index(None, "job_id"),
)

# A node of an attempt; `fault` is the failure's cause if it is attributed to this node.
NODES: Final = _table(
    "attempt_nodes",
    {
        "run_uid": TEXT_KEY,
        "attempt": NUMBER_KEY,
        "host": TEXT_KEY,
        "fault": str | None,
        "started_at": float | None,
        "ended_at": float | None,
    },
    _part_of("attempts", attempt="number"),
    _one_of("fault", Cause),
    sa.Index(None, "host", "fault", "started_at"),
)

# One launch of torchrun inside an attempt.
LAUNCHES: Final = _table(
    "launches",
    {
        "run_uid": TEXT_KEY,
        "attempt": NUMBER_KEY,
        "number": NUMBER_KEY,
        "world_size": int | None,
        "command_digest": str | None,
        "resumed_from": str | None,
        "resumed_step": int | None,
        "first_step": int | None,
        "last_step": int | None,
        "started_at": float | None,
        "trained_from": float | None,
        "ended_at": float | None,
        "ending": str | None,
        "exit_code": int | None,
    },
    _part_of("attempts", attempt="number"),
)

# A child never has a smaller step than its parent, and equal steps in one run are ordered by
# name, so these rows cannot form a cycle. A trigger rejects cycles of equal steps across runs.
PARENT_IS_EARLIER: Final = (
    "parent_uid IS NULL OR (parent_name IS NOT NULL AND parent_step IS NOT NULL "
    "AND (parent_step < step OR (parent_step = step AND (parent_uid <> run_uid "
    "OR length(parent_name) < length(name) "
    "OR (length(parent_name) = length(name) AND parent_name < name)))))"
)

# One checkpoint that was committed at some time. Directories without manifest have no row.
# `parent` is taken from the manifest. `parent_uid`, `parent_name` and `parent_step` are null if
# that checkpoint cannot be an ancestor.
CHECKPOINTS: Final = _table(
    "checkpoints",
    {
        "run_uid": TEXT_KEY,
        "name": TEXT_KEY,
        "step": int,
        "attempt": int,
        "launch": int,
        "state": str,
        "detail": str | None,
        "path": str,
        "reason": str | None,
        "world_size": int | None,
        "parent": str | None,
        "parent_uid": str | None,
        "parent_name": str | None,
        "parent_step": int | None,
        "bytes": int | None,
        "files": int | None,
        "checksum": str | None,
        "command_digest": str | None,
        "blocked_s": float | None,
        "flush_s": float | None,
        "staged_at": float | None,
        "committed_at": float | None,
        "metrics": dict,
        "versions": dict,
        "topology": dict,
        "pinned": bool,
        "pinned_by": str | None,
        "pinned_at": float | None,
        "pin_note": str | None,
        "rolled_back": bool,
        "deleted_reason": str | None,
        "deleted_by": str | None,
        "deleted_at": float | None,
        "stamp": str,
        **_ANNOTATION,
    },
    _part_of("runs", run_uid="uid"),
    _one_of("state", CheckpointState),
    sa.CheckConstraint("step >= 0", name="step"),
    sa.CheckConstraint("bytes >= 0", name="bytes"),
    sa.CheckConstraint(PARENT_IS_EARLIER, name="parent"),
    sa.Index(None, "run_uid", "step", "attempt", "launch", unique=True),
    sa.Index(None, "run_uid", "state", "step", "attempt", "launch"),
    sa.Index(None, "parent_uid", "parent_name"),
)

# One file of a checkpoint; `number` is its position in the manifest.
FILES: Final = _table(
    "checkpoint_files",
    {
        "run_uid": TEXT_KEY,
        "checkpoint": TEXT_KEY,
        "number": NUMBER_KEY,
        "path": str,
        "bytes": int,
        "checksum": str,
    },
    _part_of("checkpoints", checkpoint="name"),
)

# One lineage edge, recorded in the folder of `run_uid`. Parents are in `checkpoints`.
# `source` and `target` are a checkpoint's directory name, `attempt-NNNN`, the empty string for
# the run itself, or the path of an export, whose `target_uid` is null. The id is a digest of all
# other columns, because a path may be too long for an index of PostgreSQL.
EDGES: Final = _table(
    "checkpoint_edges",
    {
        "id": TEXT_KEY,
        "run_uid": str,
        "kind": str,
        "source_uid": str,
        "source_run": str,
        "source": str,
        "target_uid": str | None,
        "target_run": str | None,
        "target": str,
    },
    _part_of("runs", run_uid="uid"),
    sa.CheckConstraint(f"kind IN ({_listing(STORED_EDGES)})", name="kind"),
    sa.Index(None, "run_uid"),
    sa.Index(None, "source_uid"),
    sa.Index(None, "target_uid"),
)

# The number of lines read from a journal; `journal` is its path in the run's folder.
JOURNALS: Final = _table(
    "journals",
    {
        "run_uid": TEXT_KEY,
        "journal": TEXT_KEY,
        "lines": int,
    },
    _part_of("runs", run_uid="uid"),
)

# One journal line. Its kind is unconstrained: a newer version may have written it.
EVENTS: Final = _table(
    "events",
    {
        "run_uid": TEXT_KEY,
        "journal": TEXT_KEY,
        "opening": BIG_NUMBER_KEY,
        "sequence": BIG_NUMBER_KEY,
        "attempt": int | None,
        "time": float,
        "kind": str,
        "data": dict,
    },
    _part_of("journals", journal="journal"),
    sa.Index(None, "run_uid", "time", "journal", "opening", "sequence"),
    sa.Index(None, "run_uid", "kind", "time"),
)
# The lines of a run in order.
IN_ORDER: Final = (EVENTS.c.time, EVENTS.c.journal, EVENTS.c.opening, EVENTS.c.sequence)

# The read position in a metrics file: `offset` bytes, in buckets of `stride` steps.
# `spark` has a few values of the loss, oldest first, for the sparkline in the list of runs.
METRIC_FILES: Final = _table(
    "metric_files",
    {
        "run_uid": TEXT_KEY,
        "attempt": BIG_NUMBER_KEY,
        "launch": BIG_NUMBER_KEY,
        "offset": int,
        "stride": int,
        "spark": NUMBERS,
    },
    _part_of("runs", run_uid="uid"),
)

# One bucket of metrics, which begins at step `bucket`.
# `step` and `time` are from the last line in the bucket. `data` maps each metric's name to
# (step of the last value, last value, lowest value, highest value).
METRICS: Final = _table(
    "metrics",
    {
        "run_uid": TEXT_KEY,
        "attempt": BIG_NUMBER_KEY,
        "launch": BIG_NUMBER_KEY,
        "bucket": BIG_NUMBER_KEY,
        "step": int,
        "time": float,
        "data": dict,
    },
    _part_of("metric_files", attempt="attempt", launch="launch"),
)

# A single row: the oldest revision whose programs can still read and write this schema.
COMPATIBILITY: Final = _table(
    "compatibility",
    {
        "oldest": TEXT_KEY,
    },
)

# All tables with rows of runs.
TABLES: Final = (
    *(RUNS, ATTEMPTS, LAUNCHES, NODES, CHECKPOINTS, FILES, EDGES),
    *(JOURNALS, EVENTS, METRIC_FILES, METRICS),
)


def lock_run(connection: sa.Connection, uid: str) -> None:
    """Lock a run against other ingests until the transaction ends.

    SQLite needs no lock: it has one writer at a time, which is this transaction.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(uid, 0)))
        )


def upsert(
    connection: sa.Connection, table: sa.Table, rows: Iterable[Row], *, is_new: bool = False
) -> None:
    """Insert rows, or replace those with the same key. Of several rows with one key, the last wins.

    Pass `is_new` if the table has none of these keys. This is faster.
    """
    keys = [column.name for column in table.primary_key]
    key_of = itemgetter(*keys)
    unique = list({key_of(row): row for row in rows}.values())
    if not unique:
        return
    if connection.dialect.name == "postgresql" and len(unique) >= COPY_ROWS_MIN:
        _copy(connection, table, unique, is_new=is_new)
        return
    statement = _insert(table, connection.dialect.name, is_new=is_new)
    for start in range(0, len(unique), ROWS_PER_STATEMENT_MAX):
        connection.execute(statement, unique[start : start + ROWS_PER_STATEMENT_MAX])


@cache
def _insert(table: sa.Table, dialect: str, *, is_new: bool) -> Any:
    """Return a statement that inserts rows, and replaces those with the same key unless `is_new`.

    SQLAlchemy takes longer to make it than to run it.
    """
    keys = [column.name for column in table.primary_key]
    statement: Any = import_module(f"sqlalchemy.dialects.{dialect}").insert(table)
    if is_new:
        return statement
    others = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _copy(connection: sa.Connection, table: sa.Table, rows: Sequence[Row], *, is_new: bool) -> None:
    """Write many rows by PostgreSQL's COPY, which is several times as fast as INSERT.

    COPY cannot replace rows. So unless the rows are new, it fills a temporary table, from which
    one statement inserts or replaces them.
    """
    names = [f'"{column.name}"' for column in table.columns]
    keys = [f'"{column.name}"' for column in table.primary_key]
    listing, key, incoming = ", ".join(names), ", ".join(keys), f'"incoming_{table.name}"'
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
    # Use the driver's own connection, because SQLAlchemy does not support COPY.
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor:
            if is_new:
                _send(cursor, f'COPY "{table.name}" ({listing}) FROM STDIN', table, rows)
                return
            cursor.execute(
                f"CREATE TEMPORARY TABLE IF NOT EXISTS {incoming} "
                f'(LIKE "{table.name}" INCLUDING DEFAULTS) ON COMMIT DELETE ROWS'
            )
            _send(cursor, f"COPY {incoming} ({listing}) FROM STDIN", table, rows)
            cursor.execute(
                f'INSERT INTO "{table.name}" ({listing}) SELECT {listing} FROM {incoming} '
                f"ON CONFLICT ({key}) DO UPDATE SET {changes}"
            )
            cursor.execute(f"DELETE FROM {incoming}")
    except connection.dialect.loaded_dbapi.Error as error:
        raise DBAPIError(f"COPY {table.name}", None, error) from error


def _send(cursor: Any, statement: str, table: sa.Table, rows: Sequence[Row]) -> None:
    """Send rows to a COPY statement, with documents as JSON."""
    values = itemgetter(*(column.name for column in table.columns))
    documents = [i for i, c in enumerate(table.columns) if isinstance(c.type, DocumentColumn)]
    with cursor.copy(statement) as copy:
        for row in rows:
            sent = list(values(row))
            for index in documents:
                sent[index] = _document(sent[index])
            copy.write_row(sent)


def _document(value: Any) -> str:
    """Return `value` as JSON. Values that orjson rejects, such as huge integers, use `json`."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value)
