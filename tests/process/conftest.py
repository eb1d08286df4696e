"""Fixtures that process tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo_service import PrefectService
from tests.object_store import ObjectStore, Proxy, object_store


@pytest.fixture(scope="module")
def prefect_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectService]:
    """A real Prefect server with the deployment and a process worker, for the tests of a module."""
    folder: Path = tmp_path_factory.mktemp("prefect")
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment.pop("HOLDFAST_DATABASE_URL", None)
    environment |= {"HOLDFAST_HOME": str(folder / "home"), "HOLDFAST_ROOT": str(folder / "runs")}
    service = PrefectService(folder, environment)
    with service.serving():
        service.command("holdfast", "deploy")
        with service.working():
            yield service


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
