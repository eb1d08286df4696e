"""Prefect's scheduler works with the packages of this environment.

With Prefect 3.8 and SQLAlchemy 2.1, each of its rounds raises an error. Every request still works
then, so no other test would fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import service_environment

ROUND_S: Final = "2"
WAIT_S: Final = 60.0
# Prefect plans this many runs of a schedule ahead, or more.
PLANNED_MIN: Final = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrefectService]:
    names = ("LOOP_SECONDS", "RECENT_DEPLOYMENTS_LOOP_SECONDS")
    rounds = {f"PREFECT_SERVER_SERVICES_SCHEDULER_{name}": ROUND_S for name in names}
    service = PrefectService(tmp_path, service_environment(tmp_path) | rounds)
    with service.serving():
        yield service


def test_a_schedule_of_a_deployment_makes_flow_runs(server: PrefectService) -> None:
    flow = server._post("flows/", {"name": "nightly"})
    schedule: dict[str, Any] = {"active": True, "schedule": {"interval": 3600}}
    deployment = {"name": "nightly", "flow_id": flow["id"], "schedules": [schedule]}
    made = server._post("deployments/", deployment)
    ends_at, count = time.monotonic() + WAIT_S, 0
    asked = {"deployments": {"id": {"any_": [made["id"]]}}}
    while count < PLANNED_MIN and time.monotonic() < ends_at:
        time.sleep(0.5)
        count = server._post("flow_runs/count", asked)
    log = (server.folder / "server.log").read_text(errors="replace")
    assert count >= PLANNED_MIN, log[-4000:]
