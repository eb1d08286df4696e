"""Which run or checkpoint a person means, and the small steps that every query takes."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, Select, and_, or_, select

from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.roots import read_root_id
from holdfast.contracts.states import RunState
from holdfast.lineage.database import Database
from holdfast.lineage.tables import CHECKPOINTS, RUNS

NAMES_SUGGESTED_MAX: Final = 3
NAMES_SEARCHED_MAX: Final = 1000

Row = dict[str, Any]


class RunRef(BaseModel):
    """Which run is meant."""

    model_config = ConfigDict(frozen=True)

    uid: str
    run: str
    name: str
    root: str
    directory: str
    state: RunState

    @property
    def paths(self) -> RunPaths:
        """The run's folder."""
        return RunPaths(Path(self.directory))


def find_run(database: Database, name: str, root: Path | None = None) -> RunRef:
    """The run that `name` means: its uid, its folder's path or name, or the newest of the name.

    Names can repeat from root to root: one under `root` is preferred, then the newest. Raises
    `NotFoundError`, which names what is near.
    """
    with database.reading() as connection:
        return _ref(run_row(connection, name, root))


def find_checkpoint(
    database: Database, identity: str, root: Path | None = None
) -> tuple[RunRef, str]:
    """(run, directory's name) of a checkpoint given as `run:directory` or as a path.

    Raises `NotFoundError` when the index has no such checkpoint.
    """
    with database.reading() as connection:
        run, row = checkpoint_row(connection, identity, root)
        return _ref(run), row["name"]


def plain_root(root: Path) -> str:
    """A folder as the index spells it."""
    return str(root.expanduser().resolve())


def is_under(root: Path) -> Any:
    """The condition for runs of a root: of its path, and not of another cluster's same path."""
    place = plain_root(root)
    return and_(RUNS.c.root == place, RUNS.c.root_id == read_root_id(Path(place)))


def rows_of(connection: Connection, query: Select[Any]) -> list[Row]:
    """The rows that a query finds, as dictionaries."""
    found = connection.execute(query)
    # Fetched in one go: of a long page the fetching of row after row is a third.
    names = tuple(found.keys())
    return [dict(zip(names, row, strict=True)) for row in found.all()]


def _ref(run: Row) -> RunRef:
    return RunRef.model_validate({field: run[field] for field in RunRef.model_fields})


def rows_of_run(table: Any, run: Row, *order: Any) -> Select[Any]:
    """A query for a run's rows of a table, in the order of some columns."""
    return select(table).where(table.c.run_uid == run["uid"]).order_by(*order)


def run_row(connection: Connection, name: str, root: Path | None) -> Row:
    """The run that `name` means, folders' names before spec names, newer before older."""
    matches = [RUNS.c.uid == name, RUNS.c.run == name, RUNS.c.name == name]
    if "/" in name:
        directory = Path(plain_root(Path(name)))
        # The folder's name has an index; a path is too long for one.
        matches = [and_(RUNS.c.run == directory.name, RUNS.c.directory == str(directory))]
    newest = RUNS.c.created_at.desc(), RUNS.c.uid
    found = rows_of(connection, select(RUNS).where(or_(*matches)).order_by(*newest))
    wanted = plain_root(root) if root else None
    is_several = len(found) > 1
    # Sorting is stable: within each group the newest stays first.
    found.sort(
        key=lambda run: (
            run["root"] != wanted,
            name not in {run["uid"], run["run"]},
            is_several and run["root_id"] != read_root_id(Path(run["root"])),
        )
    )
    if found:
        return found[0]
    names = connection.scalars(select(RUNS.c.run).order_by(*newest).limit(NAMES_SEARCHED_MAX))
    near = difflib.get_close_matches(name, set(names), NAMES_SUGGESTED_MAX)
    hint = f"did you mean {' or '.join(near)}?" if near else "`holdfast runs` lists those there are"
    raise NotFoundError(f"{name}: no such run; {hint}")


def checkpoint_row(connection: Connection, identity: str, root: Path | None) -> tuple[Row, Row]:
    """(run, checkpoint) that an id or a directory means; raises `NotFoundError`."""
    run_name, _, name = identity.rpartition(":")
    if "/" in identity and not CheckpointName.parse(name):
        directory = Path(identity).expanduser().resolve()
        run_name, name = str(directory.parent.parent), directory.name
    if not run_name or not CheckpointName.parse(name):
        raise NotFoundError(
            f"{identity}: not a checkpoint's id; expected <run>:step-NNNNNNNN.aNNNN.lNN, as "
            "`holdfast checkpoints RUN` lists them, or a checkpoint's directory"
        )
    run = run_row(connection, run_name, root)
    query = select(CHECKPOINTS).where(
        CHECKPOINTS.c.run_uid == run["uid"], CHECKPOINTS.c.name == name
    )
    found = rows_of(connection, query)
    if not found:
        raise NotFoundError(
            f"{identity}: run {run['run']} has no such committed checkpoint; "
            f"`holdfast checkpoints {run['run']}` lists those there are"
        )
    return run, found[0]
