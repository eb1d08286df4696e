"""Every shipped automation on a real server, by the event that fires it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml
from examples.demo_service import PrefectService
from tests.support.flow_runs import (
    FlowRuns,
    service_environment,
    state_of,
    step_of,
    supervisions,
    wait_for,
    wait_for_end,
)
from tests.support.receivers import Webhook

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import load_events
from holdfast.flows.deploying import is_alert, shipped

ALERTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "holdfast.attempt.hang-confirmed": ({}, {}),
    "holdfast.run.failed": ({}, {"reason": "3 failures in a row"}),
    "holdfast.checkpoint.damaged": ({}, {"damaged": ["a file"]}),
    "holdfast.run.limit-passed ettr": (
        {"holdfast.limit": "ettr_min"},
        {"text": "productive share of the time (ETTR): 61.0%"},
    ),
    "holdfast.run.limit-passed age": (
        {"holdfast.limit": "checkpoint_age_max_min"},
        {"text": "training since the newest checkpoint: 90.0 min"},
    ),
    "holdfast.run.limit-passed hours": (
        {"holdfast.limit": "gpu_hours_max"},
        {"text": "GPU hours: 901.0 of 1,000.0"},
    ),
}


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def automated(service: PrefectService, webhook: Webhook) -> list[str]:
    """The server with all automations; their names. Created twice, they exist once."""
    runs = FlowRuns(service, service.folder)
    without = runs.holdfast("deploy", "--automations")["automations"]
    assert without == [one["name"] for one in shipped() if not is_alert(one)]
    refused = service.command("holdfast", "deploy", "--notify", "custom-webhook/team", check=False)
    assert refused.returncode != 0
    assert "Prefect has no block custom-webhook/team" in refused.stderr
    nameless = service.command("holdfast", "deploy", "--notify", "team", check=False)
    assert "--notify team: expected TYPE/NAME" in nameless.stderr
    runs.create_block(
        "custom-webhook",
        "team",
        name="team",
        url=f"http://127.0.0.1:{webhook.server_port}/alerts",
        json_data={"subject": "{{subject}}", "body": "{{body}}"},
    )
    named: list[str] = runs.holdfast("deploy", "--notify", "custom-webhook/team")["automations"]
    assert named == [one["name"] for one in shipped()]
    there = runs.ask("automations/filter", limit=50)
    assert sorted(one["name"] for one in there) == sorted(named)
    return named


def emit(runs: FlowRuns, name: str, labels: dict[str, str], payload: dict[str, Any]) -> None:
    """Send an event to the server."""
    unique = uuid4().hex
    resource = {
        "prefect.resource.id": f"holdfast.run.{unique}",
        "prefect.resource.name": f"run-{unique[:6]}",
        "holdfast.root": str(runs.root),
        **labels,
    }
    event = {
        "id": str(uuid4()),
        "event": name,
        "occurred": datetime.now(UTC).isoformat(),
        "resource": resource,
        "related": [],
        "payload": payload,
    }
    runs.ask("events", event)


def _has_more(webhook: Webhook, before: int) -> bool:
    return len(webhook.got) > before


@pytest.mark.more
def test_each_alert_is_sent_by_its_event(
    runs: FlowRuns, automated: list[str], webhook: Webhook
) -> None:
    for name, (labels, payload) in ALERTS.items():
        before = len(webhook.got)
        emit(runs, name.split()[0], labels, payload)
        wait_for(f"the alert of {name}", partial(_has_more, webhook, before), 60)
        (message,) = webhook.got[before:]
        assert "run-" in message["subject"]
        for text in payload.values():
            assert (text if isinstance(text, str) else text[0]) in message["body"]
    assert len(webhook.got) == len([one for one in shipped() if is_alert(one)])


@pytest.mark.slow
def test_a_crashed_flow_is_replaced_and_paused_runs_go_on_when_capacity_returns(
    runs: FlowRuns, automated: list[str]
) -> None:
    paths = runs.deploy_run(runs.write_spec("held", {"steps": 3000, "sleep_s": 0.1}))
    wait_for("step 5", lambda: step_of(paths) >= 5)
    (first,) = supervisions(paths)
    os.kill(first["pid"], signal.SIGKILL)
    killed = time.monotonic()
    wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2, 60)
    print(f"supervised again {time.monotonic() - killed:.1f} s after the flow was killed")
    second = supervisions(paths)[-1]
    assert second["flow_run"] != first["flow_run"]
    assert state_of(paths) == "running"
    assert (
        runs.ask(f"flow_runs/{second['flow_run']}")["parameters"]["flow_run"] == (first["flow_run"])
    )
    runs.holdfast("pause", "held", "--until-capacity")
    wait_for("the pause", lambda: state_of(paths) == "paused")
    other = runs.deploy_run(runs.write_spec("kept", {"steps": 3000, "sleep_s": 0.1}))
    wait_for("step 5", lambda: step_of(other) >= 5)
    runs.holdfast("pause", "kept")
    wait_for("the pause", lambda: state_of(other) == "paused")
    emit(runs, "holdfast.capacity.returned", {}, {})
    wait_for("the second attempt", lambda: len(paths.list_attempts()) == 2)
    runs.hurry()
    wait_for_end(paths)
    assert state_of(other) == "paused", "only runs that wait for capacity are resumed"
    runs.holdfast("cancel", "kept")
    wait_for_end(other, "cancelled")
    asked = [e.data for e in load_events(paths) if e.kind is EventKind.OPERATOR_REQUEST]
    assert [one["action"] for one in asked] == ["pause", "resume"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_flow_whose_host_is_lost_is_noticed_by_its_heartbeats(tmp_path: Path) -> None:
    """The worker and the flow are killed, so that nothing reports the flow's end."""
    service = PrefectService(tmp_path, service_environment(tmp_path), end_s=0.0)
    runs = FlowRuns(service, tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.serving())
        service.command("holdfast", "deploy", "--automations")
        stack.callback(runs.end_all)
        with service.working() as worker:
            paths = runs.deploy_run(runs.write_spec("lost", {"steps": 6000, "sleep_s": 0.1}))
            wait_for("step 5", lambda: step_of(paths) >= 5)
            (first,) = supervisions(paths)
            # The first heartbeat of the flow run, after which the automation waits for more.
            name = {"name": ["prefect.flow-run.heartbeat"]}
            wait_for(
                "a heartbeat",
                lambda: runs.ask("events/filter", filter={"event": name})["events"],
                90,
            )
            os.kill(worker.pid, signal.SIGKILL)
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(first["pid"], signal.SIGKILL)
            killed = time.monotonic()
        with service.working():
            wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2, 300)
            print(f"supervised again {time.monotonic() - killed:.1f} s after its host was lost")
            assert runs.flow_state(first["flow_run"]) == "CRASHED"
            runs.hurry()
            wait_for_end(paths)


def test_the_files_are_in_prefects_own_format(tmp_path: Path) -> None:
    """A team can copy one, put ids in the place of names, and create it with Prefect."""
    from prefect.events.schemas.automations import AutomationCore

    for one in shipped():
        text = yaml.safe_dump(one).replace("deployment_id: ", f"deployment_id: {uuid4()} #")
        text = text.replace("block_document_id: ", f"block_document_id: {uuid4()} #")
        made = AutomationCore.model_validate(yaml.safe_load(text))
        assert made.description
        assert made.name.startswith("holdfast-")
        assert json.loads(made.model_dump_json())["trigger"]["type"] == "event"
