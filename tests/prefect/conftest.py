"""A real Prefect server with all deployments and a worker, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import FlowRuns, deployed_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectService]:
    with deployed_service(tmp_path_factory.mktemp("prefect")) as made:
        yield made


@pytest.fixture
def runs(service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(service, tmp_path)
    yield made
    made.end_all()
