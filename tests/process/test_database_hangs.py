"""A database that accepts connections and does not answer: every caller gets an error in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import text
from tests.api.conftest import serving, wait_for
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.runs import RunFolder, build_sample_runs
from tests.support.stalling_proxy import StallingProxy, stalling_proxy

from holdfast.contracts.errors import LineageError
from holdfast.lineage.database.limits import WRITES
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run

ANSWER_S_MAX: Final = 15.0
# More than the threads of the API server and the connections of its pool.
REQUESTS: Final = 60
# Starting Python and importing Holdfast on a busy machine.
START_S_MAX: Final = 5.0


@pytest.fixture
def proxied(postgres: PostgresServer) -> Iterator[tuple[str, StallingProxy]]:
    """The URL of an up-to-date database behind a proxy, and the proxy."""
    with postgres.database() as url, stalling_proxy(postgres.port) as proxy:
        upgrade(url)
        yield url.replace(f":{postgres.port}/", f":{proxy.port}/"), proxy
        # The database is dropped only after its connections have ended.
        proxy.close()


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, RunFolder]:
    (tmp_path / "runs").mkdir()
    return {run.name: run for run in build_sample_runs(tmp_path / "runs")}


@contextmanager
def in_time(limit_s: float = ANSWER_S_MAX) -> Iterator[None]:
    """Assert that the block takes at most `limit_s` seconds."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began <= limit_s


def count(database: Any) -> None:
    with database.reading() as connection:
        connection.execute(text("SELECT count(*) FROM runs"))


@pytest.mark.more
def test_a_pooled_and_a_new_connection_fail_in_time_and_recover(
    proxied: tuple[str, StallingProxy],
) -> None:
    url, proxy = proxied
    with open_database(url) as database:
        count(database)
        proxy.stall()
        with in_time(), pytest.raises(LineageError, match="did not answer"):
            count(database)
        with in_time(), pytest.raises(LineageError, match="next attempt"):
            open_database(url)
        proxy.flow()

        wait_for(lambda: _works(lambda: count(database)), 30)


@pytest.mark.more
def test_an_open_transaction_fails_in_time(
    proxied: tuple[str, StallingProxy], runs: dict[str, RunFolder]
) -> None:
    url, proxy = proxied
    with open_database(url) as database:
        for use in (database.reading, database.writing):
            proxy.flow()
            time.sleep(0.1)
            wait_for(lambda: _works(lambda: count(database)), 30)
            with in_time(), pytest.raises(LineageError), use() as connection:
                _stall_and_query(proxy, connection)


def _stall_and_query(proxy: StallingProxy, connection: Any) -> None:
    connection.execute(text("SELECT 1"))
    proxy.stall()
    connection.execute(text("SELECT 2"))


@pytest.mark.more
def test_ingest_and_reindex_fail_in_time(
    proxied: tuple[str, StallingProxy], runs: dict[str, RunFolder]
) -> None:
    url, proxy = proxied
    run = next(iter(runs.values()))
    with open_database(url, WRITES) as database:
        ingest_run(database, run.paths)
        proxy.stall()
        with in_time(), pytest.raises(LineageError):
            ingest_run(database, run.paths, fresh=True)
        with in_time(), pytest.raises(LineageError):
            reindex(database, run.root)


def test_a_stopped_server_is_an_error_in_time(tmp_path: Path) -> None:
    with postgres_server() as server, server.database() as url:
        upgrade(url)
        with open_database(url) as database:
            count(database)
            pids = [int(pid) for pid in _server_pids(server)]
            try:
                _signal_all(pids, signal.SIGSTOP)
                with in_time(), ThreadPoolExecutor() as pool:
                    failing = pool.submit(count, database), pool.submit(open_database, url)
                for call in failing:
                    with pytest.raises(LineageError):
                        call.result()
            finally:
                _signal_all(pids, signal.SIGCONT)
            wait_for(lambda: _works(lambda: count(database)), 30)
            assert len(pids) > 1


@pytest.mark.more
def test_long_writes_may_take_long_and_long_queries_end(
    proxied: tuple[str, StallingProxy],
) -> None:
    url, _ = proxied
    with open_database(url) as database:
        began = time.monotonic()
        with database.writing() as connection:
            connection.execute(text("SELECT pg_sleep(6)"))
        assert time.monotonic() - began >= 6, "a server that works on a write is waited for"
        refused = pytest.raises(LineageError, match="statement timeout")
        with in_time(), refused, database.reading() as connection:
            connection.execute(text("SELECT pg_sleep(40)"))
        count(database)


@pytest.mark.more
def test_a_held_lock_is_an_error_in_time(proxied: tuple[str, StallingProxy]) -> None:
    url, _ = proxied
    held = text("SELECT pg_advisory_xact_lock(1)")
    with open_database(url) as database, database.writing() as holder:
        holder.execute(held)
        refused = pytest.raises(LineageError, match="lock timeout")
        with in_time(), refused, database.writing() as connection:
            connection.execute(held)


@pytest.mark.more
def test_every_request_to_the_api_is_answered_in_time(
    proxied: tuple[str, StallingProxy],
    tmp_path: Path,
    runs: dict[str, RunFolder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, proxy = proxied
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", url)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    run = next(iter(runs))
    routes = [
        *("/healthz", "/api/v1/storage", "/api/v1/runs", f"/api/v1/runs/{run}", "/api/v1/goodput"),
        *(f"/api/v1/runs/{run}/checkpoints", "/api/v1/nodes", f"/api/v1/events?run={run}"),
    ]
    with serving(tmp_path, runs) as served, served.client() as client:
        proxy.stall()

        def ask(number: int) -> tuple[str, int, float, str]:
            route, began = routes[number % len(routes)], time.monotonic()
            answer = client.get(route)
            return route, answer.status_code, time.monotonic() - began, answer.text

        client.timeout = httpx.Timeout(60)
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(ask, range(REQUESTS)))
        late = [(route, took) for route, _, took, _ in answers if took > ANSWER_S_MAX]
        assert late == []
        assert {status for _, status, _, _ in answers} == {503}
        problems = [json.loads(body) for route, *_, body in answers if route != "/healthz"]
        assert {one["code"] for one in problems} == {"database_away"}
        assert all("answer" in one["message"] or "use" in one["message"] for one in problems)
        with in_time():
            assert "holdfast_index_up 0.0" in client.get("/metrics").text
        proxy.flow()
        wait_for(lambda: client.get("/api/v1/runs").status_code == 200, 30)
        wait_for(lambda: client.get("/healthz").status_code == 200, 30)


@pytest.mark.more
@pytest.mark.parametrize(
    "command",
    [
        ("runs",),
        ("show", "kelp"),
        ("checkpoints", "kelp"),
        ("reindex",),
        ("db", "current"),
        ("db", "upgrade"),
    ],
    ids=" ".join,
)
def test_a_command_ends_in_time(
    proxied: tuple[str, StallingProxy],
    tmp_path: Path,
    runs: dict[str, RunFolder],
    command: tuple[str, ...],
) -> None:
    url, proxy = proxied
    proxy.stall()
    environment = {
        **os.environ,
        "HOLDFAST_DATABASE_URL": url,
        "HOLDFAST_HOME": str(tmp_path),
        "HOLDFAST_ROOT": str(tmp_path / "runs"),
    }
    words = [next(iter(runs)) if word == "kelp" else word for word in command]
    with in_time(ANSWER_S_MAX + START_S_MAX):
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 4, done.stderr
    assert "HOLDFAST_DATABASE_URL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_locked_sqlite_index_is_an_error_in_time(
    tmp_path: Path, runs: dict[str, RunFolder]
) -> None:
    url = f"sqlite:///{tmp_path / 'index.db'}"
    with open_database(url) as database, closing(sqlite3.connect(tmp_path / "index.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with in_time(), pytest.raises(LineageError, match="locked"):
            ingest_run(database, next(iter(runs.values())).paths)
        with in_time():
            count(database)


def _works(use: Callable[[], object]) -> bool:
    try:
        use()
    except LineageError:
        return False
    return True


def _signal_all(pids: list[int], number: int) -> None:
    """A worker of the server may end at any time, and the others must continue all the same."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _server_pids(server: PostgresServer) -> list[str]:
    """The processes of a server: the one in `postmaster.pid`, and its children."""
    parent = (server.directory / "data" / "postmaster.pid").read_text().split()[0]
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *children]
