"""A shared index: what an account may not read on disk, no command and no server shows it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import text
from tests.api.conftest import serving
from tests.process.test_lineage_plans import collect, full_scans, questions
from tests.support.other_users import STRANGER, as_user
from tests.support.postgres import PostgresServer
from tests.support.runs import T0, RunFolder, build_sample_runs
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError
from holdfast.lineage.database import permissions
from holdfast.lineage.database.permissions import Account
from holdfast.lineage.database.schema_changes import downgrade, upgrade
from holdfast.lineage.database.sqlite_file import URL_VARIABLE
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.reasons import NOTHING_KEEPS
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import pages, run_queries

ANN: Final = 4301
GROUP: Final = 4401
# Only the private run has these words, apart from its name.
MARK: Final = "markedprogram.py"
NODE: Final = "markednode"
UID: Final = "c" * 32
CHECKPOINT: Final = "step-00000150.a0001.l01"


class Shared:
    """A root and an index of several accounts. `private` is Ann's, forked from the public `gpt`."""

    def __init__(self, place: Path, url: str) -> None:
        self.place, self.url, self.root = place, url, place / "runs"
        self.root.mkdir()
        self.root.chmod(0o1777)
        for _ in build_sample_runs(self.root):
            pass
        self.private = self.add("hidden", UID)
        self.ingest()

    def add(self, name: str, uid: str) -> RunFolder:
        origin = "step-00000100.a0001.l01"
        run = RunFolder(
            self.root,
            name,
            uid,
            {"environment": {"MARK": MARK}},
            forked_from=f"gpt:{origin}",
            forked_uid="a" * 32,
        )
        run.submit(1, 2, T0)
        run.claim(1, T0 + 10, host=NODE)
        run.launch(1, 1, 100, f"gpt:{origin}")
        run.commit(150, 1, parent=f"gpt:{origin}", at=T0 + 20)
        for path in (run.paths.directory, *run.paths.directory.rglob("*")):
            os.chown(path, ANN, ANN)
        run.paths.directory.chmod(0o700)
        return run

    def ingest(self) -> None:
        """Root reads every folder."""
        with open_database(self.url) as database:
            assert reindex(database, self.root).ok
        for path in self.place.glob("index.db*"):
            path.chmod(0o666)

    def names(self, uid: int, *groups: int) -> str:
        """The runs that an account sees."""
        return self.ask(uid, lambda database: sorted(map(name_of, listed(database))), groups)

    def ask(
        self, uid: int, work: Callable[[Database], object], groups: tuple[int, ...] = ()
    ) -> str:
        def opened() -> object:
            with open_database(self.url) as database:
                return work(database)

        return as_user(uid, opened, groups)


def listed(database: Database) -> list[dict[str, object]]:
    return [dict(row) for row in pages.list_runs(database).items]


def name_of(row: dict[str, object]) -> str:
    return str(row["run"])


PUBLIC: Final = "['gpt', 'gpt-b']"
ALL: Final = "['gpt', 'gpt-b', 'hidden']"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.more)])
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    try:
        if request.param == "sqlite":
            yield Shared(place, f"sqlite:///{place / 'index.db'}")
            return
        server: PostgresServer = request.getfixturevalue("postgres")
        with server.database() as url:
            upgrade(url)
            yield Shared(place, url)
    finally:
        shutil.rmtree(place)


def test_only_who_may_read_a_folder_sees_its_run(shared: Shared) -> None:
    assert shared.names(STRANGER) == PUBLIC
    assert shared.names(ANN) == ALL
    with open_database(shared.url) as database:
        assert {row["run"] for row in listed(database)} == {"gpt", "gpt-b", "hidden"}
    found = shared.ask(STRANGER, lambda database: run_queries.find_run(database, "hidden"))
    assert found.startswith("NotFoundError: hidden: no such run; `holdfast runs`")
    near = shared.ask(STRANGER, lambda database: run_queries.find_run(database, "hiden"))
    assert "did you mean" not in near


def test_a_group_sees_the_runs_that_it_may_read(shared: Shared) -> None:
    os.chown(shared.private.paths.directory, ANN, GROUP)
    shared.private.paths.directory.chmod(0o750)
    shared.ingest()
    assert shared.names(STRANGER, GROUP) == ALL
    assert shared.names(STRANGER) == PUBLIC


def test_a_changed_mode_counts_without_an_ingest(shared: Shared) -> None:
    folder, other = shared.private.paths.directory, shared.root / "gpt-b"
    folder.chmod(0o755)
    other.chmod(0o700)
    assert shared.names(STRANGER) == "['gpt', 'hidden']"
    assert "NotFoundError" in shared.ask(STRANGER, lambda one: run_queries.show_run(one, "gpt-b"))
    folder.chmod(0o700)
    other.chmod(0o755)
    assert shared.names(STRANGER) == PUBLIC
    # Also on the way to it, and below it.
    shared.root.chmod(0o700)
    assert shared.names(STRANGER) == "[]"
    shared.root.chmod(0o1777)
    (other / "journal").chmod(0o700)
    assert shared.names(STRANGER) == "['gpt']"


def test_a_process_that_asked_before_hides_a_new_private_run(shared: Shared) -> None:
    """A new row is judged by itself at once. The disk is asked again after a while."""
    asked, change = os.pipe(), os.pipe()

    def watch(database: Database) -> str:
        permissions.AGAIN_S = 1.0  # type: ignore[misc]
        assert sorted(map(name_of, listed(database))) == ["gpt", "gpt-b"]
        os.write(asked[1], b".")
        os.read(change[0], 1)
        assert "later" not in map(name_of, listed(database))
        for _ in range(600):
            if sorted(map(name_of, listed(database))) == ["gpt"]:
                return "asked again"
            time.sleep(0.1)
        return "still shown"

    child = os.fork()
    if child == 0:
        try:
            os.read(asked[0], 1)
            shared.add("later", "d" * 32)
            shared.ingest()
            (shared.root / "gpt-b").chmod(0o700)
        finally:
            os.write(change[1], b".")
            os._exit(0)
    said = shared.ask(STRANGER, watch)
    os.waitpid(child, 0)
    assert said == "asked again"


def test_rows_of_a_deleted_folder_stay_private(shared: Shared) -> None:
    folder = shared.private.paths.directory
    shutil.rmtree(folder)
    shutil.rmtree(shared.root / "gpt-b")
    assert shared.names(STRANGER) == PUBLIC
    assert shared.names(ANN) == ALL
    # A folder of another account in its place gives nothing away.
    as_user(STRANGER, lambda: (folder / "journal").mkdir(parents=True))
    as_user(STRANGER, lambda: (folder / "spec.json").write_text("{}"))
    assert folder.stat().st_uid == STRANGER
    assert shared.names(5000) == PUBLIC


def test_rows_from_before_are_hidden_until_they_are_read_again(shared: Shared) -> None:
    with open_database(shared.url) as database, database.writing() as connection:
        gone = "SET owner_uid = NULL, reader_gid = NULL, is_public = false, fingerprint = '5:0'"
        connection.execute(text(f"UPDATE runs {gone}"))
    shutil.rmtree(shared.root / "gpt-b")
    assert shared.names(STRANGER) == "[]"

    def read(database: Database) -> list[str]:
        ingest_run(database, RunPaths(shared.root / "gpt"))
        permissions._ASKED.clear()
        return [name_of(row) for row in listed(database)]

    assert shared.ask(STRANGER, read) == "['gpt']"


def test_revision_can_be_removed_and_added_again(shared: Shared) -> None:
    downgrade(shared.url, "0001")
    upgrade(shared.url)
    assert shared.names(STRANGER) == "[]"
    shared.ingest()
    assert shared.names(STRANGER) == PUBLIC


def test_reindex_keeps_the_rows_of_folders_that_it_may_not_enter(shared: Shared) -> None:
    (shared.root / ".holdfast-root").chmod(0o644)
    said = shared.ask(STRANGER, lambda database: reindex(database, shared.root).removed)
    assert said == "[]"
    assert shared.names(ANN) == ALL


def test_lineage_shows_no_private_run(shared: Shared) -> None:
    """Neither the fork of a public run nor the public fork of a private run shows it."""
    parent = f"hidden:{CHECKPOINT}"
    fork = RunFolder(shared.root, "open", "e" * 32, forked_from=parent, forked_uid=UID)
    fork.submit(1, 2, T0)
    fork.launch(1, 1, 150, parent)
    own = fork.commit(200, 1, parent=parent, at=T0 + 50)
    shared.ingest()

    def everything(database: Database) -> list[object]:
        return [
            [one["id"] for one in run_queries.ancestry(database, f"open:{own}")],
            run_queries.lineage_graph(database, "gpt"),
            pages.list_checkpoints(database, "gpt").items,
        ]

    seen = shared.ask(STRANGER, everything)
    assert f"open:{own}" in seen
    assert "hidden" not in seen
    assert "in use as the parent of a run that you may not read" in seen
    assert NOTHING_KEEPS not in seen
    ann = shared.ask(ANN, everything)
    assert f"hidden:{CHECKPOINT}" in ann
    assert "in use as the parent of run hidden" in ann
    # What its own folder says stays, as a bare name.
    graph = shared.ask(STRANGER, lambda one: run_queries.lineage_graph(one, "open")["nodes"])
    assert f"{{'id': '{parent}', 'kind': 'checkpoint', 'run': 'hidden'}}" in graph


@pytest.mark.parametrize("shared", ["postgresql"], indirect=True)
def test_no_route_and_no_command_shows_a_private_run(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shared.place / "home"
    home.mkdir()
    os.chown(home, STRANGER, STRANGER)
    (home / "runs").symlink_to(shared.root)
    monkeypatch.setenv(URL_VARIABLE, shared.url)
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    monkeypatch.setenv("HOLDFAST_ROOT", str(shared.root))

    def routes() -> str:
        with serving(home, {}) as served, served.client() as client:
            for path, operations in client.get("/api/v1/openapi.json").json()["paths"].items():
                if "get" not in operations or path == "/api/v1/events":
                    continue
                target = filled(path)
                answer = client.get(target, params=needed(path), timeout=20)
                for mark in (UID, MARK):
                    assert mark not in answer.text, target
                # A question about the machine repeats its name.
                # An error repeats the name that was asked for.
                told = answer.text.replace(f'"host":"{NODE}","faults":[]', "").replace(
                    f"'{NODE}': no attempt ran", ""
                )
                assert NODE not in told, target
                if "{run}" in path or "{checkpoint}" in path:
                    assert answer.status_code == 404, (target, answer.text)
                else:
                    assert '"hidden"' not in answer.text, target
            counts = client.get("/metrics").text
            assert 'holdfast_runs{state="running"}' in counts
            return str(client.get("/api/v1/goodput").json()["runs"])

    assert as_user(STRANGER, routes) == "2"

    def commands() -> str:
        said = ""
        for words in (["runs"], ["runs", "--json"], ["show", "gpt"], ["lineage", "gpt", "--json"]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output
            said += done.output
        for words in (["show", "hidden"], ["checkpoints", "hidden"], ["events", "hidden"]):
            done = CliRunner().invoke(app, words)
            assert isinstance(done.exception, NotFoundError), done.output
        return said

    said = as_user(STRANGER, commands)
    assert "gpt" in said
    assert "hidden" not in said
    assert UID not in said


def filled(path: str) -> str:
    """A route's path for the private run."""
    values = {
        "run": "hidden",
        "checkpoint": f"hidden:{CHECKPOINT}",
        "host": NODE,
        "rank": "0",
        "job": "x",
    }
    return path.format(**values)


def needed(path: str) -> dict[str, str]:
    own, other = f"hidden:{CHECKPOINT}", "gpt:step-00000100.a0001.l01"
    if path.endswith(("/log-files/part", "/log-files/download")):
        return {"file": "flow.log"}
    if path.endswith("/log-files/search"):
        return {"text": "x"}
    return {"a": own, "b": other} if path.endswith("/compare") else {}


@pytest.mark.parametrize("shared", ["sqlite", "postgresql"], indirect=True)
def test_statements_of_an_ordinary_account_use_an_index(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared.root / "gpt-b").chmod(0o700)
    shared.private.paths.directory.chmod(0o755)
    account = Account(STRANGER, frozenset([STRANGER]), is_root=False)
    monkeypatch.setattr(Account, "current", classmethod(lambda _: account))
    hidden, shown = [UID] * 3, [UID] * 2
    asked = permissions._Asked(account, float("inf"), hidden, shown)
    with open_database(shared.url) as database:
        permissions._ASKED[database.engine] = asked
        asks = questions(database, shared.root)
        with database.reading() as connection:
            assert len(list(permissions._others(connection, account))) == 3
        asks.append(lambda: others(database, account))
        bad = {
            said[0]: scans
            for ask in asks
            for said in collect(database, ask)
            if (scans := full_scans(database, said))
        }
    assert not bad, "\n\n".join(f"{scans}\n{statement}" for statement, scans in bad.items())


def others(database: Database, account: Account) -> None:
    with database.reading() as connection:
        list(permissions._others(connection, account))


def test_mode_of_a_run_is_a_part_of_its_fingerprint(shared: Shared) -> None:
    """So that an ordinary ingest writes a changed mode into the row."""
    folder = shared.private.paths.directory
    folder.chmod(0o755)
    with open_database(shared.url) as database:
        ingest_run(database, shared.private.paths)
        with database.reading() as connection:
            query = text("SELECT owner_uid, reader_gid, is_public FROM runs WHERE run = 'hidden'")
            assert [*connection.execute(query).one()] == [ANN, None, True]
            assert stat.S_IMODE(folder.stat().st_mode) == 0o755
