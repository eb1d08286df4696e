"""Reading over the API: runs, checkpoints, lineage, logs, metrics and the event stream."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import WAIT_S, Served, wait_for
from tests.support.runs import T0, RunFolder

from holdfast.api.routes import live
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.lineage.queries import run_queries
from holdfast.lineage.queries.formats import dot, mermaid

CHECKPOINT = "gpt:step-00000200.a0003.l01"


@pytest.fixture(scope="module")
def api(served: Served) -> httpx.Client:
    return served.client()


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_run_has_the_fields_that_the_show_command_prints(api: httpx.Client, served: Served) -> None:
    told = get(api, "/runs/gpt")
    shown = run_queries.show_run(served.services.store.index.open(), "gpt")
    assert {key: told[key] for key in shown} == json.loads(json.dumps(shown))
    assert told["on_disk"]
    assert [one["cause"] for one in told["attempts"]] == ["preemption", "node_failure", None]


def test_unreadable_runs_are_listed_with_the_reason(api: httpx.Client, served: Served) -> None:
    names = ["broken-b", "broken-a", os.fsdecode(b"broken-\xff")]
    try:
        for name in names:
            (served.root / name).mkdir()
            (served.root / name / "spec.json").write_text("{")
        wait_for(lambda: len(get(api, "/runs")["unreadable"]) == len(names))
        page = get(api, "/runs", limit=1)
        assert [one["run"] for one in page["unreadable"]] == [
            "broken-a",
            "broken-b",
            "broken-\\udcff",
        ]
        assert page["unreadable"][0]["path"] == str(served.root / "broken-a")
        assert "not a valid RunRecord" in page["unreadable"][0]["reason"]
        assert len(page["items"]) == 1, "unreadable runs hide readable ones"
        assert get(api, "/runs", limit=1, after=page["next"])["unreadable"] == []
        assert get(api, "/runs", state="completed")["unreadable"] == []
        (found,) = get(api, "/runs", search="EN-B")["unreadable"]
        assert found["run"] == "broken-b"
    finally:
        for name in names:
            shutil.rmtree(served.root / name)
    wait_for(lambda: get(api, "/runs")["unreadable"] == [])


def test_pages_of_a_list_neither_repeat_nor_skip_items(api: httpx.Client) -> None:
    whole = get(api, "/runs/gpt/checkpoints", limit=100)["items"]
    found, after = [], None
    for _ in range(len(whole) + 1):
        page = get(api, "/runs/gpt/checkpoints", limit=2, **({"after": after} if after else {}))
        found += page["items"]
        after = page["next"]
        if after is None:
            break
    assert len(whole) == 5
    assert found == whole


def test_runs_are_found_by_state_and_by_name(api: httpx.Client) -> None:
    assert [one["run"] for one in get(api, "/runs")["items"]] == ["gpt-b", "gpt"]
    assert [one["run"] for one in get(api, "/runs", state="completed")["items"]] == ["gpt"]
    assert [one["run"] for one in get(api, "/runs", search="T-B")["items"]] == ["gpt-b"]


def test_ancestry_crosses_forks(api: httpx.Client) -> None:
    line = get(api, "/checkpoints/gpt-b:step-00000150.a0001.l01/ancestry")
    assert [one["step"] for one in line] == [150, 100, 50]
    path = "/api/v1/checkpoints/gpt-b:step-00000150.a0001.l01/ancestry"
    for encoding in ("gzip", "identity"):
        answer = api.get(path, headers={"accept-encoding": encoding})
        assert answer.json() == line
        assert answer.headers.get("content-encoding", "identity") == encoding
        assert answer.headers["vary"] == "Accept-Encoding"


def test_logs_are_read_in_parts_and_symlinks_are_not_followed(
    api: httpx.Client, served: Served
) -> None:
    attempt = served.runs["gpt"].paths.attempt(3)
    log = attempt.rank_log(0, 1, 0)
    make_directory(log.parent)
    log.write_bytes("one\ntwo ü\nthree".encode())
    attempt.rank_log(0, 1, 1).symlink_to("/etc/passwd")
    first = get(api, "/runs/gpt/logs/0", offset=0, limit=10)
    assert first["text"] == "one\n"
    rest = get(api, "/runs/gpt/logs/0", offset=first["next_offset"])
    assert rest["text"] == "two ü\nthree"
    assert rest["next_offset"] == rest["bytes"]
    assert rest["ended"]
    assert api.get("/api/v1/runs/gpt/logs/1").status_code == 404
    assert [one["rank"] for one in get(api, "/runs/gpt/logs")] == [0]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/runs/nix", 404),
        ("/runs/..%2f..%2fetc", 404),
        ("/runs/gpt%00", 404),
        ("/runs?limit=1000000", 422),
        ("/runs?after=%F0%9F", 422),
        ("/runs?state=asleep", 422),
        ("/checkpoints/gpt:nix", 404),
        ("/checkpoints/%2fetc:step-00000001.a0001.l01", 404),
        ("/checkpoints/gpt:step-00000001.a0001.l01", 404),
        ("/runs/gpt/logs/0?attempt=9", 404),
        ("/jobs/nix", 404),
        ("/nix", 404),
    ],
)
def test_error_responses_have_a_message_and_a_status(
    api: httpx.Client, path: str, status: int
) -> None:
    answer = api.get(f"/api/v1{path}")
    assert answer.status_code == status
    assert answer.json()["message"]
    assert answer.json()["status"] == status


def test_commit_event_is_streamed_once_the_index_has_the_checkpoint(
    api: httpx.Client, served: Served
) -> None:
    told: list[dict[str, Any]] = []
    listens = threading.Event()
    done = threading.Event()

    def listen() -> None:
        with served.client() as client, client.stream("GET", "/api/v1/events") as stream:
            for line in stream.iter_lines():
                listens.set()
                if line.startswith("data: "):
                    told.append(json.loads(line[6:]))
                if told and told[-1].get("kind") == "committed":
                    done.set()
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert listens.wait(WAIT_S)
    fork = served.runs["gpt-b"]
    name = fork.commit(160, 1, parent="gpt-b:step-00000150.a0001.l01", at=time.time())
    assert done.wait(WAIT_S)
    assert told[-1]["uid"] == fork.uid
    assert told[-1]["data"]["checkpoint"] == name
    # The event is sent only after the index has the rows.
    assert get(api, f"/checkpoints/gpt-b:{name}")["step"] == 160
    thread.join(WAIT_S)


def test_run_whose_folder_vanished_is_still_listed(
    api: httpx.Client, served: Served, tmp_path: Path
) -> None:
    directory = served.runs["gpt-b"].paths.directory
    directory.rename(tmp_path / "away")
    try:
        assert get(api, "/runs/gpt-b")["on_disk"] is False
        gone = api.post("/api/v1/runs/gpt-b/stop", json={})
        assert gone.status_code == 404
        assert "not mounted" in gone.json()["message"]
    finally:
        (tmp_path / "away").rename(directory)


def test_attempts_are_exported_as_openlineage_runs(api: httpx.Client) -> None:
    events = get(api, "/runs/gpt/openlineage")
    kinds = [(event["eventType"], len(event.get("outputs", []))) for event in events]
    endings = [("ABORT", 3), ("FAIL", 1), ("COMPLETE", 1)]
    assert kinds == [one for ending in endings for one in (("START", 0), ending)]
    parents = {event["run"]["facets"]["parent"]["run"]["runId"] for event in events}
    assert parents == {str(uuid.UUID("a" * 32))}
    assert len({event["run"]["runId"] for event in events}) == 3
    (origin,) = get(api, "/runs/gpt-b/openlineage")[0]["inputs"]
    assert origin["name"].endswith("/gpt/checkpoints/step-00000100.a0001.l01")
    assert origin["facets"]["version"]["datasetVersion"]


def test_lineage_graph_is_written_as_mermaid_and_dot(served: Served) -> None:
    graph = served.services.store.lineage("gpt")
    drawn = mermaid(graph)
    assert len(re.findall(r"^  n\d+[(\[]", drawn, re.MULTILINE)) == len(graph["nodes"])
    assert drawn.count("-->") == len(graph["edges"])
    assert "|forked from|" in drawn
    written = dot(graph)
    assert written.count(" -> ") == len(graph["edges"])
    strange = {"nodes": [{"id": 'a"b<\\n', "kind": "run"}], "edges": []}
    assert "a&quot;b&lt;" in mermaid(strange)
    assert r'"a\"b<\\n"' in dot(strange)


def test_grafana_dashboard_uses_only_existing_metrics(api: httpx.Client) -> None:
    dashboard = Path(__file__).parents[2] / "infra" / "grafana" / "holdfast.json"
    asked = set(re.findall(r"holdfast_\w+", dashboard.read_text()))
    there = set(re.findall(r"^# TYPE (\w+)", api.get("/metrics").text, re.MULTILINE))
    assert {name.removesuffix("_bucket") for name in asked} <= there


def test_metrics_nodes_storage_and_comparison_are_returned(api: httpx.Client) -> None:
    compared = get(api, "/compare", a=CHECKPOINT, b="gpt-b:step-00000150.a0001.l01")
    assert compared["common_ancestor"] == "gpt:step-00000100.a0001.l01"
    assert {one["host"] for one in get(api, "/nodes")["items"]} == {"node-a"}
    assert get(api, "/nodes/node-a")["faults"]
    assert {one["run"] for one in get(api, "/storage")["items"]} == {"gpt", "gpt-b"}
    assert isinstance(get(api, "/runs/gpt/metrics", name="loss", points=10), list)
    told = get(api, f"/checkpoints/{CHECKPOINT}")
    assert [one["path"] for one in told["manifest_files"]] == ["__0_0.distcp"]
    assert told["manifest"]["step"] == 200


def test_a_checkpoint_is_also_found_by_a_word(api: httpx.Client) -> None:
    listed = get(api, "/runs/gpt-b/checkpoints")["items"]
    assert get(api, "/checkpoints/gpt-b:latest")["step"] == max(one["step"] for one in listed)
    assert get(api, "/checkpoints/gpt-b:step-150")["id"] == "gpt-b:step-00000150.a0001.l01"
    refused = api.get("/api/v1/checkpoints/gpt-b:best")
    assert refused.status_code == 404
    assert "checkpoint.keep.best" in refused.json()["message"]


def test_health_and_prometheus_metrics_are_returned(api: httpx.Client) -> None:
    assert api.get("/healthz").json()["ok"]
    figures = api.get("/metrics").text
    assert 'holdfast_runs{state="completed"} 1.0' in figures
    assert 'holdfast_run_ranks{run="gpt-b"' in figures
    assert "Holdfast" in api.get("/").text


def test_staged_committed_verified_and_mirrored_states_are_distinct(
    api: httpx.Client, served: Served
) -> None:
    fork = served.runs["gpt-b"]
    parent = "gpt-b:step-00000150.a0001.l01"
    mirrored, staged = "step-00000150.a0001.l01", "step-00000170.a0001.l01"
    fork.tell("node-0", EventKind.MIRRORED, checkpoint=mirrored, step=150, url="s3://a/b")
    fork.tell("rank0", EventKind.STAGED, checkpoint=staged, step=170, bytes=18, blocked_s=0.1)

    def node(name: str) -> dict[str, Any]:
        graph = get(api, "/runs/gpt-b/lineage")
        return next((one for one in graph["nodes"] if one["id"] == f"gpt-b:{name}"), {})

    wait_for(lambda: node(staged).get("state") == "staged" and node(mirrored).get("mirrored"))
    assert not node(mirrored)["verified"]
    edges = get(api, "/runs/gpt-b/lineage")["edges"]
    assert [one["kind"] for one in edges if one["from"] == f"gpt-b:{staged}"] == ["parent"]

    job = api.post(f"/api/v1/checkpoints/{parent}/verify", json={}).json()
    wait_for(lambda: get(api, f"/jobs/{job['id']}")["state"] == "done")
    wait_for(lambda: node(mirrored).get("verified"))
    told = get(api, f"/checkpoints/{parent}")
    assert (told["verified_ok"], told["verified_by"]) == (True, "ann")
    assert told["mirrored_at"] > told["committed_at"]
    (row,) = get(api, "/runs/gpt-b/checkpoints", step_from=150, step_to=150)["items"]
    assert row["verified_at"] == told["verified_at"]
    fork.commit(170, 1, parent=parent, at=time.time())
    wait_for(lambda: node(staged).get("state") == "committed")


def test_an_unhealthy_node_is_an_event_and_an_alert(api: httpx.Client, served: Served) -> None:
    facts = {"attempt": 1, "host": "n7", "check": "ready", "detail": "GPU 3 has 2 memory errors"}
    served.runs["gpt-b"].tell("node-0000", EventKind.NODE_UNHEALTHY, **facts)

    def alerts() -> list[dict[str, Any]]:
        told = get(api, "/runs/gpt-b")["noticed"]
        return [one for one in told if one["kind"] == "node_unhealthy"]

    wait_for(alerts)
    (alert,) = alerts()
    assert alert["text"] == "n7 is unhealthy: ready: GPU 3 has 2 memory errors"
    events = get(api, "/runs/gpt-b/events", limit=500)["items"]
    (event,) = [one for one in events if one["kind"] == "node_unhealthy"]
    assert {name: event["data"][name] for name in ("host", "check", "detail")} == {
        name: facts[name] for name in ("host", "check", "detail")
    }
    assert event["attempt"] == 1


def test_responses_are_compressed_and_the_event_stream_is_not(api: httpx.Client) -> None:
    packed = {"Accept-Encoding": "gzip"}
    listed = api.get("/api/v1/runs/gpt/events", headers=packed)
    assert listed.headers["content-encoding"] == "gzip"
    assert "accept-encoding" in listed.headers["vary"].lower()
    plain = api.get("/api/v1/runs/gpt/events", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.json() == listed.json()
    assert int(listed.headers["content-length"]) < len(plain.content) / 2
    with api.stream("GET", "/api/v1/events", headers=packed) as stream:
        assert "content-encoding" not in stream.headers
        # The first line arrives at once, before anything follows it.
        assert next(stream.iter_lines()).startswith("event: ")


def test_quiet_event_stream_sends_ping_events(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PING_S", 0.05)
    with api.stream("GET", "/api/v1/events") as stream:
        assert any(line == "event: ping" for line in stream.iter_lines())


def test_timeline_parts_add_up_to_the_goodput_account(api: httpx.Client) -> None:
    told = get(api, "/runs/gpt-b")
    drawn: dict[str, float] = {}
    for one in get(api, "/runs/gpt-b/timeline"):
        began, ended = (datetime.fromisoformat(one[key]) for key in ("began_at", "ended_at"))
        drawn[one["part"]] = drawn.get(one["part"], 0.0) + (ended - began).total_seconds()
    assert drawn
    for part, seconds in drawn.items():
        assert seconds == pytest.approx(told["goodput"][f"{part}_s"], abs=5.0), part


def test_live_run_shows_pending_requests_and_its_supervisor(
    api: httpx.Client, served: Served
) -> None:
    run = served.runs["gpt-b"]
    run.tell("flow", EventKind.SUPERVISED, host=socket.gethostname(), pid=7, flow_run="")
    run.tell(
        "cli", EventKind.OPERATOR_REQUEST, action="pause", by="mia", gpus=None, after_attempt=1
    )
    wait_for(lambda: get(api, "/runs/gpt-b")["requests"])
    told = get(api, "/runs/gpt-b")
    assert [(one["action"], one["by"]) for one in told["requests"]] == [("pause", "mia")]
    # A supervisor may just be starting.
    assert told["supervision"] == {
        "is_alive": None,
        "is_remote": False,
        "host": socket.gethostname(),
        "pid": 7,
    }
    with FlowLock(run.paths.flow_lock) as lock:
        assert lock.try_take()
        assert get(api, "/runs/gpt-b")["supervision"]["is_alive"] is True


def test_a_supervisor_that_began_and_is_gone_is_not_about_to_start(
    api: httpx.Client, served: Served
) -> None:
    young = RunFolder(served.root, "young", "6" * 32, created_at=time.time())
    try:
        young.submit(1, 2, time.time())
        wait_for(lambda: api.get("/api/v1/runs/young").status_code == 200)
        assert get(api, "/runs/young")["supervision"]["is_alive"] is None
        young.tell("flow", EventKind.SUPERVISED, host=socket.gethostname(), pid=7, flow_run="")
        wait_for(lambda: get(api, "/runs/young")["supervision"]["is_alive"] is False, 10)

        def listed() -> set[tuple[str, str]]:
            return {(one["run"], one["kind"]) for one in get(api, "/attention")}

        wait_for(lambda: ("young", "unsupervised") in listed(), 10)
    finally:
        shutil.rmtree(young.paths.directory)


def test_a_run_names_the_sizes_that_its_newest_checkpoint_fits(
    api: httpx.Client, served: Served
) -> None:
    elastic = {"resources": {"gpus_per_node": 4}, "elastic": {"min_gpus": 1, "max_gpus": 4}}
    made = RunFolder(served.root, "sized", "5" * 32, elastic)
    try:
        made.submit(1, 4, T0)
        made.commit(10, 1, world_size=4, topology={"mesh": {}, "global_batches": [8]})
        wait_for(lambda: api.get("/api/v1/runs/sized").json().get("step") == 10)
        assert get(api, "/runs/sized")["gpus_fitting"] == [1, 2, 4]
        made.commit(20, 1, world_size=4, topology={"mesh": {}, "fixed": "of each rank"})
        wait_for(lambda: get(api, "/runs/sized")["step"] == 20)
        shown = get(api, "/runs/sized")
        assert (shown["gpus_fitting"], shown["gpus_min"], shown["gpus_max"]) == ([4], 1, 4)
        made.commit(30, 1, world_size=4, topology={"mesh": {}})
        wait_for(lambda: get(api, "/runs/sized")["step"] == 30)
        assert get(api, "/runs/sized")["gpus_fitting"] is None
    finally:
        shutil.rmtree(made.paths.directory)
