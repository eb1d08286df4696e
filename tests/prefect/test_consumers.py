"""Consumers that are deployments of Prefect: flow runs, endings, adoption and cancellation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from examples.demo_service import POOL, PrefectService
from tests.support.flow_runs import FlowRuns
from tests.unit import test_consumers as local
from tests.unit.test_consumers import World, name_of

from holdfast.contracts.errors import ServiceError
from holdfast.contracts.records.consumers import ConsumerState
from holdfast.contracts.records.documents import Claim, read_document
from holdfast.flows.consumer_flow_run import TAG, parameters_for
from holdfast.workers.checkpoints import consumers
from holdfast.workers.decisions import consumers as decisions

FLOW = """
import json, os, time
from prefect import flow

@flow
def evaluate(checkpoint: str, checkpoint_path: str, metrics_file: str, folder: str = ""):
    assert checkpoint.startswith("kelp:step-")
    step = json.load(open(checkpoint_path + "/manifest.json"))["step"]
    if step == 20:
        raise RuntimeError("no data")
    open(os.path.join(folder, f"began-{step}"), "a").write("x")
    while step >= 30 and not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.1)
    json.dump({"accuracy": step / 100}, open(metrics_file, "w"))
"""
DEPLOY = """
import sys
from prefect import flow

flow.from_source(source=sys.argv[1], entrypoint="eval_flow.py:evaluate").deploy(
    name="nightly", work_pool_name=sys.argv[2]
)
"""
DEPLOYMENT = "evaluate/nightly"


@pytest.fixture(scope="module")
def deployed(service: PrefectService, tmp_path_factory: pytest.TempPathFactory) -> PrefectService:
    folder = tmp_path_factory.mktemp("flow")
    (folder / "eval_flow.py").write_text(FLOW)
    service.command("python", "-c", DEPLOY, str(folder), POOL)
    return service


@pytest.fixture(autouse=True)
def _service_here(deployed: PrefectService, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in deployed.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(decisions, "RETRY_S", 0.1)
    monkeypatch.setattr(consumers, "OUTCOME_S", 0.5)
    monkeypatch.setattr(local, "WAIT_S", 400.0)


def world_in(folder: Path, **more: Any) -> World:
    one = {"deployment": DEPLOYMENT, "parameters": {"folder": str(folder)}, "timeout_min": 10}
    return World(folder, {**one, "retries": 1, **more})


def flow_runs(runs: FlowRuns, step: int) -> list[dict[str, Any]]:
    """The flow runs of a consumer of the checkpoint of this step."""
    tag = f"{TAG}{'a' * 32}-eval-{name_of(step)}"
    found: list[dict[str, Any]] = runs.ask("flow_runs/filter", flow_runs={"tags": {"all_": [tag]}})
    return found


def test_a_flow_gets_the_parameters_that_it_has() -> None:
    offered = {"checkpoint": "a:b", "checkpoint_path": "/c", "checkpoint_step": 1}
    schema: dict[str, Any] = {"properties": {"checkpoint": {}, "checkpoint_step": {}, "mode": {}}}
    given = parameters_for(schema, {"mode": "fast"}, offered)
    assert given == {"checkpoint": "a:b", "checkpoint_step": 1, "mode": "fast"}
    # Only a run of an earlier version can have recorded such a parameter.
    assert parameters_for(schema, {"checkpoint": "other"}, offered)["checkpoint"] == "a:b"
    with pytest.raises(ServiceError, match="has the parameters mode; expected checkpoint or"):
        parameters_for({"properties": {"mode": {}}}, {}, offered)


@pytest.mark.more
def test_a_deployment_reports_metrics_and_its_failure_is_tried_again(
    runs: FlowRuns, tmp_path: Path
) -> None:
    world = world_in(tmp_path)
    world.commit(10, 20)
    found = world.finish()
    assert (found[10].state, found[20].state) == (ConsumerState.DONE, ConsumerState.GIVEN_UP)
    assert world.metrics() == {name_of(10): {"accuracy": 0.1}}
    assert found[20].tries == 2
    assert "is Failed" in found[20].reason
    assert "no data" in found[20].reason
    assert [len(flow_runs(runs, step)) for step in (10, 20)] == [1, 2]


@pytest.mark.more
def test_a_new_start_adopts_the_flow_run_of_a_killed_one(runs: FlowRuns, tmp_path: Path) -> None:
    world = world_in(tmp_path)
    world.commit(30)
    world.tend()
    world.until(lambda: (tmp_path / "began-30").exists())
    claim = read_document(Claim, world.paths.consumer(1).claim)
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    world.until(lambda: world.uses()[30].tries == 2)
    world.until(lambda: "flow run" in _log(world, 2))
    (tmp_path / "go").touch()
    assert world.finish()[30].state is ConsumerState.DONE
    assert (tmp_path / "began-30").read_text() == "x"
    assert len(flow_runs(runs, 30)) == 1


@pytest.mark.more
def test_the_time_limit_cancels_the_flow_run(runs: FlowRuns, tmp_path: Path) -> None:
    world = world_in(tmp_path, retries=0, timeout_min=1.5)
    world.commit(40)
    last = world.finish()[40]
    assert last.state is ConsumerState.GIVEN_UP
    assert last.reason == "killed after 90 s, its time limit"
    (made,) = flow_runs(runs, 40)
    world.until(lambda: flow_runs(runs, 40)[0]["state_type"] in {"CANCELLING", "CANCELLED"})
    assert made["name"] == "kelp-eval-40"


@pytest.mark.more
def test_a_deployment_that_does_not_exist_is_named(tmp_path: Path) -> None:
    world = world_in(tmp_path, retries=0, deployment="evaluate/missing")
    world.commit(50)
    assert "no deployment evaluate/missing" in world.finish()[50].reason


def _log(world: World, start: int) -> str:
    log = world.paths.consumer(start).log
    return log.read_text() if log.exists() else ""
