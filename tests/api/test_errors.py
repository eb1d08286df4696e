"""The route about the errors of a run: one answer over all its processes, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, serving, wait_for
from tests.support.crashed_runs import SECRET, crashed_run
from tests.support.runs import T0, RunFolder


@pytest.fixture(scope="module")
def api(home: Path) -> Iterator[httpx.Client]:
    """A server with a run whose first attempt worked, whose second crashed, and a healthy run."""
    (home / "runs").mkdir()
    run = crashed_run(home / "runs")
    healthy = RunFolder(home / "runs", "healthy", "b" * 32)
    healthy.submit(1, 2, T0)
    healthy.claim(1, T0 + 1)
    with serving(home, {one.name: one for one in (run, healthy)}) as served, served.client() as one:
        wait_for(lambda: _has_ended(served))
        yield one


def _has_ended(served: Served) -> bool:
    return bool(served.services.store.show_run("crashed")["state"] != "running")


def get(api: httpx.Client, run: str = "crashed", **query: Any) -> dict[str, Any]:
    answer = api.get(f"/api/v1/runs/{run}/errors", params=query)
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    return dict(answer.json())


def test_the_newest_failed_attempt_is_explained_in_one_answer(api: httpx.Client) -> None:
    found = get(api)
    assert found["attempt"] == 2
    assert [(one["number"], one["launches"]) for one in found["attempts"]] == [(2, [1])]
    first, peers, launch, attempt = found["entries"]
    assert found["first"] == first
    assert first["text"] == "rank 3 on node-b: killed by signal 9 (SIGKILL)"
    assert (first["ranks"], first["hosts"], first["signal"]) == (
        "3",
        ["node-b"],
        "signal 9 (SIGKILL)",
    )
    assert (first["is_first"], first["exit_code"], first["launch"]) == (True, None, 1)
    assert (peers["ranks"], peers["ranks_count"], peers["is_secondary"]) == ("0-2", 3, True)
    assert peers["text"].endswith(", after rank 3 was killed")
    assert peers["traceback"].splitlines()[-1].startswith("ConnectionError")
    assert "•••" in peers["traceback"]
    assert (launch["kind"], attempt["kind"]) == ("launch_ended", "attempt_ended")
    assert "which may differ" in found["order_note"]
    listed = api.get("/api/v1/runs/crashed/log-files", params={"attempt": 2}).json()
    assert peers["file"] in {one["file"] for one in listed}


def test_what_differs_from_the_launch_that_worked_is_listed(api: httpx.Client) -> None:
    difference = get(api)["difference"]
    assert difference["worked"] == {"attempt": 1, "number": 1}
    facts = {one["name"]: (one["before"], one["now"]) for one in difference["facts"]}
    assert facts["hosts"] == ("node-a", "node-b")
    assert facts["gpus_per_node"] == ("2", "4")
    assert facts["loaded checkpoint"][0] == "none: it began at step 0"
    assert facts["loaded checkpoint"][1].endswith("step-00000050.a0001.l01")
    assert "executor" not in facts


def test_an_attempt_and_a_run_without_errors_say_so(api: httpx.Client) -> None:
    first = get(api, attempt=1)
    assert (first["attempt"], first["entries"], first["first"]) == (1, [], None)
    assert [one["number"] for one in first["attempts"]] == [2]
    healthy = get(api, "healthy")
    assert (healthy["attempt"], healthy["attempts"], healthy["entries"]) == (None, [], [])


def test_an_unknown_attempt_is_refused_with_the_last_one(api: httpx.Client) -> None:
    answer = api.get("/api/v1/runs/crashed/errors", params={"attempt": 9})
    assert answer.status_code == 404
    assert answer.json()["message"] == "crashed has no attempt 9; the last one is 2"
