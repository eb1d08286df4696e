"""The list of what needs a person, over real run folders, and its acknowledgements."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from tests.api.conftest import WAIT_S, Served, serving, wait_for
from tests.support.runs import RunFolder
from tests.web.sample_runs import RunScript, clock

from holdfast.api.attention import FILE, FRESH_S, STALE_S
from holdfast.api.tokens import Role
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import AttemptState

MINUTE: Final = 60.0
LIST, DONE = "/api/v1/attention", "/api/v1/attention/acknowledge"
MIRROR: Final = {"checkpoint": {"mirror": "s3://team/runs"}}


def write_runs(root: Path) -> None:
    """A run for each kind of problem, and one without any."""
    now = time.time()
    for number, name in enumerate(("old", "mirror", "node", "full-disk", "alone")):
        fields = MIRROR if name == "mirror" else {}
        script = RunScript(root, name, f"{number:x}", now - 90 * MINUTE, **fields)
        script.begin(1, 2, now - 90 * MINUTE, queued_s=30.0, host="gpu-1")
        for turn in range(4):
            script.commit(turn + 1, 1, now - (80 - 5 * turn) * MINUTE, 2)
        if name != "old":
            script.commit(9, 1, now - 9 * MINUTE, 2)
        told: dict[str, dict[str, Any]] = {
            "mirror": {"kind": EventKind.MIRROR_FAILED, "step": 9, "error": "403 Forbidden"},
            "node": {"kind": EventKind.NODE_SILENT, "nodes": ["gpu-2"], "silent": True},
            "alone": {
                "kind": EventKind.PROTECTION,
                "launch": 1,
                "lacks": "spares",
                "unprotected": "no spare node is left; lost or left: gpu-3",
            },
            "full-disk": {"kind": EventKind.SAVE_FAILED, "error": "No space left", "step": 12},
        }
        if name in told:
            facts = {"attempt": 1, "checkpoint": "step-00000012.a0001.l01", **told[name]}
            script.tell(now - 5 * MINUTE, "flow", facts.pop("kind"), **facts)
    queued = RunScript(root, "queued", "9", now - 50 * MINUTE)
    with clock(now - 50 * MINUTE):
        queued.run.submit(1, 8, now - 50 * MINUTE)
    state: dict[str, Any] = {"state": AttemptState.PENDING.value, "detail": "AssocGrpGRES"}
    state["starts_at"] = now + 20 * MINUTE
    queued.tell(now - 49 * MINUTE, "flow", EventKind.ATTEMPT_STATE, attempt=1, **state)


@pytest.fixture(scope="module")
def served(home: Path, patched: pytest.MonkeyPatch) -> Iterator[Served]:
    (home / "runs").mkdir()
    write_runs(home / "runs")
    # The edges: no job of these runs exists, and the disk of this machine may be full.
    patched.setattr("holdfast.api.watch.reconcile", lambda *_, **__: None)
    patched.setattr("holdfast.api.capacity.find_full_roots", lambda _: [])
    runs = {one.name: None for one in (home / "runs").iterdir()}
    with serving(home, runs) as one:  # type: ignore[arg-type]
        # The second round after a run's first ingest knows that it has no supervisor.
        wait_for(lambda: len(listed(one, "unsupervised")) == len(runs))
        yield one


def listed(served: Served, kind: str | None = None) -> list[dict[str, Any]]:
    with served.client() as client:
        items: list[dict[str, Any]] = client.get(LIST).raise_for_status().json()
    return [one for one in items if kind in {None, one["kind"]}]


def test_each_problem_is_listed_once_with_its_cause_age_and_help(served: Served) -> None:
    found = {(one["run"], one["kind"]): one for one in listed(served)}
    assert {kind for _, kind in found} == {
        *("unsupervised", "checkpoint_old", "mirror_behind", "node_silent", "saves_fail"),
        *("pending_long", "spares_used"),
    }
    old = found["old", "checkpoint_old"]
    assert "no checkpoint for 65 min" in old["text"]
    assert "403 Forbidden" in found["mirror", "mirror_behind"]["text"]
    assert "gpu-2" in found["node", "node_silent"]["action"]
    assert "No space left" in found["full-disk", "saves_fail"]["text"]
    assert found["alone", "spares_used"]["text"] == "no spare node is left; lost or left: gpu-3"
    assert found["queued", "pending_long"]["text"] == "the job 101 is pending: AssocGrpGRES"
    assert all(one["since"] for (_, kind), one in found.items() if kind != "unsupervised")
    assert all(one["action"] for one in found.values())
    assert len({one["id"] for one in found.values()}) == len(found)


def test_a_run_has_what_its_launch_lacks(served: Served) -> None:
    with served.client() as client:
        (lack,) = client.get("/api/v1/runs/alone").raise_for_status().json()["unprotected"]
        other = client.get("/api/v1/runs/old").raise_for_status().json()
    assert (lack["lacks"], lack["host"]) == ("spares", None)
    assert lack["text"] == "no spare node is left; lost or left: gpu-3"
    assert lack["action"].startswith("Relaunch")
    assert other["unprotected"] == []


def test_the_queue_has_the_reason_and_the_forecast_of_each_waiting_run(served: Served) -> None:
    with served.client() as client:
        (one,) = client.get("/api/v1/queue").raise_for_status().json()
    assert (one["run"], one["state"], one["user"], one["gpus"]) == ("queued", "queued", "tester", 8)
    assert (one["reason"], one["job_id"]) == ("AssocGrpGRES", "101")
    assert one["since"] < one["starts_at"]
    assert "account or QOS" in one["action"]


def test_an_operator_acknowledges_a_problem_and_the_journal_says_who(served: Served) -> None:
    (item,) = listed(served, "saves_fail")
    with served.client() as client:
        done = client.post(DONE, json={"id": item["id"], "note": "storage is called"}).json()
        again = client.post(DONE, json={"id": item["id"], "note": "me too"}).json()
    assert done["acknowledged"]["by"] == "ann"
    assert again["acknowledged"]["note"] == "storage is called"
    shown = listed(served)
    assert shown[-1]["id"] == item["id"]
    assert shown[-1]["acknowledged"]["note"] == "storage is called"
    folder = RunFolder.__new__(RunFolder)
    folder.paths = served.services.store.folder_of("full-disk")
    lines = [one for one in load_events(folder.paths) if one.kind is EventKind.ALERT_ACKNOWLEDGED]
    assert [one.data for one in lines] == [
        {"alert": item["id"], "by": "ann", "note": "storage is called"}
    ]

    def other_server() -> bool:
        """A server that starts later reads it from the index."""
        known = served.services.store.newest_events("full-disk", (EventKind.ALERT_ACKNOWLEDGED,))
        return len(known) == 1

    wait_for(other_server)


def test_a_reader_and_an_unknown_problem_are_refused(served: Served) -> None:
    (item,) = listed(served, "mirror_behind")
    _, token = served.services.tokens.issue("eve", Role.READER)
    with served.stranger(Authorization=f"Bearer {token}") as client:
        assert client.post(DONE, json={"id": item["id"]}).status_code == 403
    with served.client() as client:
        refused = client.post(DONE, json={"id": "nothing"})
    assert refused.status_code == 404
    assert "it may be solved" in refused.json()["message"]
    assert listed(served, "mirror_behind")[0]["acknowledged"] is None


def test_a_request_does_not_wait_for_a_look_unless_the_last_answer_is_old(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = served.services.attention
    last = attention.items()
    slow, goes_on = threading.Event(), threading.Event()

    def look() -> list[Any]:
        slow.set()
        assert goes_on.wait(WAIT_S)
        return []

    monkeypatch.setattr(attention, "_look", look)
    # Put back afterwards.
    monkeypatch.setattr(attention, "_items", last)
    monkeypatch.setattr(attention, "_looked_at", time.monotonic() - 2 * FRESH_S)
    with ThreadPoolExecutor(2) as pool:
        renewed = pool.submit(attention.items)
        assert slow.wait(WAIT_S)
        try:
            assert attention.items() == last != []
            monkeypatch.setattr(attention, "_looked_at", time.monotonic() - 2 * STALE_S)
            late = pool.submit(attention.items)
            with pytest.raises(TimeoutError):
                late.result(0.2)
        finally:
            goes_on.set()
        assert renewed.result(WAIT_S) == late.result(WAIT_S) == []


HOLDER: Final = """
import sys, time
from pathlib import Path
from holdfast.flows.supervisor.flow_lock import FlowLock
with FlowLock(Path(sys.argv[1])) as lock:
    assert lock.try_take()
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_supervisor_is_listed_with_the_time_of_its_death(served: Served) -> None:
    lock = served.services.store.folder_of("old").flow_lock
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"

            def is_listed() -> bool:
                return any(one["run"] == "old" for one in listed(served, "unsupervised"))

            uid = served.services.store.find_run("old").uid
            watch = served.services.watch
            # At first no run is listed, because the watch has not looked yet.
            wait_for(lambda: (signs := watch.signs(uid)) and signs.supervised_at)
            wait_for(lambda: not is_listed())
            holder.send_signal(signal.SIGKILL)
            wait_for(is_listed)
        finally:
            holder.kill()
    (item,) = [one for one in listed(served, "unsupervised") if one["run"] == "old"]
    since = unix_time(item["since"])
    assert since is not None
    assert abs(time.time() - since) < 120


def test_a_problem_of_a_root_is_acknowledged_in_a_file_of_the_server(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = {"kind": "storage_full", "level": "warn", "text": "full", "since": None}
    full = [(served.root, {**finding, "action": "prune", "mark": ""})]
    monkeypatch.setattr("holdfast.api.capacity.find_full_roots", lambda _: full)
    attention = served.services.attention
    wait_for(lambda: listed(served, "storage_full"))
    (item,) = listed(served, "storage_full")
    assert item["run"] is None
    with served.client() as client:
        client.post(DONE, json={"id": item["id"], "note": ""}).raise_for_status()
    monkeypatch.setattr(attention, "_looked_at", float("-inf"))
    assert listed(served, "storage_full")[0]["acknowledged"]["by"] == "ann"
    file = served.services.tokens.path.with_name(FILE)
    assert "ann" in file.read_text()
    # Once there is room again, the next shortage is a new problem.
    monkeypatch.setattr("holdfast.api.capacity.find_full_roots", lambda _: [])
    monkeypatch.setattr(attention, "_looked_at", float("-inf"))
    assert listed(served, "storage_full") == []
    assert "ann" not in file.read_text()
