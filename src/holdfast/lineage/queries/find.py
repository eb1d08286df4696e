"""Resolves the names of runs and checkpoints, and has small helpers for queries."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, Select, Text, and_, bindparam, or_, select

from holdfast.contracts.disk.paths import CheckpointName, RunPaths, plain_checkpoint
from holdfast.contracts.disk.roots import read_root_id
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.lineage.database import permissions, tables
from holdfast.lineage.database.transactions import Database

NAMES_SUGGESTED_MAX: Final = 3
NAMES_SEARCHED_MAX: Final = 1000
SPECS_MAX: Final = 256

Row = dict[str, Any]

# Queries that every page makes are built once. SQLAlchemy takes longer to build one, and to find
# its compiled form, than the database takes to answer.
RUN_UID: Final = bindparam("run_uid", type_=Text())
_NAME: Final = bindparam("name", type_=Text())
_NEWEST_FIRST: Final = (tables.RUNS.c.created_at.desc(), tables.RUNS.c.uid)
_BY_NAME: Final = (
    select(tables.RUNS)
    .where(or_(tables.RUNS.c.uid == _NAME, tables.RUNS.c.run == _NAME, tables.RUNS.c.name == _NAME))
    .order_by(*_NEWEST_FIRST)
)
# The column of the folder's name has an index; paths may be too long for one.
_BY_FOLDER: Final = (
    select(tables.RUNS)
    .where(tables.RUNS.c.run == bindparam("run"), tables.RUNS.c.directory == bindparam("directory"))
    .order_by(*_NEWEST_FIRST)
)
_CHECKPOINT: Final = select(tables.CHECKPOINTS).where(
    tables.CHECKPOINTS.c.run_uid == RUN_UID, tables.CHECKPOINTS.c.name == _NAME
)


class RunRef(BaseModel):
    """A reference to a run in the index."""

    model_config = ConfigDict(frozen=True)

    uid: str
    run: str
    name: str
    root: str
    directory: str
    state: RunState

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.directory))


def find_run(database: Database, name: str, root: Path | None = None) -> RunRef:
    """Return the run with this uid, folder path, folder name or name.

    Several roots may have runs of the same name. A run under `root` is preferred, then the
    newest one. Raises `NotFoundError`, which suggests similar names.
    """
    with database.reading() as connection:
        return _ref(run_row(connection, name, root))


def find_checkpoint(database: Database, identity: str) -> tuple[RunRef, str]:
    """Return (run, directory name) of a checkpoint given as `run:directory` or as a path.

    Raises `NotFoundError` for an unknown checkpoint.
    """
    with database.reading() as connection:
        run, row = checkpoint_row(connection, identity)
        return _ref(run), row["name"]


def plain_root(root: Path) -> str:
    """Return a folder's path in the form that the index uses."""
    return str(root.expanduser().resolve())


def spec_of(recorded: Mapping[str, Any]) -> RunSpec | None:
    """Return a run's spec; None if this version cannot read it."""
    return _parsed_spec(orjson.dumps(recorded))


@functools.lru_cache(maxsize=SPECS_MAX)
def _parsed_spec(content: bytes) -> RunSpec | None:
    # Cached, because its checks take a third of the time of a run's page.
    # A newer version may have recorded keys that this one cannot read, see decision 44.
    with contextlib.suppress(ValueError):
        return RunSpec.read(orjson.loads(content))
    return None


def is_under(root: Path) -> Any:
    """Return the SQL condition for runs of a root, excluding the same path on other clusters."""
    path = plain_root(root)
    return and_(tables.RUNS.c.root == path, tables.RUNS.c.root_id == read_root_id(Path(path)))


def rows_of(connection: Connection, query: Select[Any], **values: Any) -> list[Row]:
    """Return the rows of a query as dictionaries; `values` are those of its parameters."""
    found = connection.execute(query, values)
    # Fetch all rows in one call: fetching them one by one takes a third of the time of a long page.
    names = tuple(found.keys())
    return [dict(zip(names, row, strict=True)) for row in found.all()]


def _ref(run: Row) -> RunRef:
    return RunRef.model_validate({field: run[field] for field in RunRef.model_fields})


def run_row(connection: Connection, name: str, root: Path | None = None) -> Row:
    """Return the run with this name; folder names come before spec names, newer before older."""
    if "/" in name:
        directory = Path(plain_root(Path(name)))
        values = {"run": directory.name, "directory": str(directory)}
        matching = rows_of(connection, _BY_FOLDER, **values)
    else:
        matching = rows_of(connection, _BY_NAME, name=name)
    # A run that this account may not read does not exist for it, see decision 93.
    found = [run for run in matching if permissions.may_read(run)]
    wanted = plain_root(root) if root else None
    is_several = len(found) > 1
    # The sort is stable, so the newest run stays first in each group.
    found.sort(
        key=lambda run: (
            run["root"] != wanted,
            name not in {run["uid"], run["run"]},
            # Two clusters may have roots with the same path, and only one is this one.
            is_several and run["root_id"] != read_root_id(Path(run["root"])),
        )
    )
    if found:
        return found[0]
    # The suggestions leak no names: only runs that this account may read are searched.
    known = permissions.readable(connection, select(tables.RUNS.c.run))
    names = connection.scalars(known.order_by(*_NEWEST_FIRST).limit(NAMES_SEARCHED_MAX))
    near = difflib.get_close_matches(name, set(names), NAMES_SUGGESTED_MAX)
    hint = f"did you mean {' or '.join(near)}?" if near else "`holdfast runs` lists all runs"
    raise NotFoundError(f"{name}: no such run; {hint}")


def checkpoint_row(connection: Connection, identity: str) -> tuple[Row, Row]:
    """Return the rows (run, checkpoint) of an id or a directory. Raises `NotFoundError`."""
    run_name, _, name = identity.rpartition(":")
    if "/" in identity and not CheckpointName.parse(name):
        directory = plain_checkpoint(identity)
        run_name, name = str(directory.parent.parent.resolve()), directory.name
    if not run_name or not CheckpointName.parse(name):
        raise NotFoundError(
            f"{identity} is not a checkpoint id; expected <run>:step-NNNNNNNN.aNNNN.lNN, as "
            "listed by `holdfast checkpoints RUN`, or the path of a checkpoint"
        )
    run = run_row(connection, run_name)
    found = rows_of(connection, _CHECKPOINT, run_uid=run["uid"], name=name)
    if not found:
        raise NotFoundError(
            f"{identity}: run {run['run']} has no such committed checkpoint; "
            f"`holdfast checkpoints {run['run']}` lists all checkpoints"
        )
    return run, found[0]
