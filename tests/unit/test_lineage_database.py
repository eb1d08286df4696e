"""The database: its URL, whether it may be used, and its schema against tables and enums."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from tests.support.postgres import PostgresServer

from holdfast.contracts.disk import filesystems
from holdfast.contracts.errors import LineageError
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.lineage.database import sqlite_file
from holdfast.lineage.database.schema import current_revision
from holdfast.lineage.database.schema_changes import connect_for_migration, downgrade, upgrade
from holdfast.lineage.database.sqlite_file import (
    MIGRATIONS,
    database_url,
    head_revision,
    known_revisions,
)
from holdfast.lineage.database.states import STORED_EDGES, CheckpointState
from holdfast.lineage.database.tables import METADATA
from holdfast.lineage.database.transactions import open_database

PEOPLE_AT_ONCE = 6


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The URL of a database that has no schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'new' / 'index.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as address:
        yield address


@pytest.mark.more
def test_migrations_create_the_tables_and_can_be_reverted(url: str) -> None:
    assert current_revision(url) is None
    assert upgrade(url) == head_revision() == current_revision(url)
    with connect_for_migration(url) as connection:
        context = MigrationContext.configure(connection, opts={"render_as_batch": True})
        assert compare_metadata(context, METADATA) == []
    assert downgrade(url, "base") is None
    with connect_for_migration(url) as connection:
        assert set(inspect(connection).get_table_names()) <= {"alembic_version"}
    assert upgrade(url) == head_revision(), "the upgrade can be repeated after a downgrade"
    assert upgrade(url) == head_revision(), "a second upgrade changes nothing"


def test_revisions_are_those_that_alembic_finds() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS))
    assert known_revisions() == [one.revision for one in scripts.walk_revisions()][::-1]
    assert head_revision() == scripts.get_current_head()


@pytest.mark.more
def test_alembic_is_imported_only_to_change_a_schema(tmp_path: Path) -> None:
    """A third of a second of every command, and 12 MB of every supervisor."""
    url = f"sqlite:///{tmp_path / 'index.db'}"
    program = (
        "import sys, holdfast.flows.supervisor.supervise;"
        "from holdfast.lineage.database.transactions import open_database;"
        f"open_database({url!r}).close(); print('alembic' in sys.modules)"
    )
    seen = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [one.stdout.strip() for one in seen] == ["True", "False"]


WORDS: list[tuple[str, str, Iterable[StrEnum]]] = [
    ("runs", "state", RunState),
    ("attempts", "state", AttemptState),
    ("attempts", "cause", Cause),
    ("checkpoints", "state", CheckpointState),
    ("attempt_nodes", "fault", Cause),
    ("checkpoint_edges", "kind", STORED_EDGES),
]


def test_the_check_constraints_match_the_enums(url: str) -> None:
    upgrade(url)
    with connect_for_migration(url) as connection:
        found = {
            (table, str(check["name"])): str(check["sqltext"])
            for table in inspect(connection).get_table_names()
            for check in inspect(connection).get_check_constraints(table)
        }
    for table, column, words in WORDS:
        allowed = found[(table, f"ck_{table}_{column}")].split("'")[1::2]
        assert sorted(allowed) == sorted(words), f"{table}.{column} needs a migration"


def test_an_unknown_state_is_refused_by_the_database(url: str) -> None:
    upgrade(url)
    with open_database(url) as database:
        row = "'u', 'r', 'r', '/', '/r', 'asleep', '{}', 'd', 1.0, '', 1.0, '{}', ''"
        columns = (
            "uid, run, name, root, directory, state, spec, spec_digest, created_at, "
            "created_by, updated_at, goodput, fingerprint"
        )
        with pytest.raises(LineageError, match="ck_runs_state"), database.writing() as connection:
            connection.execute(text(f"INSERT INTO runs ({columns}) VALUES ({row})"))


def test_concurrent_first_uses_create_the_sqlite_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'down' / 'index.db'}"
    failures: list[BaseException] = []

    def use() -> None:
        try:
            with open_database(url) as database, database.writing() as connection:
                connection.execute(text("DELETE FROM runs"))
        except LineageError as error:
            failures.append(error)

    people = [threading.Thread(target=use) for _ in range(PEOPLE_AT_ONCE)]
    for one in people:
        one.start()
    for one in people:
        one.join(60)
    assert failures == []
    with open_database(url) as database, database.reading() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1


def test_postgresql_is_upgraded_by_the_command_only(postgres: PostgresServer) -> None:
    with postgres.database() as url:
        with pytest.raises(LineageError, match="holdfast db upgrade"):
            open_database(url)
        upgrade(url)
        with open_database(url.replace("postgresql://", "postgres://")) as database:
            assert database.is_postgresql


def test_a_newer_schema_is_refused(url: str) -> None:
    upgrade(url)
    with connect_for_migration(url) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(text("UPDATE compatibility SET oldest = '9999'"))
        connection.commit()
    with pytest.raises(LineageError, match="newer than this Holdfast"):
        open_database(url)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mysql://me@there/x", "expected sqlite"),
        ("not a url", "expected sqlite"),
        ("sqlite://", "expected sqlite"),
        (
            "postgresql://me:secret@127.0.0.1:9/x?connect_timeout=2",
            "check that the server is running",
        ),
        ("sqlite:////proc/nowhere/index.db", "cannot be created"),
    ],
)
def test_the_error_for_an_unusable_database_says_what_to_do(given: str, words: str) -> None:
    with pytest.raises(LineageError, match=words) as caught:
        open_database(given)
    assert "HOLDFAST_DATABASE_URL" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_a_database_is_kept_and_reindex_suggested(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(LineageError, match="holdfast reindex"):
        open_database(f"sqlite:///{path}")
    assert path.read_bytes().startswith(b"something else"), "the file was overwritten"


def test_the_default_database_is_in_the_holdfast_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert database_url() == f"sqlite:///{tmp_path}/holdfast.db"
    open_database().close()
    assert create_engine(database_url()).url.database == f"{tmp_path}/holdfast.db"
    assert (tmp_path / "holdfast.db").is_file()
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", "postgresql://team/holdfast")
    assert database_url() == "postgresql://team/holdfast"


def test_sqlite_on_a_network_file_system_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("22 1 0:7 / / rw,relatime shared:1 - lustre mds@tcp:/x rw\n")
    monkeypatch.setattr(filesystems, "MOUNTS", table)
    with pytest.raises(LineageError, match=r"is on a network file system \(lustre\).*PostgreSQL"):
        open_database(f"sqlite:///{tmp_path / 'index.db'}")
    assert not (tmp_path / "index.db").exists()


def test_the_migrations_are_found() -> None:
    """In a wheel they are in the package: tests/process/test_install_forms.py."""
    assert (MIGRATIONS / "env.py").is_file()
    assert MIGRATIONS.name == "alembic"
    assert not (MIGRATIONS / "__init__.py").exists(), (
        "a package here would hide the alembic library"
    )


@pytest.mark.parametrize("before", ["nothing", "empty", "current"])
def test_a_submission_needs_no_sqlalchemy_to_check_a_usable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    if before == "empty":
        home.mkdir()
        (home / "holdfast.db").touch()
    if before == "current":
        open_database().close()
    program = (
        "import sys; from holdfast.lineage.database.sqlite_file import is_ready; "
        "print(is_ready(), 'sqlalchemy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "False"], done
    if before != "empty":
        assert (home / "holdfast.db").stat().st_mode & 0o777 == 0o600
    open_database().close()


@pytest.mark.parametrize("case", ["older", "foreign", "no database", "relative", "server"])
def test_what_the_quick_check_does_not_know_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path = tmp_path / "holdfast.db"
    url = f"sqlite:///{path}"
    if case == "older":
        upgrade(url, known_revisions()[-2])
    elif case == "foreign":
        with sqlite3.connect(path) as file:
            file.execute("CREATE TABLE songs (name)")
    elif case == "no database":
        path.write_text("these are words\n" * 100)
    elif case == "relative":
        url = "sqlite:///holdfast.db"
    else:
        url = "postgresql://team@127.0.0.1:1/holdfast"
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", url)
    assert not sqlite_file.is_ready()
