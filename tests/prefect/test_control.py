"""Pause, resume, retry and cancel from Prefect and from the command, and what Prefect shows."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import Any

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import (
    FlowRuns,
    claim_of,
    state_of,
    step_of,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events, load_history
from holdfast.contracts.states import Cause

# Prefect, Holdfast and the job agree within this time.
AGREE_S = 15.0


def begin(runs: FlowRuns, name: str, **more: Any) -> tuple[RunPaths, str]:
    """Start a run, and return it and its flow run once it trains."""
    paths = runs.deploy_run(runs.write_spec(name, {"steps": 6000, "sleep_s": 0.1}, **more))
    wait_for("step 12", lambda: step_of(paths) >= 12)
    return paths, supervisions(paths)[-1]["flow_run"]


def shown(runs: FlowRuns, flow_run: str) -> str:
    """The name of the flow run's state in Prefect."""
    return str(runs.ask(f"flow_runs/{flow_run}")["state"]["name"])


def wait_to_show(runs: FlowRuns, flow_run: str, name: str, wait_s: float = 60.0) -> None:
    wait_for(f"Prefect's state {name}", lambda: shown(runs, flow_run) == name, wait_s)


def last_request(paths: RunPaths) -> dict[str, Any]:
    asked = [e.data for e in load_events(paths) if e.kind is EventKind.OPERATOR_REQUEST]
    return asked[-1]


@pytest.mark.slow
def test_pause_and_resume_in_prefect_commit_free_and_go_on(
    runs: FlowRuns, service: PrefectService
) -> None:
    paths, flow_run = begin(runs, "there")
    state = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    runs.ask(f"flow_runs/{flow_run}/set_state", state=state)
    asked_at = time.monotonic()
    wait_for("the pause", lambda: state_of(paths) == "paused", 60)
    assert time.monotonic() - asked_at < AGREE_S
    first = load_history(paths).attempts[0]
    assert first.facts["committed_step"] == first.last_step
    wait_for("the end of the flow's process", lambda: not _is_alive(paths))
    assert shown(runs, flow_run) == "Suspended"
    runs.ask(f"flow_runs/{flow_run}/resume", run_input={})
    wait_for("the second attempt's steps", lambda: step_of(paths, 2) > (first.last_step or 0))
    assert [one["flow_run"] for one in supervisions(paths)] == [flow_run, flow_run]
    name = runs.ask(f"flow_runs/{flow_run}")["name"]
    assert last_request(paths)["by"] == f"prefect flow run {name}"
    wait_to_show(runs, flow_run, "Running")
    service.command("prefect", "flow-run", "cancel", flow_run)
    # The flow's process ends at once, and the run ends in its own time.
    wait_for("the end of the run", lambda: runs.holdfast("show", "there")["state"] == "cancelled")
    wait_to_show(runs, flow_run, "Cancelled")
    second = load_history(paths).attempts[1]
    assert second.facts["committed_step"] == second.last_step
    # A retry takes the run up where it stands.
    service.command("prefect", "flow-run", "retry", flow_run)
    wait_for("the third attempt's steps", lambda: step_of(paths, 3) > (second.last_step or 0))
    runs.hurry()
    wait_for_end(paths)
    wait_to_show(runs, flow_run, "Completed")
    assert len(load_history(paths).attempts) == 3


def _is_alive(paths: RunPaths) -> bool:
    pid = supervisions(paths)[-1]["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_pause_resume_and_cancel_of_the_command_are_shown_by_prefect(runs: FlowRuns) -> None:
    paths, flow_run = begin(runs, "here")
    runs.holdfast("pause", "here")
    wait_to_show(runs, flow_run, "Suspended")
    assert state_of(paths) == "paused"
    runs.holdfast("resume", "here")
    wait_for("the second attempt's steps", lambda: len(paths.list_attempts()) == 2)
    wait_to_show(runs, flow_run, "Running")
    assert {one["flow_run"] for one in supervisions(paths)} == {flow_run}
    wait_for("step 12", lambda: step_of(paths, 2) >= 12)
    runs.holdfast("pause", "here")
    wait_to_show(runs, flow_run, "Suspended")
    runs.holdfast("cancel", "here")
    wait_to_show(runs, flow_run, "Cancelled")
    assert state_of(paths) == "cancelled"


@pytest.mark.slow
def test_prefect_shows_preemptions_failures_and_artifacts(runs: FlowRuns) -> None:
    paths, flow_run = begin(runs, "shown", config={"steps": 6000})
    os.kill(claim_of(paths).pid, signal.SIGTERM)
    names: list[str] = []
    ends_at = time.monotonic() + 90
    while time.monotonic() < ends_at and not (
        len(paths.list_attempts()) == 2 and step_of(paths, 2)
    ):
        names.append(shown(runs, flow_run))
        time.sleep(0.5)
    assert "Running" in names
    assert {"Flushing", "Preempted", "AwaitingCapacity"} & set(names), set(names)

    def artifacts() -> dict[str, Any]:
        chosen = {"flow_run_id": {"any_": [flow_run]}}
        found = runs.ask("artifacts/latest/filter", artifacts=chosen, limit=20)
        return {one["key"].rpartition("-")[2]: one for one in found}

    wait_for("a table of two attempts", lambda: len(_rows(artifacts())) == 2, 90)
    found = artifacts()
    assert sorted(found) == ["attempts", "progress", "run"]
    assert _rows(found)[0]["cause"] == "preemption"
    assert 0 < found["progress"]["data"] < 100
    wait_for("an estimate", lambda: "of 6,000, about" in artifacts()["progress"]["description"], 90)
    found = artifacts()
    text = found["run"]["data"]
    assert re.search(r"^- attempt 1 \(2 ranks\): .*`step-00000010.a0001.l01`", text, re.MULTILINE)
    assert re.search(r"^- attempt 2 \(2 ranks\), resumed from `", text, re.MULTILINE)
    assert "shown" in runs.ask(f"flow_runs/{flow_run}")["tags"]
    assert "left at the present pace" in text
    runs.hurry()
    wait_for_end(paths)
    wait_to_show(runs, flow_run, "Completed")
    assert artifacts()["progress"]["data"] == 100.0


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return json.loads(found["attempts"]["data"]) if "attempts" in found else []


@pytest.mark.slow
def test_a_failing_rank_is_in_the_flow_runs_log_and_a_retry_relaunches(
    runs: FlowRuns, service: PrefectService
) -> None:
    spec = runs.write_spec(
        "fails", {"steps": 60, "sleep_s": 0.0, "fail_at": 30}, supervision={"budgets": {}}
    )
    paths = runs.deploy_run(spec)
    wait_for_end(paths, "failed")
    flow_run = supervisions(paths)[-1]["flow_run"]
    wait_to_show(runs, flow_run, "Failed")

    def has_traceback() -> bool:
        lines = runs.ask("logs/filter", logs={"flow_run_id": {"any_": [flow_run]}}, limit=200)
        return any("a bad batch at step 30" in one["message"] for one in lines)

    wait_for("the traceback in the log of the flow run", has_traceback, 60)
    attempts = len(paths.list_attempts())
    service.command("prefect", "flow-run", "retry", flow_run)
    wait_for("another attempt", lambda: len(paths.list_attempts()) > attempts)
    wait_to_show(runs, flow_run, "Failed")
    first, second = load_history(paths).attempts
    assert (first.cause, second.cause) == (Cause.USER_ERROR, Cause.USER_ERROR)
    # After a crash, the newest step can be one that was in memory only, between two intervals.
    assert re.fullmatch(r"fails:step-0000002\d\.a0001\.l01", second.resumed_from or "")
    assert last_request(paths)["action"] == "relaunch"
    assert {one["flow_run"] for one in supervisions(paths)} == {flow_run}
