"""Fixtures that process tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import deployed_service
from tests.support.object_store import ObjectStore, Proxy, object_store

from holdfast.lineage.index import Index


@pytest.fixture(scope="module")
def prefect_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectService]:
    """A real Prefect server with the deployment and a process worker, for the tests of a module."""
    with deployed_service(tmp_path_factory.mktemp("prefect")) as service:
        yield service


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A separate SQLite index."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    with Index() as made:
        yield made


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def proxy(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(s3.port)
    for name, value in s3.environment(made.port).items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()
