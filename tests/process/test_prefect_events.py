"""Events of a run on a real Prefect server that is killed, and with a flow that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import (
    FlowRuns,
    events_of,
    expected_events,
    service_environment,
    step_of,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import load_events, load_history

# From a journal line to the event on the server, in seconds.
LATENCY_S_MAX = 2.0


@pytest.fixture
def service(tmp_path: Path) -> PrefectService:
    """A service that ends with SIGKILL, as when its host is lost."""
    return PrefectService(tmp_path, service_environment(tmp_path), end_s=0.0)


@pytest.fixture
def runs(service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(service, tmp_path)
    yield made
    made.end_all()


def received(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["received"]).timestamp()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_journal_line_becomes_one_event_over_kills_of_server_and_flow(
    runs: FlowRuns, service: PrefectService
) -> None:
    with contextlib.ExitStack() as servers:
        servers.enter_context(service.serving())
        service.command("holdfast", "deploy")
        with service.working():
            spec = runs.write_spec("told", {"steps": 6000, "sleep_s": 0.1})
            paths = runs.deploy_run(spec)
            wait_for("step 30", lambda: step_of(paths) >= 30)
            wait_for("stored events", lambda: len(events_of(runs, paths)) > 8)
            begun = max(one.time for one in load_events(paths) if one.kind == EventKind.SUPERVISED)
            prompt = [one for one in events_of(runs, paths) if one["payload"]["time"] > begun + 1]
            late = [received(one) - one["payload"]["time"] for one in prompt]
            assert prompt
            assert max(late) <= LATENCY_S_MAX, late
            servers.close()
            before = step_of(paths)
            wait_for("more checkpoints", lambda: step_of(paths) >= before + 30)
            servers.enter_context(service.serving())
            wanted = [name for name, _ in expected_events(paths)]
            missed = wanted.count("holdfast.checkpoint.committed")
            wait_for(
                "the events of the outage",
                lambda: (
                    sum(
                        one["event"] == "holdfast.checkpoint.committed"
                        for one in events_of(runs, paths)
                    )
                    >= missed
                ),
            )
            (taken,) = supervisions(paths)
            os.kill(taken["pid"], signal.SIGKILL)
            wait_for("the flow's end", lambda: not psutil.pid_exists(taken["pid"]))
            runs.deploy_run(spec)
            wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2)
            runs.hurry()
            wait_for_end(paths)
            flow_run = supervisions(paths)[-1]["flow_run"]
            wait_for("Prefect's state", lambda: runs.flow_state(flow_run) == "COMPLETED")
        runs.holdfast("verify", str(paths.checkpoints / "latest"))
        runs.holdfast("events", "told", "--publish")
        found = events_of(runs, paths)
        assert found.pop()["event"] == "holdfast.checkpoint.verified"
        assert found == events_of(runs, paths)[:-1]
        told = [(one["event"], one["payload"]["time"]) for one in found]
        assert told == expected_events(paths)[:-1]
        check_resources(found, load_history(paths).record.uid, flow_run)


def check_resources(found: list[dict[str, Any]], uid: str, flow_run: str) -> None:
    """What automations can match."""
    last = found[-1]
    committed = next(one for one in found if one["event"] == "holdfast.checkpoint.committed")
    roles = {
        one["prefect.resource.role"]: one["prefect.resource.id"] for one in committed["related"]
    }
    assert committed["resource"]["prefect.resource.id"].startswith(
        f"holdfast.checkpoint.{uid}.step-"
    )
    assert roles["run"] == f"holdfast.run.{uid}"
    assert roles["attempt"] == f"holdfast.attempt.{uid}.1"
    assert roles["flow-run"].startswith("prefect.flow-run.")
    assert roles["deployment"].startswith("prefect.deployment.")
    assert last["event"] == "holdfast.run.completed"
    assert last["resource"]["prefect.resource.name"] == "told"
    assert last["resource"]["holdfast.state"] == "completed"
    assert any(one["prefect.resource.id"].endswith(flow_run) for one in last["related"])
