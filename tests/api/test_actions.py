"""Operator actions over the API: same rules as the CLI, and one pending request per run."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, wait_for

from holdfast.contracts.disk.durable import write_bytes
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.records.documents import StopFile, read_document
from holdfast.contracts.records.history import load_events, load_history

NEWEST = "gpt:step-00000200.a0003.l01"


@pytest.fixture(scope="module")
def api(served: Served) -> httpx.Client:
    return served.client()


def post(api: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = api.post(f"/api/v1{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_second_of_two_concurrent_requests_gets_409_and_names_the_first(
    api: httpx.Client, served: Served
) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = list(
            pool.map(lambda act: api.post(f"/api/v1/runs/gpt-b/{act}", json={}), ("stop", "pause"))
        )
    first, second = sorted(answers, key=lambda one: one.status_code)
    assert (first.status_code, second.status_code) == (200, 409)
    told = second.json()
    assert (told["by"], told["action"]) == ("ann", first.json()["action"])
    assert f"ann asked to {told['action']} run gpt-b 0 s ago" in told["message"]
    stop = read_document(StopFile, served.runs["gpt-b"].paths.attempt(1).stop)
    assert stop is not None
    assert stop.action == told["action"]
    assert post(api, "/runs/gpt-b/cancel", force=True)["action"] == "cancel"


def test_invalid_requests_are_refused_with_the_next_step(api: httpx.Client) -> None:
    assert "fork" in post(api, "/runs/gpt/relaunch", 422, gpus=4)["message"]
    assert "relaunch" in post(api, "/runs/gpt-b/resume", 422, force=True)["message"]
    for gpus in (0, -1, "many", 10**30):
        assert post(api, "/runs/gpt-b/relaunch", 422, gpus=gpus)["code"] == "invalid"
    assert post(api, "/runs/gpt-b/stop", 422, now=True)["code"] == "invalid"
    answer = api.post("/api/v1/runs/gpt/stop", content=b"{", headers={"Content-Type": JSON})
    assert answer.status_code == 422


@pytest.mark.parametrize("action", ["stop", "pause", "cancel"])
def test_an_action_on_a_run_that_has_ended_meanwhile_says_so(
    api: httpx.Client, served: Served, action: str
) -> None:
    def orders() -> list[Event]:
        found = load_events(served.runs["gpt"].paths)
        return [one for one in found if one.kind is EventKind.OPERATOR_REQUEST]

    before = orders()
    told = post(api, f"/runs/gpt/{action}", 422)
    assert f"run gpt is completed, so there is nothing to {action}" in told["message"]
    assert orders() == before


JSON = "application/json"


def test_checkpoint_is_listed_as_pinned_until_it_is_unpinned(api: httpx.Client) -> None:
    for action, pinned in (("pin", True), ("unpin", False)):
        post(api, f"/checkpoints/{NEWEST}/{action}")

        def told(wanted: bool = pinned) -> bool:
            row = api.get(f"/api/v1/checkpoints/{NEWEST}").json()
            return bool(row["pinned"] is wanted)

        wait_for(told)
    assert "not pinned" in post(api, f"/checkpoints/{NEWEST}/unpin", 422)["message"]


def test_prune_is_a_dry_run_unless_told_otherwise(api: httpx.Client, served: Served) -> None:
    paths = served.runs["gpt"].paths
    record = json.loads(paths.spec.read_text())
    record["spec"]["checkpoint"]["keep"]["last"] = 1
    write_bytes(paths.spec, json.dumps(record).encode())
    plan = post(api, "/runs/gpt/prune")
    assert plan["dry_run"]
    gone = [one["checkpoint"] for one in plan["deleted"]]
    assert gone == ["step-00000150.a0002.l01"]
    assert (paths.checkpoint(gone[0]) / MANIFEST).is_file()
    done = post(api, "/runs/gpt/prune", dry_run=False)
    assert [one["checkpoint"] for one in done["deleted"]] == gone
    assert not paths.checkpoint(gone[0]).exists()
    wait_for(lambda: api.get(f"/api/v1/checkpoints/gpt:{gone[0]}").json()["state"] == "deleted")
    assert "deleted" in post(api, f"/checkpoints/gpt:{gone[0]}/verify", 404)["message"]


def test_verify_runs_as_a_job_and_reports_damage(api: httpx.Client, served: Served) -> None:
    directory = served.runs["gpt"].paths.checkpoint("step-00000100.a0001.l01")
    content_before = (directory / "__0_0.distcp").read_bytes()
    for content, ok in ((None, True), (b"state of step 9_9", False)):
        if content is not None:
            (directory / "__0_0.distcp").write_bytes(content)
        job = post(api, "/checkpoints/gpt:step-00000100.a0001.l01/verify", 202)
        wait_for(partial(has_ended, api, job))
        result = shown(api, job)["result"]
        assert result["ok"] is ok
        assert bool(result["damaged"]) is not ok
    # The damage is shown, and refused as a source.
    path = "/checkpoints/gpt:step-00000100.a0001.l01"
    wait_for(lambda: api.get(f"/api/v1{path}").json()["state"] == "damaged")
    for action, body in (("export", {"to": "dcp"}), ("fork", {"name": "gpt-d"})):
        assert "verify found damage" in post(api, f"{path}/{action}", 409, **body)["message"]
    # Later tests use it again.
    (directory / "__0_0.distcp").write_bytes(content_before)
    job = post(api, f"{path}/verify", 202)
    wait_for(lambda: api.get(f"/api/v1{path}").json()["state"] == "committed")


@pytest.mark.more
def test_failed_export_job_reports_the_reason(api: httpx.Client, served: Served) -> None:
    path = "/checkpoints/gpt:step-00000100.a0001.l01/export"
    for wrong in ({"to": "zip"}, {"to": "hf", "include": ["--output"]}, {"to": "hf", "dtype": "x"}):
        assert post(api, path, 422, **wrong)["code"] == "invalid"
    paths = served.runs["gpt"].paths
    # The checkpoint's file is not one that PyTorch wrote.
    job = post(api, path, 202, to="safetensors", dtype="bfloat16")
    wait_for(partial(has_ended, api, job))
    told = shown(api, job)
    assert told["state"] == "failed"
    assert "step-00000100.a0001.l01" in told["error"]
    assert not list(paths.exports.glob("*"))
    audit = [e for e in load_history(paths).events if e.kind is EventKind.AUDIT]
    assert audit[-1].data["output"] == "step-00000100.a0001.l01-bfloat16.safetensors"


def has_ended(api: httpx.Client, job: dict[str, Any]) -> bool:
    return shown(api, job)["state"] in {"done", "failed"}


def shown(api: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = api.get(f"/api/v1/jobs/{job['id']}").json()
    return told


def test_fork_over_the_api_cannot_change_commands_or_paths(api: httpx.Client) -> None:
    path = f"/checkpoints/{NEWEST}/fork"
    for key in ("command", "launch.python", "checkpoint.mirror", "supervision.notices_url"):
        told = post(api, path, 422, name="gpt-c", set={key: "/bin/sh"})
        assert "holdfast fork --set" in told["message"]
    assert "a run with the name gpt-b exists" in post(api, path, 409, name="gpt-b")["message"]
    assert post(api, path, 422, name="../gpt-c")["code"] == "invalid"


def test_export_and_fork_of_another_users_run_are_refused(
    api: httpx.Client, served: Served
) -> None:
    folder, exports = served.runs["gpt"].paths.directory, served.runs["gpt"].paths.exports
    before = sorted(exports.glob("*"))
    os.chown(folder, 54_321, -1)
    try:
        refused = [
            post(api, f"/checkpoints/{NEWEST}/export", 422, to="dcp"),
            post(api, f"/checkpoints/{NEWEST}/fork", 422, name="taken"),
        ]
    finally:
        os.chown(folder, os.geteuid(), -1)
    assert all("belongs to another user" in answer["message"] for answer in refused)
    assert sorted(exports.glob("*")) == before
    assert not (served.root / "taken").exists()
