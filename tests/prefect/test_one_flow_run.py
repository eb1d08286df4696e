"""One run has one flow run, however many commands start a supervisor before a worker polls."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from examples.demo_service import POOL, PrefectService
from prefect.settings import PREFECT_API_URL, temporary_settings
from tests.support.flow_runs import FlowRuns, service_environment

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_history
from holdfast.flows import deployments, start

pytestmark = pytest.mark.slow
COMMANDS = 3


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectService]:
    """A real server with the deployments, and no worker."""
    folder = tmp_path_factory.mktemp("prefect")
    made = PrefectService(folder, service_environment(folder))
    with made.serving():
        made.command("holdfast", "deploy")
        yield made


@pytest.fixture
def submitted(service: PrefectService, tmp_path: Path, request: Any) -> Iterator[Submitted]:
    runs = FlowRuns(service, tmp_path)
    name = request.node.name[-20:].replace("_", "-").strip("-")
    service.command("holdfast", "submit", str(runs.write_spec(name, {"steps": 5})))
    yield Submitted(runs, name)
    service.command("holdfast", "cancel", name, "--force", check=False)
    runs.end_all()


class Submitted:
    """A run whose flow run waits for a worker."""

    def __init__(self, runs: FlowRuns, name: str) -> None:
        self.runs, self.name = runs, name
        self.uid = load_history(RunPaths(runs.root / name)).record.uid

    def flow_runs(self) -> list[dict[str, Any]]:
        """The flow runs of the run, oldest first."""
        found: list[dict[str, Any]] = self.runs.ask(
            "flow_runs/filter", flow_runs={"name": {"any_": [self.name]}}, limit=50
        )
        return sorted(found, key=lambda one: str(one["created"]))

    def set_state(self, flow_run: str, kind: str, **details: Any) -> None:
        state = {"type": kind, "state_details": details}
        self.runs.ask(f"flow_runs/{flow_run}/set_state", state=state, force=True)

    def supervise(self) -> subprocess.CompletedProcess[str]:
        return self.runs.service.command("holdfast", "supervise", "--all")


def test_submit_and_later_supervise(submitted: Submitted) -> None:
    (before,) = submitted.flow_runs()
    said = [submitted.supervise().stdout for _ in range(2)]
    assert [one["id"] for one in submitted.flow_runs()] == [before["id"]]
    assert all(f"flow run {before['id']} will supervise it" in one for one in said)


def test_commands_at_once(submitted: Submitted) -> None:
    (first,) = submitted.flow_runs()
    submitted.set_state(first["id"], "CRASHED")
    with ThreadPoolExecutor(COMMANDS) as pool:
        list(pool.map(lambda _: submitted.supervise(), range(COMMANDS)))
    assert len(submitted.flow_runs()) == 2, "the crashed one, and one more"


@pytest.fixture
def here(service: PrefectService) -> Iterator[None]:
    """This process uses the server, as the command does."""
    with temporary_settings({PREFECT_API_URL: service.environment["PREFECT_API_URL"]}):
        yield


@pytest.mark.usefixtures("here")
def test_late_ended_and_lost(submitted: Submitted, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(submitted.runs.root / submitted.name)
    (first,) = submitted.flow_runs()
    submitted.runs.ask(
        f"flow_runs/{first['id']}/set_state",
        state={"type": "SCHEDULED", "name": "Late", "state_details": {}},
        force=True,
    )
    assert start.start_flow(paths).flow_run == first["id"]
    submitted.set_state(first["id"], "PENDING")
    assert start.start_flow(paths).flow_run == first["id"], "its process may be starting"
    monkeypatch.setattr(deployments, "START_S_MAX", -10.0)
    second = start.start_flow(paths)
    assert (second.flow_run != first["id"], second.is_new) == (True, True)
    submitted.set_state(str(second.flow_run), "PAUSED", pause_reschedule=True)
    assert start.start_flow(paths).flow_run == second.flow_run
    states = [one["state_type"] for one in submitted.flow_runs()]
    assert states == ["PENDING", "SCHEDULED"], "the suspended one was resumed"
    submitted.set_state(str(second.flow_run), "CANCELLED")
    assert start.start_flow(paths).is_new
    assert len(submitted.flow_runs()) == 3


def test_doctor_names_the_command_that_starts_a_worker(service: PrefectService) -> None:
    def check() -> dict[str, Any]:
        said = service.command("holdfast", "doctor", "--json", check=False).stdout
        (found,) = [one for one in json.loads(said)["checks"] if one["name"] == "prefect"]
        return dict(found)

    before = check()
    assert before["level"] == "warn"
    assert before["detail"].endswith(" 0 worker(s)")
    assert before["next_step"] == f"prefect worker start --pool {POOL}"
    with service.working():
        assert check()["level"] == "ok"
