"""A real Prefect server with all deployments and a worker, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo_service import PrefectService
from tests.flow_runs import FlowRuns, service_environment


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectService]:
    folder: Path = tmp_path_factory.mktemp("prefect")
    made = PrefectService(folder, service_environment(folder))
    with made.serving():
        made.command("holdfast", "deploy")
        with made.working():
            yield made


@pytest.fixture
def runs(service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(service, tmp_path)
    yield made
    made.end_all()
