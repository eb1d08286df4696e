"""The schema can be removed and refilled from disk, and its constraints reject invalid states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.process.test_lineage_ingest import dump
from tests.support.postgres import PostgresServer
from tests.support.runs import build_sample_runs

from holdfast.contracts.errors import LineageError
from holdfast.lineage.database.schema_changes import downgrade, upgrade
from holdfast.lineage.database.sqlite_file import head_revision
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.reindex import reindex


# Every test with a new SQLite index migrates it.
@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.more), "postgresql"])
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


def test_removed_schema_is_refilled_from_disk(url: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for _ in build_sample_runs(root):
        pass
    with open_database(url) as database:
        reindex(database, root)
        wanted = dump(database)
    assert downgrade(url, "base") is None
    assert upgrade(url) == head_revision()
    with open_database(url) as database:
        assert not any(dump(database).values())
        reindex(database, root)
        assert dump(database) == wanted


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
    for _ in build_sample_runs(tmp_path):
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
