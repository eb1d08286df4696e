"""Several clusters and several versions of Holdfast share one database."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.process.test_lineage_ingest import dump
from tests.support.postgres import PostgresServer
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.roots import ensure_root_id, read_root_id
from holdfast.contracts.errors import LineageError
from holdfast.lineage.database.schema import schema_problem
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest import disk, run_ingest
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import pages, run_queries


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.more)])
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


def test_roots_with_the_same_path_keep_separate_rows(url: str, tmp_path: Path) -> None:
    """Each cluster has its own folder at the same path; here two folders take turns there."""
    root, away = tmp_path / "scratch" / "runs", tmp_path / "away"
    away.mkdir()
    with open_database(url) as database:
        for letter in "ab":
            run = RunFolder(root, "gpt", letter * 32)
            other = RunFolder(root, f"only-{letter}", letter.upper() * 32)
            run.submit(1, 2, run.created_at)
            for one in (run, other):
                ingest_run(database, one.paths)
            root.rename(away / letter)
        for letter in "abab":
            (away / letter).rename(root)
            report = reindex(database, root)
            assert (report.removed, sorted(report.runs)) == ([], ["gpt", f"only-{letter}"])
            assert len(dump(database)["runs"]) == 4
            here = pages.list_runs(database, pages.RunFilter(root=root)).items
            assert {row["uid"] for row in here} == {letter * 32, letter.upper() * 32}
            assert run_queries.find_run(database, str(root / "gpt")).uid == letter * 32
            root.rename(away / letter)
        (away / "a").rename(root)
        shutil.rmtree(root / "only-a")
        assert reindex(database, root).removed == ["only-a"]
        assert len(dump(database)["runs"]) == 3


def test_root_id_is_created_once_and_foreign_content_is_ignored(tmp_path: Path) -> None:
    first = ensure_root_id(tmp_path)
    assert len(first) == 32
    assert ensure_root_id(tmp_path) == read_root_id(tmp_path) == first
    (tmp_path / ".holdfast-root").write_text("x" * 1000)
    assert read_root_id(tmp_path) == ensure_root_id(tmp_path) == ""
    (tmp_path / ".holdfast-root").unlink()
    (tmp_path / ".holdfast-root").symlink_to("/etc/passwd")
    assert ensure_root_id(tmp_path) == ""


def test_events_unknown_to_an_older_version_are_read_after_an_upgrade(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "runs", "gpt", "a" * 32)
    run.tell("flow", EventKind.NOTE, text="one")
    journal = run.paths.journal_of("flow")
    line = {"writer": "flow", "opening": 1, "sequence": 1, "time": 5.0, "kind": "teleported"}
    with open(journal, "a") as stream:
        stream.write(json.dumps({**line, "data": {"to": "mars"}}) + "\n")
    run.tell("flow", EventKind.NOTE, text="two")
    with open_database(url) as database:
        ingest_run(database, run.paths)
        assert dump(database)["runs"][0]["unknown_kinds"] == ["teleported"]
        kinds = [one["kind"] for one in pages.list_events(database, "gpt").items]
        assert sorted(kinds) == ["note", "note", "teleported"]
        read, _ = read_journal(journal)
        assert [type(event.kind) for event in read] == [EventKind, str, EventKind]
        before = dump(database)

        def is_current() -> bool:
            (row,) = dump(database)["runs"]
            seen = disk.survey(run.paths)
            return run_ingest._is_current(row["fingerprint"], row["unknown_kinds"], seen)

        # The same version keeps the rows; one that knows the kind reads the run again.
        ingest_run(database, run.paths)
        assert dump(database) == before
        known = type("Kinds", (), {"__iter__": lambda _: iter([*EventKind, "teleported"])})()
        monkeypatch.setattr(run_ingest, "EventKind", known)
        assert not is_current()
        monkeypatch.undo()

        # An older version keeps a newer one's rows; a newer one replaces an older one's.
        monkeypatch.setattr(disk, "INGEST_VERSION", disk.INGEST_VERSION - 1)
        assert is_current()
        monkeypatch.setattr(disk, "INGEST_VERSION", disk.INGEST_VERSION + 2)
        assert not is_current()


NEWER = (
    "ALTER TABLE runs ADD COLUMN colour TEXT DEFAULT 'blue' NOT NULL",
    "ALTER TABLE events ADD COLUMN weight BIGINT DEFAULT 0 NOT NULL",
    "CREATE TABLE planets (name TEXT PRIMARY KEY)",
    "UPDATE alembic_version SET version_num = '9000'",
)


@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_older_version_works_with_a_compatible_newer_schema(url: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs", "gpt", "a" * 32)
    for number in range(80):
        run.tell("flow", EventKind.NOTE, text=str(number))
    with open_database(url) as database, database.writing() as connection:
        for statement in NEWER:
            connection.execute(text(statement))
    assert schema_problem(url) is None
    with open_database(url) as database:
        ingest_run(database, run.paths)
        for number in range(80):
            run.tell("flow", EventKind.NOTE, text=str(number))
        ingest_run(database, run.paths)
        reindex(database, tmp_path / "runs")
        assert len(dump(database)["events"]) == 160
        with database.writing() as connection:
            connection.execute(text("UPDATE compatibility SET oldest = '9000'"))
    assert "newer than this Holdfast" in (schema_problem(url) or "")
    with pytest.raises(LineageError, match="newer"):
        open_database(url)
