"""End to end: `holdfast serve` with a real run, which is relaunched at another size."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tests.api.conftest import WAIT_S, wait_for
from tests.process.local_command import Local

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
# A flow starts Prefect's temporary server; on a busy machine that takes minutes.
BEGIN_S: Final = 600.0
SERVING: Final = re.compile(r"serving (http://\S+)/\?token=(\S+)")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


@pytest.fixture
def api(local: Local) -> Iterator[httpx.Client]:
    """A client of `holdfast serve`, which runs in a separate process."""
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--port", "0"]
    server = subprocess.Popen(command, env=local.environment, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = iter(server.stderr.readline, "")
        url, token = next(match.groups() for line in said if (match := SERVING.search(line)))
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=WAIT_S) as client:
            yield client
    finally:
        server.terminate()
        server.wait(WAIT_S)


def test_relaunch_resumes_at_the_new_size(local: Local, api: httpx.Client) -> None:
    spec = local.write_spec(
        "live",
        {"steps": 20_000, "sleep_s": 0.1},
        resources={"gpus_per_node": 2},
        elastic={"min_gpus": 1},
    )
    heard: list[str] = []
    threading.Thread(target=_listen, args=(api, heard), daemon=True).start()
    local.json("submit", str(spec))

    wait_for(lambda: _run(api).get("state") == "running", BEGIN_S)
    wait_for(lambda: _checkpoints(api), BEGIN_S)
    wait_for(lambda: {"run", "journal", "beat"} <= set(heard))
    ranks = [r for n in api.get("/runs/live/heartbeats").json()["nodes"] for r in n["ranks"]]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]

    asked = api.post("/runs/live/relaunch", json={"gpus": 1})
    assert asked.status_code == 200, asked.text
    second = api.post("/runs/live/stop", json={})
    assert second.status_code == 409
    wait_for(lambda: len(_run(api)["attempts"]) == 2, BEGIN_S)
    wait_for(lambda: _run(api)["attempts"][1]["resumed_from"], BEGIN_S)
    first, after = _run(api)["attempts"]
    assert (first["world_size"], after["world_size"]) == (2, 1)
    assert after["resumed_step"] == first["committed_step"] == first["last_step"]

    assert api.post("/runs/live/stop", json={"force": True}).status_code == 200
    wait_for(lambda: _run(api)["state"] == "cancelled", BEGIN_S)
    # No supervisor is left, so the server itself starts the flow.
    assert api.post("/runs/live/relaunch", json={"gpus": 2}).json()["pid"]
    wait_for(lambda: len(_run(api)["attempts"]) == 3, BEGIN_S)
    newest = _checkpoints(api)[-1]["id"]
    forked = api.post(f"/checkpoints/{newest}/fork", json={"name": "fork"})
    assert forked.status_code == 201, forked.text
    wait_for(lambda: _run(api, "fork").get("attempts"), BEGIN_S)
    for run in ("live", "fork"):
        assert api.post(f"/runs/{run}/cancel", json={"force": True}).status_code == 200
        wait_for(partial(_is_cancelled, api, run), BEGIN_S)


def _run(api: httpx.Client, name: str = "live") -> dict[str, Any]:
    told: dict[str, Any] = api.get(f"/runs/{name}").json()
    return told


def _is_cancelled(api: httpx.Client, name: str) -> bool:
    return bool(_run(api, name)["state"] == "cancelled")


def _checkpoints(api: httpx.Client) -> list[dict[str, Any]]:
    answer = api.get("/runs/live/checkpoints", params={"limit": 500})
    found: list[dict[str, Any]] = answer.json().get("items", [])
    return found


def _listen(api: httpx.Client, heard: list[str]) -> None:
    # The stream ends with the server.
    with (
        contextlib.suppress(httpx.TransportError),
        api.stream("GET", "/events", timeout=None) as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("event: "):
                heard.append(line.removeprefix("event: "))
