"""Fixtures: a real server on a free port, in a thread, with a real database and sample runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.support.runs import RunFolder, build_sample_runs

from holdfast.api.app import create_app
from holdfast.api.connections import CONNECTIONS_MAX, limited_protocol
from holdfast.api.hub import Hub
from holdfast.api.security import AccessPolicy
from holdfast.api.services import Services, Start
from holdfast.api.store import IndexStore
from holdfast.api.tokens import Role, TokenStore
from holdfast.api.watch import Watch
from holdfast.cli.serve import begin_fork, check_secrets, start_run
from holdfast.lineage.index import Index

WAIT_S = 60.0
LOOPBACK = AccessPolicy()


@dataclass
class Served:
    """A server that answers at `url`; `runs` holds the sample run and its fork, by name."""

    url: str
    home: Path
    root: Path
    services: Services
    runs: dict[str, RunFolder]
    token: str

    def client(self, **headers: str) -> httpx.Client:
        """A client with an operator's token."""
        return self.stranger(**{"Authorization": f"Bearer {self.token}", **headers})

    def stranger(self, **headers: str) -> httpx.Client:
        """A client without a token."""
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S)


def get(api: httpx.Client, path: str) -> Any:
    """The answer of the API to a GET of `path`."""
    answer = api.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextlib.contextmanager
def serving(
    home: Path,
    runs: dict[str, RunFolder],
    access_policy: AccessPolicy = LOOPBACK,
    start: Start = start_run,
    **options: Any,
) -> Iterator[Served]:
    """Serve `home/runs`; `options` go to uvicorn."""
    root = home / "runs"
    store, hub = IndexStore(Index()), Hub()
    services = Services(
        store=store,
        watch=Watch(store, hub, (root,)),
        hub=hub,
        access_policy=access_policy,
        tokens=TokenStore(home / "tokens.json"),
        roots=(root,),
        start=start,
        fork=begin_fork,
        check=check_secrets,
    )
    _, token = services.tokens.issue("ann", Role.OPERATOR)
    app = create_app(services)
    config = uvicorn.Config(
        app,
        port=0,
        log_level="error",
        timeout_graceful_shutdown=1,
        **{"proxy_headers": False, "http": limited_protocol(CONNECTIONS_MAX), **options},
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        served = Served(f"http://127.0.0.1:{port}", home, root, services, runs, token)
        # They come into the index one by one.
        wait_for(lambda: sum(store.count_runs().values()) >= max(1, len(runs)))
        yield served
    finally:
        server.should_exit = True
        thread.join(WAIT_S)


def wait_for(condition: Callable[[], object], seconds: float = WAIT_S) -> None:
    """Wait until `condition()` holds, for `seconds` at most."""
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, f"the condition did not hold within {seconds:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch) -> Path:
    """Holdfast's home directory for the tests of one module; the root is `home/runs`."""
    folder = tmp_path_factory.mktemp("home")
    patched.setenv("HOLDFAST_HOME", str(folder))
    patched.setenv("HOLDFAST_ROOT", str(folder / "runs"))
    patched.delenv("HOLDFAST_DATABASE_URL", raising=False)
    patched.delenv("PREFECT_API_URL", raising=False)
    return folder


@pytest.fixture(scope="module")
def sample_runs(home: Path) -> dict[str, RunFolder]:
    """The sample run and its fork; the fork is live on a machine that cannot be reached."""
    (home / "runs").mkdir()
    return {run.name: run for run in build_sample_runs(home / "runs")}


@pytest.fixture(scope="module")
def served(home: Path, sample_runs: dict[str, RunFolder]) -> Iterator[Served]:
    """A server as `holdfast serve` starts it by default: on loopback, with its own token."""
    with serving(home, sample_runs) as one:
        yield one
