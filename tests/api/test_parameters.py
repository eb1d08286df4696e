"""Each parameter of each route: set, with its effect, and with bad values.

The parameters are those of the OpenAPI document and of the page's routes. One without a row fails
the test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, get_args
from urllib.parse import quote, urlencode

import httpx
import pytest
import torch
from fastapi.routing import APIRoute
from safetensors.torch import load_file
from tests.api.conftest import Served, serving, wait_for
from tests.api.filter_rows import (
    ORDERS,
    comparison_rows,
    curve_rows,
    filter_rows,
    group_rows,
    lineage_rows,
    metric_rows,
    of_total,
    table_rows,
)
from tests.api.log_parameters import (
    LOG,
    download_rows,
    log_file_rows,
    log_part_rows,
    log_rows,
    log_search_rows,
)
from tests.api.mark_parameters import (
    NEWEST,
    OTHER,
    acknowledge_rows,
    annotate_rows,
    pin_rows,
    report_rows,
    unpin_rows,
)
from tests.api.series_parameters import gpu_rows, heat_rows
from tests.support.runs import T0, RunFolder, build_sample_runs, file_checksum
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.api.app import create_app
from holdfast.api.routes import page
from holdfast.api.routes.checkpoints import FORK_KEYS
from holdfast.api.sessions import LoginThrottle
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.records.documents import StopFile, read_document
from holdfast.contracts.records.history import load_events, load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.lineage.queries.pages import RunSort

API: Final = "/api/v1"
OLDEST: Final = "gpt:step-00000050.a0001.l01"
LOGS: Final = ((1, 1, "stdout"), (3, 1, "stdout"), (3, 2, "stdout"), (3, 2, "stderr"))
WEIGHTS: Final = "weights:step-00000010.a0001.l01"
Facts = dict[str, bool]

# What a call needs besides the parameter that a row sets.
NEEDED: Final[Mapping[str, Any]] = {
    "path:run": "gpt",
    "path:checkpoint": NEWEST,
    "path:rank": 0,
    "path:host": "node-a",
    "path:job": "none",
    "path:path": "",
    "query:a": NEWEST,
    "query:b": OTHER,
    "query:file": LOG,
    "query:run": "gpt",
    "query:text": "rank",
    "body:to": "dcp",
    "body:id": "nothing",
    "body:name": "gpt-c",
    "body:metrics": {"accuracy": 0.5},
    "body:add": ["new"],
    "body:token": "hold_none",
}
LONG: Final = "x" * 5000
# Values that a parameter refuses, with its route where it matters. The answer is a problem with a
# status from 400 to 499, whose message names the parameter, or for a path the value.
NUMBERS: Final = (0, -1, 1.5, "many", 10**30, "")
SWITCHES: Final = ("maybe", 2, "", "x")
JSON_SWITCHES: Final[tuple[Any, ...]] = (None, 0, "yes", "no", [], {})
BAD: Final[Mapping[str, tuple[Any, ...]]] = {
    "path:run": ("nobody", "gpt b", "gpt\0", LONG[:121]),
    "path:checkpoint": ("gpt", "gpt:nix", "gpt:step-00000001.a0001.l01", "..:latest", LONG[:251]),
    "path:rank": (-1, 7, "x", 10**30),
    "path:host": ("nobody", "node-a\0", LONG[:256]),
    "path:job": ("nobody", "\0"),
    "GET /{path} path:path": ("api/v1/nix", "assets/nix.js"),
    "query:state": ("asleep", "", "COMPLETED"),
    "query:search": (LONG[:201], "gpt\0"),
    "query:created_from": (-1, "nan", "inf", "soon", "", 1e13),
    "query:created_to": (-1, "nan", "inf", "soon", "", 1e13),
    "query:created_within": (0, -1, "nan", "soon", "", 1e13),
    "query:user": ("", LONG[:201], "ann\0"),
    "query:cause": ("bad luck", "", "HANG"),
    "query:partition": ("", LONG[:201], "a100\0"),
    "query:account": ("", LONG[:201], "vision\0"),
    "query:tag": ("", "a b", LONG[:65], "-a", "night\0"),
    "query:attention": SWITCHES,
    "query:by": ("color", "", "USER"),
    "query:format": ("xml", "", "CSV"),
    "query:sort": ("size", "", "CREATED"),
    "query:order": ("up", "", "ASC"),
    "query:after": ("", "x", "WyJhIl0", "\0", LONG),
    "query:limit": (*NUMBERS, 501),
    "GET /api/v1/runs/{run}/logs/{rank} query:limit": (*NUMBERS, 2**20 + 1),
    "GET /api/v1/runs/{run}/log-files/part query:limit": (*NUMBERS, 2**20 + 1),
    "query:file": ("", "nix", "../gpt/flow.log", "spec.json", "/etc/passwd", "flow.log\0", LONG),
    "query:text": ("a\nb", "\0", LONG),
    "query:errors": SWITCHES,
    "query:rank": (-1, 1.5, "x", "", 10**30),
    "query:folded": SWITCHES,
    "query:opened": ("fold\0", LONG),
    "query:pinned": SWITCHES,
    "query:newest_first": SWITCHES,
    "query:step_from": (-1, 1.5, "x", "", 10**30),
    "query:step_to": (-1, 1.5, "x", "", 10**30),
    "query:kind": ("nonsense", "", "COMMITTED", "committed\0"),
    "query:attempt": NUMBERS,
    "query:name": ("loss\0", LONG[:101]),
    "query:points": (*NUMBERS, 10_001),
    "query:stream": ("stdin", ""),
    "query:launch": NUMBERS,
    "query:offset": (-1, 1.5, "x", "", 10**30),
    "query:before": (-1, 1.5, "x", "", 10**30),
    "query:value": ("loss", "", "STEP"),
    "query:rank_from": (-1, 1.5, "x", "", 10**7, 10**30),
    "query:rank_to": (-1, 1.5, "x", "", 4096, 10**7, 10**30),
    "query:time_from": (-1, "nan", "inf", "soon", "", 1e13),
    "query:time_to": (-1, "nan", "inf", "soon", "", 1e13),
    "query:buckets": (*NUMBERS, 1001),
    "query:node": (-1, 1.5, "x", "", 10**6, 10**30),
    "query:a": ("gpt", "gpt:nix", "", LONG[:251]),
    "query:b": ("gpt", "gpt:nix", "", LONG[:251]),
    "query:run": ("", "nobody", "../gpt", LONG[:121], ["gpt"] * 9),
    "query:token": (LONG[:201],),
    "header:last-event-id": (LONG[:101],),
    f"GET {API}/events query:after": (LONG[:101],),
    "body:force": JSON_SWITCHES,
    "body:now": JSON_SWITCHES,
    "body:dry_run": JSON_SWITCHES,
    "body:gpus": (0, -1, 1.5, "4", True, [], 10**30),
    "body:note": (5, None, [], LONG),
    "body:add": ("a", [""], ["a b"], [5], None, [LONG[:65]], [f"t{n}" for n in range(33)]),
    "body:remove": ("a", [""], ["a b"], [5], None, [LONG[:65]], [f"t{n}" for n in range(33)]),
    "body:id": ("", "nothing", 5, None, [], "a\0", LONG + "x"),
    "body:metrics": (5, None, [], {}, {"a": "high"}, {"a": True}, {"a": None}, {"": 1}),
    "body:to": ("zip", "", None, "DCP"),
    "body:include": ("model", [""], ["--output"], [5], ["a"] * 51),
    "body:dtype": ("int8", "", 16, "FLOAT16"),
    "body:name": ("", "../x", "gpt c", 5, None, LONG[:101]),
    "body:set": (
        [],
        {"command": "x"},
        {"resources.nodes": None},
        {"resources.nodes": 0},
        {"resources.nodes": "many"},
        {"checkpoint.interval": "1\n2"},
    ),
    "body:token": ("", "hold_wrong", 5, None, LONG[:201]),
}
# The identities that a path names; an answer to a wrong one repeats it.
IDENTITIES: Final = {"path:run", "path:checkpoint", "path:host", "path:job", "path:path"}


@dataclass(frozen=True)
class World:
    """A server with the sample runs, a live run for each order, and a run with real weights."""

    served: Served
    client: httpx.Client

    def call(self, route: str, more: str = "", **given: Any) -> httpx.Response:
        """Call a route, such as `GET /nodes`, with the parameters `given` and the query `more`."""
        method, path = route.split(" ")
        parts: dict[str, dict[str, Any]] = {"path": {}, "query": {}, "header": {}, "body": {}}
        for name in OPERATIONS[route]:
            where, _, key = name.partition(":")
            if key in given or name in NEEDED:
                parts[where][key] = given.pop(key, NEEDED.get(name))
        assert not given
        for key, value in parts["path"].items():
            path = path.replace(f"{{{key}}}", quote(str(value), safe="/" if key == "path" else ""))
        query = "&".join(filter(None, (more, urlencode(parts["query"], doseq=True))))
        sent = {"json": parts["body"]} if method == "POST" else {}
        return self.send(method, f"{path}?{query}", headers=parts["header"], **sent)

    def send(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """Send a request. An answer that never ends is not read."""
        with self.client.stream(method, path, **sent) as answer:
            if not answer.headers["content-type"].startswith("text/event-stream"):
                answer.read()
        return answer

    def get(self, route: str, **given: Any) -> Any:
        answer = self.call(f"GET {API}{route}", **given)
        assert answer.status_code == 200, (route, given, answer.text)
        return answer.json()

    def post(self, route: str, status: int = 200, **given: Any) -> Any:
        answer = self.call(f"POST {API}{route}", **given)
        assert answer.status_code == status, (route, given, answer.text)
        return answer.json()

    def paths(self, run: str) -> RunPaths:
        return RunPaths(self.served.root / run)

    def told(self, run: str, kind: EventKind) -> dict[str, Any]:
        """The newest line of a kind in a run's journal."""
        return [one.data for one in load_events(self.paths(run)) if one.kind is kind][-1]

    def differs(self, route: str, name: str, one: Any, other: Any) -> bool:
        return bool(self.get(route, **{name: one}) != self.get(route, **{name: other}))

    def done(self, job: dict[str, Any]) -> dict[str, Any]:
        """A job's row once it has ended."""
        wait_for(lambda: self.get("/jobs/{job}", job=job["id"])["ended_at"])
        found: dict[str, Any] = self.get("/jobs/{job}", job=job["id"])
        return found


def make_runs(root: Path) -> None:
    """The sample runs with logs, a live run for each order, a run to prune, and real weights."""
    for _ in build_sample_runs(root):
        pass
    for attempt, launch, stream in LOGS:
        for rank in (0, 1):
            log = RunPaths(root / "gpt").attempt(attempt).rank_log(0, launch, rank)
            log.parent.mkdir(parents=True, exist_ok=True)
            log = log.with_name(log.name.replace("stdout", stream))
            log.write_text(f"attempt {attempt} launch {launch}\nrank {rank} {stream}\n")
    fields: dict[str, Any] = {"resources": {"gpus_per_node": 2}, "elastic": {"min_gpus": 1}}
    for number, name in enumerate(ORDERS):
        made = RunFolder(root, f"o-{name}", f"{number:032x}", fields, created_at=T0 - 99)
        made.submit(1, 2, T0)
        made.claim(1, T0 + 1)
    made = RunFolder(root, "pruned", "8" * 32, {"checkpoint": {"keep": {"last": 1}}})
    made.submit(1, 2, T0)
    for step in (10, 20, 30):
        made.commit(step, 1)
    where_to = {"partition": "a100", "account": "vision"}
    slurm: dict[str, Any] = {"resources": {"executor": "slurm", **where_to}}
    slurm["tags"] = ["llm", "night"]
    made = RunFolder(root, "preempted", "7" * 32, slurm, created_by="eve")
    made.submit(1, 2, T0)
    made.claim(1, T0 + 1)
    made.finish(1, AttemptState.PREEMPTED, Cause.PREEMPTION, 5, T0 + 9)
    program = {"launch": {"working_directory": str(root.parent)}}
    (root.parent / "train.py").touch()
    made, parent = RunFolder(root, "chain", "c" * 32), None
    made.submit(1, 2, T0)
    for step in range(10, 100, 10):
        parent = f"chain:{made.commit(step, 1, parent=parent)}"
    made = RunFolder(root, "weights", "9" * 32, program)
    made.submit(1, 1, T0)
    made.claim(1, T0 + 1, "node-b")
    where = made.paths.checkpoint(made.commit(10, 1, world_size=1))
    state = {"model": {"a": torch.ones(2), "b": torch.zeros(2)}, "lr": 0.5}
    save_with_dcp(state, checkpoint_id=where, no_dist=True)
    record = json.loads((where / MANIFEST).read_text())
    record["files"] = [
        {"path": one.name, "bytes": one.stat().st_size, "checksum": file_checksum(one)}
        for one in sorted(where.iterdir())
        if one.name != MANIFEST
    ]
    (where / MANIFEST).write_text(json.dumps(record))


def parameters() -> dict[str, dict[str, Any]]:
    """Each route, as `GET /path`, with the definitions of its parameters by name."""
    services: Any = SimpleNamespace(access_policy=None, measures=SimpleNamespace(answered=None))
    document = create_app(services).openapi()
    schemas = document["components"]["schemas"]
    found: dict[str, dict[str, Any]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            mine = {f"{one['in']}:{one['name']}": one for one in operation.get("parameters", ())}
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                body = schemas[schema["$ref"].rpartition("/")[2]]
                mine |= {f"body:{name}": one for name, one in body.get("properties", {}).items()}
            found[f"{method.upper()} {path}"] = mine
    for route in page.router.routes:
        assert isinstance(route, APIRoute)
        mine = {f"path:{one.alias}": {} for one in route.dependant.path_params}
        mine |= {f"query:{one.alias}": {} for one in route.dependant.query_params}
        found[f"GET {route.path.replace(':path', '')}"] = mine
    return found


OPERATIONS: Final = parameters()


@pytest.fixture(scope="module")
def world(home: Path, patched: pytest.MonkeyPatch) -> Iterator[World]:
    (home / "runs").mkdir()
    (home / "static" / "assets").mkdir(parents=True)
    (home / "static" / "index.html").write_text("the page")
    (home / "static" / "assets" / "mark.svg").write_text("<svg/>")
    patched.setattr(page, "STATIC", home / "static")
    make_runs(home / "runs")
    # The edge: no supervisor is started.
    patched.setattr("holdfast.cli.serve.start_run", lambda *_: {})
    patched.setattr("holdfast.cli.serve.check_secrets", lambda *_: None)
    with serving(home, {}, start=lambda *_: {}) as one, one.client() as client:
        wait_for(lambda: one.services.watch.lag_s() is not None)
        # The round after the first one knows which runs have no supervisor.
        wait_for(lambda: "preempted" in {i["run"] for i in client.get("/api/v1/attention").json()})
        yield World(one, client)


def run_rows(w: World, route: str, key: str = "run") -> Facts:
    """The parameters of a list of runs."""

    def names(**given: Any) -> list[str]:
        return [one[key] for one in w.get(route, **given)["items"]]

    every, first = names(), w.get(route, limit=3)
    found = {
        "query:sort": names(sort="name") == sorted(every) != every,
        "query:order": all(
            names(sort=one, order="asc") == names(sort=one, order="desc")[::-1]
            for one in get_args(RunSort)
        ),
        "query:after": names(limit=3, after=first["next"]) == every[3:6],
        "query:limit": [one[key] for one in first["items"]] == every[:3],
    }
    return found | filter_rows(names)


def checkpoint_rows(w: World) -> Facts:
    route = "/runs/{run}/checkpoints"

    def steps(**given: Any) -> list[int]:
        return [one["step"] for one in w.get(route, **given)["items"]]

    first = w.get(route, limit=2)
    return {
        "path:run": steps() != steps(run="gpt-b"),
        "query:state": steps(state="deleted") == [120],
        "query:pinned": (steps(pinned=True), 50 in steps(pinned=False)) == ([50], False),
        "query:step_from": steps(step_from=150) == [150, 200],
        "query:step_to": steps(step_to=100) == [50, 100],
        "query:newest_first": steps(newest_first=True) == steps()[::-1],
        "query:after": steps(limit=2, after=first["next"]) == steps()[2:4],
        "query:limit": len(first["items"]) == 2,
    }


def event_rows(w: World) -> Facts:
    route = "/runs/{run}/events"

    def lines(**given: Any) -> list[dict[str, Any]]:
        return list(w.get(route, **{"limit": 500} | given)["items"])

    every, first = lines(), w.get(route, limit=2)
    return {
        "path:run": every != lines(run="gpt-b"),
        "query:kind": {one["kind"] for one in lines(kind=["pinned", "forked"])}
        == {"pinned", "forked"},
        "query:attempt": {one["attempt"] for one in lines(attempt=2)} == {2},
        "query:newest_first": lines(newest_first=False) == every[::-1],
        "query:after": lines(limit=2, after=first["next"]) == every[2:4],
        "query:limit": first["items"] == every[:2],
    }


def node_rows(w: World) -> Facts:
    def hosts(**given: Any) -> list[str]:
        return [one["host"] for one in w.get("/nodes", **given)["items"]]

    first = w.get("/nodes", limit=1)
    return {
        "query:after": hosts(after=first["next"]) == ["node-b"],
        "query:limit": [one["host"] for one in first["items"]] == ["node-a"],
    }


def stream_rows(w: World) -> Facts:
    """The event stream of one run, and after an event."""

    def read(*until: str, last: str = "", **given: Any) -> list[str]:
        """The lines until each text of `until` was seen."""
        seen: list[str] = []
        headers = {"Last-Event-ID": last} if last else {}
        with w.client.stream("GET", f"{API}/events", params=given, headers=headers) as stream:
            for line in stream.iter_lines():
                seen.append(line)
                if all(any(one in line for line in seen) for one in until):
                    return seen
        raise AssertionError(seen)

    hello = read("id: ", "data: ")
    newest = next(line for line in hello if line.startswith("id: "))[4:]
    for run in ("weights", "gpt-b"):
        with JournalWriter(w.paths(run).journal_of("cli")) as journal:
            journal.append(EventKind.NOTE, text=f"about {run}")
    read("about weights", "about gpt-b", last=newest)
    both = read("about weights", "about gpt-b", after=newest)
    one, other = (read(f"about {run}", last=newest, run=run) for run in ("weights", "gpt-b"))
    # A browser that reconnects repeats the address with its first `after`.
    again = read("id: ", "data: ", after="0-0", last=newest)
    return {
        "query:run": "about gpt-b" not in str(one) and "about weights" not in str(other),
        "query:after": "event: hello" not in both and "event: reset" not in again,
        "header:last-event-id": "event: hello" in hello and "event: hello" not in one,
    }


def order_rows(w: World, action: str) -> Facts:
    """An order to a live run: the file for its agent, and what a second order gets."""
    run, before = f"o-{action}", "pause" if action in {"stop", "resume"} else "stop"
    w.post(f"/runs/{{run}}/{before}", run=run)
    route = f"/runs/{{run}}/{action}"
    given = {"relaunch": {"gpus": 1}}.get(action, {})
    w.post(route, 409, run=run, force=False, **given)
    done = w.post(route, run=run, force=True, **given)
    order = w.told(run, EventKind.OPERATOR_REQUEST)
    found = {"path:run": done["run"] == run, "body:force": order["action"] == action}
    if action == "relaunch":
        found["body:gpus"] = (done["gpus"], order["gpus"]) == (1, 1)
    if action == "cancel":
        stop = w.paths(run).attempt(1).stop
        waits = read_document(StopFile, stop)
        w.post(route, run=run, now=True)
        ends = read_document(StopFile, stop)
        assert waits is not None
        assert ends is not None
        found["body:now"] = (waits.deadline_s, ends.deadline_s) == (None, 0.0)
    return found


def prune_rows(w: World) -> Facts:
    route, paths = "/runs/{run}/prune", w.paths("pruned")
    planned = w.post(route, run="pruned")
    there = len(paths.list_checkpoints())
    done = w.post(route, run="pruned", dry_run=False)
    return {
        "path:run": planned["run"] == "pruned",
        "body:dry_run": planned["deleted"] == done["deleted"] != []
        and (there, len(paths.list_checkpoints())) == (3, 1),
    }


def verify_rows(w: World) -> Facts:
    job = w.done(w.post("/checkpoints/{checkpoint}/verify", 202, checkpoint=OTHER))
    return {"path:checkpoint": job["about"] == OTHER and job["result"]["ok"]}


def export_rows(w: World) -> Facts:
    route = "/checkpoints/{checkpoint}/export"
    given = {"to": "safetensors", "include": ["model.a"], "dtype": "bfloat16"}
    job = w.done(w.post(route, 202, checkpoint=WEIGHTS, **given))
    assert job["state"] == "done", job
    path = Path(job["result"]["path"])
    (value,) = (found := load_file(path)).values()
    return {
        "path:checkpoint": job["about"].startswith(f"{WEIGHTS} as "),
        "body:to": path.suffix == ".safetensors",
        "body:include": len(found) == 1 and bool(value.sum() == 2),
        "body:dtype": value.dtype == torch.bfloat16,
    }


def fork_rows(w: World) -> Facts:
    """A fork that changes every key that a fork over HTTP may change."""
    changed: dict[str, Any] = {
        "resources.nodes": 1,
        "resources.gpus_per_node": 2,
        "resources.time_limit_min": 90,
        "elastic.min_gpus": 1,
        "elastic.max_gpus": 2,
        "checkpoint.interval": "5m",
        "checkpoint.budget": "500GB",
        "checkpoint.keep.last": 3,
        "checkpoint.keep.every_steps": 100,
        "checkpoint.keep.doubling_steps": 1,
        "checkpoint.keep.every_hours": 6,
        "checkpoint.keep.ttl": "7d",
        "cost.gpu_hour": 2.5,
        "cost.on_demand_per_gpu_hour": 4.5,
        "cost.currency": "EUR",
    }
    assert changed.keys() == FORK_KEYS
    route = "/checkpoints/{checkpoint}/fork"
    done = w.post(route, 201, checkpoint=WEIGHTS, name="forked", set=changed)
    spec = load_history(RunPaths(Path(done["directory"]))).spec
    read = {key: attrgetter(key)(spec) for key in changed}
    plain = RunSpec(name="forked", command=("train.py",))
    same = {key for key in changed if attrgetter(key)(plain) == read[key]}
    return {
        "path:checkpoint": done["forked_from"] == WEIGHTS,
        "body:name": spec.name == "forked" and w.paths("forked").spec.is_file(),
        "body:set": same <= {"resources.nodes"} and read["cost.gpu_hour"] == 2.5,
    }


def job_rows(w: World) -> Facts:
    jobs = [w.post("/checkpoints/{checkpoint}/verify", 202, checkpoint=c) for c in (OLDEST, OTHER)]
    return {"path:job": [w.done(one)["about"] for one in jobs] == [OLDEST, OTHER]}


def log_in_rows(w: World) -> Facts:
    return {"body:token": w.post("/session", token=w.served.token)["name"] == "ann"}


def page_rows(w: World) -> Facts:
    answers = [w.call("GET /{path}", path=one) for one in ("assets/mark.svg", "runs/gpt")]
    return {"path:path": [one.text for one in answers] == ["<svg/>", "the page"]}


def open_rows(w: World) -> Facts:
    with w.served.stranger() as client:
        answer = client.get("/", params={"token": w.served.token})
    return {"query:token": "set-cookie" in answer.headers and answer.headers["location"] == "/"}


def of_run(route: str) -> Callable[[World], Facts]:
    """The row of a route whose only parameter is a run."""
    return lambda w: {"path:run": w.differs(route, "run", "gpt", "gpt-b")}


def of_attempt(route: str) -> Callable[[World], Facts]:
    return lambda w: {
        "path:run": w.differs(route, "run", "gpt", "o-stop"),
        "query:attempt": w.differs(route, "attempt", 1, 3),
    }


READS: Final = ("", "/attempts", "/openlineage", "/goodput", "/timeline", "/storage")
GETS: Final[Mapping[str, Callable[[World], Facts]]] = {
    **{f"/runs/{{run}}{one}": of_run(f"/runs/{{run}}{one}") for one in READS},
    "/runs": lambda w: run_rows(w, "/runs"),
    "/runs/{run}/capacity": lambda w: {
        # No Slurm answers here, and the local executor knows this machine.
        "path:run": (w.get("/runs/{run}/capacity", run="preempted")["where"], "local")
        == ("partition a100", w.get("/runs/{run}/capacity", run="weights")["where"])
    },
    "/runs/{run}/checkpoints": checkpoint_rows,
    "/runs/{run}/events": event_rows,
    "/runs/{run}/metrics": metric_rows,
    "/runs/{run}/heartbeats": of_attempt("/runs/{run}/heartbeats"),
    "/runs/{run}/errors": of_attempt("/runs/{run}/errors"),
    "/runs/{run}/heat-map": heat_rows,
    "/runs/{run}/gpus": gpu_rows,
    "/runs/{run}/logs": of_attempt("/runs/{run}/logs"),
    "/runs/{run}/lineage": lineage_rows,
    "/runs/{run}/logs/{rank}": log_rows,
    "/runs/{run}/log-files": log_file_rows,
    "/runs/{run}/log-files/part": log_part_rows,
    "/runs/{run}/log-files/search": log_search_rows,
    "/runs/{run}/log-files/download": download_rows,
    "/checkpoints/{checkpoint}": lambda w: {
        "path:checkpoint": w.differs("/checkpoints/{checkpoint}", "checkpoint", OLDEST, NEWEST)
    },
    "/checkpoints/{checkpoint}/ancestry": lambda w: {
        "path:checkpoint": len(w.get("/checkpoints/{checkpoint}/ancestry", checkpoint=OTHER)) == 3
    },
    "/compare": lambda w: {
        f"query:{one}": w.differs("/compare", one, OLDEST, WEIGHTS) for one in ("a", "b")
    },
    "/nodes": node_rows,
    "/nodes/{host}": lambda w: {
        "path:host": w.differs("/nodes/{host}", "host", "node-a", "node-b")
    },
    "/storage": lambda w: run_rows(w, "/storage"),
    "/storage/totals": of_total("/storage/totals"),
    "/goodput": of_total("/goodput"),
    "/jobs/{job}": job_rows,
    "/session": lambda _: {},
    "/attention": lambda _: {},
    "/filters": lambda _: {},
    "/queue": lambda _: {},
    "/goodput/groups": group_rows,
    "/tables/runs": table_rows,
    "/tables/curves": curve_rows,
    "/compare/runs": comparison_rows,
    "/events": stream_rows,
}
POSTS: Final[Mapping[str, Callable[[World], Facts]]] = {
    **{f"/runs/{{run}}/{one}": partial(order_rows, action=one) for one in ORDERS},
    "/runs/{run}/prune": prune_rows,
    "/attention/acknowledge": acknowledge_rows,
    "/runs/{run}/annotate": partial(annotate_rows, route="/runs/{run}/annotate", run="gpt-b"),
    "/checkpoints/{checkpoint}/annotate": partial(
        annotate_rows, route="/checkpoints/{checkpoint}/annotate", checkpoint=OTHER
    ),
    "/checkpoints/{checkpoint}/pin": pin_rows,
    "/checkpoints/{checkpoint}/unpin": unpin_rows,
    "/checkpoints/{checkpoint}/metrics": report_rows,
    "/checkpoints/{checkpoint}/verify": verify_rows,
    "/checkpoints/{checkpoint}/export": export_rows,
    "/checkpoints/{checkpoint}/fork": fork_rows,
    "/session": log_in_rows,
}
ROWS: Final = {
    **{f"GET {API}{path}": rows for path, rows in GETS.items()},
    **{f"POST {API}{path}": rows for path, rows in POSTS.items()},
    f"DELETE {API}/session": lambda _: {},
    "GET /healthz": lambda _: {},
    "GET /metrics": lambda _: {},
    "GET /": open_rows,
    "GET /{path}": page_rows,
}


def test_every_route_has_its_rows() -> None:
    assert ROWS.keys() == OPERATIONS.keys()


@pytest.mark.more
@pytest.mark.parametrize("route", ROWS)
def test_each_parameter_has_its_effect(world: World, route: str) -> None:
    seen = ROWS[route](world)
    assert seen.keys() == OPERATIONS[route].keys()
    assert [name for name, has_effect in seen.items() if not has_effect] == []


@pytest.mark.parametrize("route", [route for route, mine in OPERATIONS.items() if mine])
def test_each_parameter_refuses_bad_values(world: World, route: str) -> None:
    accepted = []
    for name in OPERATIONS[route]:
        key = name.partition(":")[2]
        for value in BAD.get(f"{route} {name}") or BAD[name]:
            world.served.services.login_throttle = LoginThrottle()
            answer = world.call(route, **{key: value})
            is_problem = 400 <= answer.status_code < 500
            message = answer.json()["message"] if is_problem else ""
            words = {key, str(value)[:40], repr(value)[1:40]} if name in IDENTITIES else {key}
            if not any(word in message for word in words):
                accepted.append((name, value, answer.status_code, message[:200]))
    assert accepted == []


@pytest.mark.parametrize("route", [one for one in OPERATIONS if f" {API}/" in one])
def test_unknown_and_repeated_query_parameters_are_refused(world: World, route: str) -> None:
    queries = {"nonsense": "nonsense=1"}
    for name, definition in OPERATIONS[route].items():
        where, _, key = name.partition(":")
        if where == "body":
            # A field of the body does nothing in the query.
            queries[key] = f"{key}=1"
        elif where == "query" and "array" not in json.dumps(definition):
            queries[key] = f"{key}=1&{key}=2"
    for key, query in queries.items():
        answer = world.call(route, more=query)
        assert answer.status_code == 422, (route, query)
        assert f"query.{key}: " in answer.json()["message"]


@pytest.mark.parametrize(
    ("route", "low", "high"),
    [
        ("/runs", {"created_from": T0 + 1}, {"created_to": T0}),
        ("/runs/{run}/checkpoints", {"step_from": 51}, {"step_to": 50}),
    ],
)
def test_a_range_that_contains_nothing_is_refused(
    world: World, route: str, low: dict[str, Any], high: dict[str, Any]
) -> None:
    refused = world.call(f"GET {API}{route}", **low, **high)
    assert refused.status_code == 422
    assert all(name in refused.json()["message"] for name in (*low, *high))
    (limit,) = high.values()
    names = [*low, *high]
    assert world.get(route, **dict.fromkeys(names, limit))["items"]


@pytest.mark.parametrize("route", ["/runs/{run}/checkpoints", "/runs/{run}/events"])
def test_a_cursor_fits_one_direction_only(world: World, route: str) -> None:
    after = world.get(route, limit=2, newest_first=True)["next"]
    assert world.get(route, limit=2, newest_first=True, after=after)["items"]
    refused = world.call(f"GET {API}{route}", limit=2, newest_first=False, after=after)
    assert refused.status_code == 422
    assert "after=" in refused.json()["message"]
