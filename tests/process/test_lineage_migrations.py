"""From every earlier revision, with data: nothing is lost, and the next ingest fills the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text
from tests.postgres import PostgresServer
from tests.process.test_lineage_ingest import dump
from tests.runs import T0, storied_run

from holdfast.contracts.errors import LineageError
from holdfast.contracts.paths import list_runs
from holdfast.lineage import queries
from holdfast.lineage.database import (
    MIGRATIONS,
    Database,
    connect_for_migration,
    downgrade,
    head_revision,
    open_database,
    upgrade,
)
from holdfast.lineage.ingest import ingest_run
from holdfast.lineage.reindex import reindex

REVISIONS = [one.revision for one in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
EARLIER = [revision for revision in REVISIONS if revision != head_revision()]
# A parent's edge and a checkpoint that names a younger one as its parent: both were possible.
PARENT_EDGES = (
    "INSERT INTO checkpoint_edges (id, run_uid, kind, source_uid, source_run, source, target_uid, "
    "target_run, target) SELECT name, run_uid, 'parent', run_uid, 'gpt', name, parent_uid, 'gpt', "
    "parent_name FROM checkpoints WHERE parent_name IS NOT NULL"
)
YOUNGER_PARENT = (
    "UPDATE checkpoints SET parent_uid = run_uid, parent_name = 'step-00000150.a0002.l01', "
    "parent = 'gpt:step-00000150.a0002.l01' WHERE name = 'step-00000100.a0001.l01'"
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a new database with an up-to-date schema."""
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path / 'index.db'}"
        upgrade(address)
        yield address
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as address:
        upgrade(address)
        yield address


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what a migration makes ingest look at again."""
    return [{k: v for k, v in row.items() if k not in {"fingerprint", "stamp"}} for row in rows]


def test_upgrade_from_every_earlier_revision_keeps_data(url: str, tmp_path: Path) -> None:
    assert EARLIER, "there is a revision to come from"
    root = tmp_path / "runs"
    for _ in storied_run(root):
        pass
    with open_database(url) as database:
        reindex(database, root)
        wanted = dump(database)
    for revision in EARLIER:
        assert downgrade(url, revision) == revision
        with connect_for_migration(url) as connection:
            for statement in (PARENT_EDGES, YOUNGER_PARENT) if revision == "0001" else ():
                connection.execute(text(statement))
            connection.commit()
        upgrade(url)
        with open_database(url) as database:
            _check_kept(database, wanted, revision)
            for paths in list_runs(root):
                ingest_run(database, paths)
            assert dump(database) == wanted, f"ingest completes what came from {revision}"


def _check_kept(database: Database, wanted: Any, revision: str) -> None:
    """What was known is known still, before anything was read again."""
    found = dump(database)
    for table in ("runs", "attempts", "launches", "events", "checkpoint_edges"):
        assert len(found[table]) == len(wanted[table]), table
    assert plain(found["events"]) == plain(wanted["events"])
    for row, before in zip(found["checkpoints"], wanted["checkpoints"], strict=True):
        same = ("name", "state", "bytes", "checksum", "pinned", "deleted_reason", "metrics")
        assert [row[key] for key in same] == [before[key] for key in same]
        is_impossible = revision == "0001" and row["name"] == "step-00000100.a0001.l01"
        for key in ("parent_uid", "parent_name", "parent_step"):
            assert row[key] == (None if is_impossible else before[key])
    assert all(row["updated_at"] >= T0 for row in found["runs"])
    line = queries.ancestry(database, "gpt:step-00000200.a0003.l01")
    rest = [] if revision == "0001" else [50]
    assert [one["step"] for one in line] == [200, 120, 100, *rest]


COLUMNS = (
    "run_uid, name, step, attempt, launch, state, path, metrics, versions, topology, pinned, "
    "rolled_back, stamp, parent_uid, parent_name, parent_step"
)


def put(database: Database, uid: str, name: str, parent: tuple[str, str] | None) -> None:
    """A bare checkpoint row; `parent` is (uid, name)."""
    step, attempt, launch = int(name[5:13]), int(name[15:19]), int(name[21:23])
    over = f"'{parent[0]}', '{parent[1]}', {int(parent[1][5:13])}" if parent else "NULL, NULL, NULL"
    with database.writing() as connection:
        connection.execute(
            text(
                f"INSERT INTO checkpoints ({COLUMNS}) VALUES ('{uid}', '{name}', {step}, "
                f"{attempt}, {launch}, 'committed', '/x', '{{}}', '{{}}', '{{}}', false, "
                f"false, '', {over})"
            )
        )


def test_database_constraints_reject_invalid_states(url: str, tmp_path: Path) -> None:
    for _ in storied_run(tmp_path):
        pass
    a, b = "a" * 32, "b" * 32
    with open_database(url) as database:
        reindex(database, tmp_path)
        put(database, a, "step-00000300.a0001.l01", (a, "step-00000200.a0003.l01"))
        put(database, a, "step-00000300.a0001.l02", (a, "step-00000300.a0001.l01"))
        for name, parent in (
            # Its own parent, a younger parent, a later attempt of the same step.
            ("step-00000400.a0001.l01", (a, "step-00000400.a0001.l01")),
            ("step-00000400.a0001.l01", (a, "step-00000500.a0001.l01")),
            ("step-00000400.a0001.l01", (b, "step-00000500.a0001.l01")),
            ("step-00000400.a0001.l01", (a, "step-00000400.a0002.l01")),
        ):
            with pytest.raises(LineageError, match="ck_checkpoints_parent"):
                put(database, a, name, parent)
        # A circle of equal steps through two runs, which no row shows alone.
        put(database, a, "step-00000600.a0001.l01", (b, "step-00000600.a0001.l01"))
        with pytest.raises(LineageError, match="its own ancestor"):
            put(database, b, "step-00000600.a0001.l01", (a, "step-00000600.a0001.l01"))
        # One manifest is one checkpoint, also under another spelling of its name.
        with pytest.raises(LineageError, match=r"(?i)unique"):
            put(database, a, "step-00000300.a0001.l01 ", None)
        with database.writing() as connection:
            assert connection.execute(text("DELETE FROM runs")).rowcount == 2
        assert not any(dump(database).values())
