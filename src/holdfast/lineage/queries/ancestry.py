"""Fast queries for the ancestry of a checkpoint, which may be long.

Nearly all parents are in the same run; only the first checkpoint of a run may have its parent in
another run. So all checkpoints of a run up to a step are read as one index range, and the parents
are followed in memory. This takes half the time of a recursive query, which looks up each parent.
Checkpoints in the range that are not ancestors are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, select

from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.lineage.database import permissions, tables
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import reports, views
from holdfast.lineage.queries.find import Row, checkpoint_row, rows_of

# Only the columns that a result needs. The path follows from the run's folder and the name.
_COLUMNS: Final = (
    *("name", "parent_uid", "parent_name", "step", "attempt", "state", "parent"),
    *("world_size", "bytes", "checksum", "committed_at", "pinned", "rolled_back"),
)
_FACTS: Final = [tables.RUNS.c[name] for name in ("run", *permissions.PERMISSIONS)]


@dataclass(frozen=True)
class AncestryStretch:
    """A chain of checkpoints of one run, newest first; `rows` have the columns `_COLUMNS`."""

    uid: str
    run: str
    directory: str
    rows: list[Any]

    def ancestors(self) -> list[reports.Ancestor]:
        run, folder, iso = self.run, f"{RunPaths(Path(self.directory)).checkpoints}/", views.iso
        # There may be ten thousand, so keep this one plain pass over tuples.
        return [
            {
                "id": f"{run}:{name}",
                "run": run,
                "step": step,
                "attempt": attempt,
                "path": folder + name,
                "state": state,
                "parent": parent,
                "world_size": world_size,
                "bytes": size,
                "checksum": checksum,
                "committed_at": iso(committed_at),
                "pinned": pinned,
                "rolled_back": rolled_back,
            }
            for (
                name,
                _parent_uid,
                _parent_name,
                step,
                attempt,
                state,
                parent,
                world_size,
                size,
                checksum,
                committed_at,
                pinned,
                rolled_back,
            ) in self.rows
        ]

    def mappings(self) -> Iterator[Row]:
        """Yield the chain as table rows with the columns read, the path and the run's name."""
        paths = RunPaths(Path(self.directory))
        for row in self.rows:
            named = dict(zip(_COLUMNS, row, strict=True))
            path = str(paths.checkpoint(named["name"]))
            yield {**named, "run_uid": self.uid, "run": self.run, "path": path}


def ancestry(database: Database, identity: str) -> list[reports.Ancestor]:
    """Return a checkpoint and all its ancestors, across forks, newest first.

    Raises `NotFoundError` for an unknown checkpoint.
    """
    with database.reading() as connection:
        _, row = checkpoint_row(connection, identity)
        line = descent(connection, row["run_uid"], row["name"])
    return [one for stretch in line for one in stretch.ancestors()]


def descent(connection: Connection, uid: str, name: str) -> list[AncestryStretch]:
    """Return the chains of a checkpoint and its ancestors, newest first; empty if it is unknown.

    They end before a run that this account may not read. The loop ends, because each visited
    checkpoint is removed from the rows in memory and the database rejects cycles.
    """
    stretches: list[AncestryStretch] = []
    read: dict[str, dict[str, Any]] = {}
    while True:
        if uid not in read:
            read[uid] = _read_until(connection, uid, name)
        rows = _follow(read[uid], uid, name)
        if not rows:
            return stretches
        (run,) = rows_of(connection, select(*_FACTS).where(tables.RUNS.c.uid == uid))
        # An account sees no run whose folder it may not read, not even as an ancestor, see
        # decision 93.
        if not permissions.may_read(run):
            return stretches
        stretches.append(AncestryStretch(uid, run["run"], run["directory"], rows))
        _, uid, name, *_ = rows[-1]


def _read_until(connection: Connection, uid: str | None, name: str | None) -> dict[str, Any]:
    """Return a run's checkpoints up to the step of checkpoint `name`, by name."""
    last = CheckpointName.parse(name or "")
    if uid is None or last is None:
        return {}
    columns = tables.CHECKPOINTS.c
    # All checkpoints up to the step, as one range of an index. Looking up each parent takes twice
    # the time.
    query = select(*(columns[column] for column in _COLUMNS)).where(
        columns.run_uid == uid, columns.step <= last.step
    )
    return {row[0]: row for row in connection.execute(query).all()}


def _follow(rows: dict[str, Any], uid: str, name: str) -> list[Any]:
    """Remove a checkpoint and its ancestors in the same run from `rows`, and return them."""
    line = []
    row = rows.pop(name, None)
    # Removed as it is visited, so that a cycle in damaged rows cannot loop for ever.
    while row is not None:
        line.append(row)
        row = rows.pop(row[2], None) if row[1] == uid else None
    return line
