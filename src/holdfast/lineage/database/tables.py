"""The tables for SQLAlchemy Core, and functions that write rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, Final

import orjson
from sqlalchemy import JSON, Connection, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from holdfast.lineage.database import models

ROWS_PER_STATEMENT_MAX: Final = 1000
# For fewer rows the temporary table costs more than it saves.
COPY_ROWS_MIN: Final = 50

Row = dict[str, Any]

RUNS: Final[Any] = models.Run.__table__
ATTEMPTS: Final[Any] = models.Attempt.__table__
LAUNCHES: Final[Any] = models.LaunchRow.__table__
CHECKPOINTS: Final[Any] = models.Checkpoint.__table__
EDGES: Final[Any] = models.CheckpointEdge.__table__
JOURNALS: Final[Any] = models.Journal.__table__
EVENTS: Final[Any] = models.EventRow.__table__
NODES: Final[Any] = models.AttemptNodeRow.__table__
FILES: Final[Any] = models.CheckpointFile.__table__
METRIC_FILES: Final[Any] = models.MetricFile.__table__
METRICS: Final[Any] = models.Metric.__table__


def lock_run(connection: Connection, uid: str) -> None:
    """Lock a run against other ingests until the transaction ends.

    SQLite needs no lock: it has one writer at a time, which is this transaction.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(uid, 0))))


def upsert(
    connection: Connection, table: Table, rows: Iterable[Row], *, is_new: bool = False
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
def _insert(table: Table, dialect: str, *, is_new: bool) -> Any:
    """Return a statement that inserts rows, and replaces those with the same key unless `is_new`.

    SQLAlchemy takes longer to make it than to run it.
    """
    keys = [column.name for column in table.primary_key]
    statement = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    if is_new:
        return statement
    others = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


def _copy(connection: Connection, table: Table, rows: Sequence[Row], *, is_new: bool) -> None:
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


def _send(cursor: Any, statement: str, table: Table, rows: Sequence[Row]) -> None:
    """Send rows to a COPY statement, with documents as JSON."""
    values = itemgetter(*(column.name for column in table.columns))
    documents = [i for i, c in enumerate(table.columns) if isinstance(c.type, JSON)]
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
