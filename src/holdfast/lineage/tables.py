"""The tables as SQLAlchemy's core writes them, and rows written into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

from holdfast.lineage import models

ROWS_PER_STATEMENT_MAX: Final = 1000

Row = dict[str, Any]

RUNS: Final[Any] = models.Run.__table__
ATTEMPTS: Final[Any] = models.Attempt.__table__
INCARNATIONS: Final[Any] = models.Incarnation.__table__
CHECKPOINTS: Final[Any] = models.Checkpoint.__table__
EDGES: Final[Any] = models.CheckpointEdge.__table__
JOURNALS: Final[Any] = models.Journal.__table__
EVENTS: Final[Any] = models.Event.__table__
NODES: Final[Any] = models.AttemptNode.__table__
FILES: Final[Any] = models.CheckpointFile.__table__
METRIC_FILES: Final[Any] = models.MetricFile.__table__
METRICS: Final[Any] = models.Metric.__table__


def upsert(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows, or replace those with the same key."""
    keys = [column.name for column in table.primary_key]
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    others = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    statement = statement.on_conflict_do_update(index_elements=keys, set_=others)
    for start in range(0, len(rows), ROWS_PER_STATEMENT_MAX):
        connection.execute(statement, list(rows[start : start + ROWS_PER_STATEMENT_MAX]))
