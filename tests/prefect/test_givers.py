"""Who an order through Prefect is recorded of: what Prefect knows, and the name that was given."""

from __future__ import annotations

import re
from typing import Any

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import FlowRuns, wait_for
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events

UID = "e" * 32


@pytest.fixture
def paused(service: PrefectService, runs: FlowRuns) -> RunPaths:
    """A run with a whole checkpoint. No flow supervises it."""
    run = RunFolder(runs.root, "made", UID)
    if not run.paths.attempt(1).directory.exists():
        run.submit(1, 2, T0)
        run.claim(1, T0 + 10)
        run.commit(50, 1, at=T0 + 60)
    return run.paths


def run_deployment(runs: FlowRuns, name: str, **parameters: Any) -> dict[str, Any]:
    """Run a deployment to its end; return the flow run."""
    deployment = runs.ask(f"deployments/name/{name}/holdfast")["id"]
    made = runs.ask(f"deployments/{deployment}/create_flow_run", parameters=parameters)
    place = f"flow_runs/{made['id']}"
    wait_for("the end", lambda: runs.ask(place)["state"]["type"] in {"COMPLETED", "FAILED"})
    ended: dict[str, Any] = runs.ask(place)
    return ended


def verifier(paths: RunPaths) -> str:
    found = [e.data["by"] for e in load_events(paths) if e.kind is EventKind.VERIFIED]
    return str(found[-1]) if found else ""


@pytest.mark.more
def test_order_names_the_flow_run_and_the_given_person(runs: FlowRuns, paused: RunPaths) -> None:
    made = run_deployment(runs, "verify", run="made")
    assert verifier(paused) == f"prefect flow run {made['name']}"
    made = run_deployment(runs, "verify", run="made", by="ann\x1b[31m\nbob")
    by = verifier(paused)
    assert by.startswith("ann")
    assert by.endswith(f"(prefect flow run {made['name']})")
    assert by.isprintable()


@pytest.mark.more
def test_order_of_a_schedule_says_so(
    runs: FlowRuns, service: PrefectService, paused: RunPaths
) -> None:
    deployment = runs.ask("deployments/name/verify/holdfast")["id"]
    schedule = {"interval": 5, "anchor_date": "2026-01-01T00:00:00Z"}
    runs.ask(
        f"deployments/{deployment}/schedules",
        {"active": True, "schedule": schedule, "parameters": {"run": "made"}},
    )
    former = verifier(paused)
    try:
        wait_for("a scheduled check", lambda: verifier(paused) != former, 120)
        assert re.fullmatch(r"prefect schedule, flow run [\w-]+", verifier(paused))
    finally:
        service.command("prefect", "deployment", "schedule", "clear", "verify/holdfast", "-y")


@pytest.mark.more
def test_cancellation_names_the_flow_run_and_its_message(
    runs: FlowRuns, service: PrefectService
) -> None:
    spec = runs.write_spec("cancelled-there", {"steps": 6000, "sleep_s": 0.1})
    paths = runs.deploy_run(spec)
    taken = wait_for("the supervisor", lambda: supervisor(paths))
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "ann: wrong data"}
    runs.ask(f"flow_runs/{taken}/set_state", state=state)
    wait_for("the order", lambda: orders(paths))
    (order,) = orders(paths)
    name = runs.ask(f"flow_runs/{taken}")["name"]
    facts = (order["action"], order["by"], order["reason"])
    assert facts == ("cancel", f"prefect flow run {name}", "ann: wrong data")
    runs.hurry()
    shown = runs.holdfast("show", "cancelled-there")
    assert shown["orders"][-1]["by"] == f"prefect flow run {name}"
    assert shown["created_by"].startswith("prefect flow run ")


def supervisor(paths: RunPaths) -> str:
    events = load_events(paths) if paths.spec.is_file() else []
    return next((e.data["flow_run"] for e in events if e.kind is EventKind.SUPERVISED), "")


def orders(paths: RunPaths) -> list[dict[str, Any]]:
    return [e.data for e in load_events(paths) if e.kind is EventKind.OPERATOR_REQUEST]
