"""A checkpoint's line of descent, read as quickly as a long one needs.

A run's checkpoints descend from each other, but for its first, which may come from another run's.
So of each run on the way everything up to some step is read as one range of an index, and the line
is followed from parent to parent in memory: in half the time of a recursive query, which looks for
every parent by itself. What of the range is not on the line is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, select

from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.lineage import reports, views
from holdfast.lineage.database import Database
from holdfast.lineage.find import Row, checkpoint_row
from holdfast.lineage.tables import CHECKPOINTS, RUNS

# No more of each checkpoint than a line about it needs; its path is its run's and its name.
_COLUMNS: Final = (
    *("name", "parent_uid", "parent_name", "step", "attempt", "state", "parent"),
    *("world_size", "bytes", "checksum", "committed_at", "pinned", "rolled_back"),
)


@dataclass(frozen=True)
class Stretch:
    """Checkpoints of one run, each the parent of the one before it; `rows` have `_COLUMNS`."""

    uid: str
    run: str
    directory: str
    rows: list[Any]

    def ancestors(self) -> list[reports.Ancestor]:
        """The stretch as it is told."""
        run, folder, iso = self.run, f"{RunPaths(Path(self.directory)).checkpoints}/", views.iso
        # There may be ten thousand: this stays one plain pass over tuples.
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
        """The stretch as rows of the table have it, as far as it was read, with the run's name."""
        paths = RunPaths(Path(self.directory))
        for row in self.rows:
            named = dict(zip(_COLUMNS, row, strict=True))
            path = str(paths.checkpoint(named["name"]))
            yield {**named, "run_uid": self.uid, "run": self.run, "path": path}


def ancestry(
    database: Database, identity: str, *, root: Path | None = None
) -> list[reports.Ancestor]:
    """A checkpoint, its parent, that one's parent and so on, through forks, to the first.

    Raises `NotFoundError` when the index has no such checkpoint.
    """
    with database.reading() as connection:
        _, row = checkpoint_row(connection, identity, root)
        line = descent(connection, row["run_uid"], row["name"])
    return [one for stretch in line for one in stretch.ancestors()]


def descent(connection: Connection, uid: str, name: str) -> list[Stretch]:
    """The line of a checkpoint from young to old, itself first; empty when it is not known.

    The database lets no checkpoint be its own ancestor, and what was passed is not met again:
    so the way has an end.
    """
    stretches: list[Stretch] = []
    read: dict[str, dict[str, Any]] = {}
    while True:
        if uid not in read:
            read[uid] = _read_until(connection, uid, name)
        rows = _follow(read[uid], uid, name)
        if not rows:
            return stretches
        columns = RUNS.c
        query = select(columns.run, columns.directory).where(columns.uid == uid)
        run, directory = connection.execute(query).one()
        stretches.append(Stretch(uid, run, directory, rows))
        _, uid, name, *_ = rows[-1]


def _read_until(connection: Connection, uid: str | None, name: str | None) -> dict[str, Any]:
    """A run's checkpoints, by name, up to the step of the one named."""
    last = CheckpointName.parse(name or "")
    if uid is None or last is None:
        return {}
    columns = CHECKPOINTS.c
    query = select(*(columns[column] for column in _COLUMNS)).where(
        columns.run_uid == uid, columns.step <= last.step
    )
    return {row[0]: row for row in connection.execute(query).all()}


def _follow(rows: dict[str, Any], uid: str, name: str) -> list[Any]:
    """Take from `rows`, which are one run's, a checkpoint and its ancestors in that run."""
    line = []
    row = rows.pop(name, None)
    while row is not None:
        line.append(row)
        row = rows.pop(row[2], None) if row[1] == uid else None
    return line
