"""`holdfast` on one machine without a Prefect server: flows run in separate processes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import psutil
import pytest
from tests.process.local_command import PROGRAM, Local

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events, load_history
from holdfast.workers.nodes.heartbeats import newest_step, read_heartbeats

WAIT_S: Final = 240.0


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


def test_run_is_submitted_awaited_and_forked(local: Local) -> None:
    spec = local.write_spec("first", {"steps": 35, "sleep_s": 0.06})
    told = local.json("submit", str(spec), "--wait")
    assert (told["state"], told["step"]) == ("completed", 35)
    assert local.json("submit", str(spec), "--wait")["created"] is False
    again = local.call("submit", str(spec)).stdout
    assert "has ended (completed); nothing was submitted" in again
    shown = local.json("show", "first")
    assert len(shown["attempts"]) == 1
    found = local.json("checkpoints", "first")
    assert [(c["step"], c["state"]) for c in found] == [
        (10, "deleted"),
        (20, "deleted"),
        (30, "committed"),
        (35, "committed"),
    ]
    assert local.json("verify", found[-1]["id"])["ok"] is True
    trace = local.folder / "trace.json"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": [9] * 9}))
    played = ["simulate", str(spec), "--trace", str(trace), "--steps", "99"]
    costs = local.json(*played, "--costs-of", "first")["costs"]
    assert 0.05 < costs["step_s"] < 5, costs
    logs = local.call("logs", "first")
    assert "ends after step 35" in logs.stdout
    stamped = local.call("logs", "first", "--timestamps").stdout.splitlines()
    times = [datetime.fromisoformat(line.split(" ")[0]).timestamp() for line in stamped]
    assert [line.split(" ", 1)[1] for line in stamped] == logs.stdout.splitlines()
    assert told["submitted_at"] - 1 <= times[0] <= times[-1] <= time.time()
    middle = found[2]["id"]
    command = json.dumps([PROGRAM.name, json.dumps({"steps": 45, "sleep_s": 0.06})])
    changes = ("--set", f"command={command}", "--set", "supervision.grace_s=0.001")
    forked = local.json("fork", middle, "--name", "second", "--wait", *changes)
    (warning,) = forked["warnings"]
    assert "too short for the last flush" in warning
    assert (forked["run"], forked["state"]) == ("second", "completed")
    attempt = local.json("show", "second")["attempts"][0]
    assert (attempt["resumed_from"], attempt["first_step"]) == (middle, 31)
    weights = str(local.root.parent / "weights.safetensors")
    exported = local.json("export", middle, "--to", "safetensors", "--output", weights)
    assert (exported["checkpoint"], exported["path"]) == (middle, weights)
    edges = local.json("lineage", "first")["edges"]
    assert any(e["kind"] == "exported_to" and e["to"] == weights for e in edges)
    edges = local.json("lineage", "second")["edges"]
    assert any(e["kind"] == "forked_from" and e["to"] == middle for e in edges)
    assert local.call("fork", middle, "--name", "second").returncode == 5


@pytest.mark.more
def test_no_preflight_starts_a_run_that_preflight_would_refuse(local: Local) -> None:
    away = local.folder / "away"
    away.mkdir()
    shutil.copy(PROGRAM, away / "away_program.py")
    # The job finds the module by PYTHONPATH in its environment, which preflight does not use.
    spec = local.write_spec(
        "unchecked",
        {},
        command=["-m", "away_program", json.dumps({"steps": 5, "sleep_s": 0.01})],
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(away)},
    )
    refused = local.call("submit", str(spec))
    assert refused.returncode != 0
    assert "module away_program is missing" in refused.stderr
    assert not (local.root / "unchecked").exists()
    told = local.json("submit", str(spec), "--no-preflight", "--wait")
    assert (told["state"], told["step"]) == ("completed", 5)


@pytest.mark.slow
def test_submit_wait_of_a_failing_run_exits_with_1(local: Local) -> None:
    """test_flow_prefect.py tests a failing run with a Prefect server by default."""
    spec = local.write_spec("broken", {"steps": 30, "sleep_s": 0.06, "fail_at": 5})
    done = local.call("submit", str(spec), "--wait")
    assert done.returncode == 1
    assert "user_error" in done.stdout
    assert "a bad batch at step 5" in local.call("show", "broken").stdout


@pytest.mark.slow
def test_a_killed_supervisor_is_reported_and_replaced(local: Local) -> None:
    spec = local.write_spec("orphan", {"steps": 5000, "sleep_s": 0.05})
    local.json("submit", str(spec))
    paths = RunPaths(local.root / "orphan")
    ends_at = time.monotonic() + WAIT_S
    while (newest_step(read_heartbeats(paths.attempt(1))) or 0) < 3:
        assert time.monotonic() < ends_at, paths.flow_log.read_text()
        time.sleep(0.2)
    (taken,) = [e.data for e in load_events(paths) if e.kind is EventKind.SUPERVISED]
    flow = psutil.Process(taken["pid"])
    started_by_it = flow.children(recursive=True)
    flow.kill()
    flow.wait(60)
    assert started_by_it == [], "a supervisor must not start a server"
    (warning,) = [w for w in local.json("show", "orphan")["warnings"] if "supervis" in w]
    assert "holdfast supervise orphan" in warning
    (again,) = local.json("supervise", "--all")
    assert (again["run"], again["started"]) == ("orphan", True)
    while len([e for e in load_events(paths) if e.kind is EventKind.SUPERVISED]) < 2:
        assert time.monotonic() < ends_at, paths.flow_log.read_text()
        time.sleep(0.2)
    (once_more,) = local.json("supervise", "--all")
    assert not once_more["started"]
    assert not any("supervis" in warning for warning in local.json("show", "orphan")["warnings"])
    assert local.json("stop", "orphan")["state"] == "running"
    while not paths.attempt(1).outcome.exists():
        assert time.monotonic() < ends_at, "the job did not stop"
        time.sleep(0.2)
    shown = local.json("show", "orphan")
    assert shown["state"] == "cancelled"
    assert shown["attempts"][0]["cause"] == "operator"
    assert load_history(paths).attempts[0].outcome is not None
