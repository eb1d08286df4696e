"""Runs beside each other: what differs, their curves as a table, trackers and the best one."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tests.api.conftest import serving, wait_for
from tests.support.runs import RunFolder

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.trackers import trackers_in
from holdfast.lineage.queries.comparison import flat_arguments

NOW: Final = time.time()
BEST: Final = {"keep": {"last": 9, "best": {"metric": "loss", "mode": "min", "n": 1}}}
PAGE: Final = "https://wandb.ai/team/project/runs/x1"


def build(root: Path, name: str, number: int, **fields: Any) -> RunFolder:
    """A run of 30 steps with checkpoints of steps 10, 20 and 30."""
    run = RunFolder(root, name, f"{number:032x}", fields, created_at=NOW - 99)
    run.submit(1, 2, NOW - 98)
    run.claim(1, NOW - 97)
    run.launch(1, 1, 0, None)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        run.commit(step, 1, metrics={"loss": loss})
    lines: list[dict[str, Any]] = [
        {"step": step, "time": NOW - 90 + step, "loss": 3.0 / step} for step in (10, 20, 30)
    ]
    lines.append({"step": 31, "time": NOW - 59, "loss": "nan", "=cmd": 1.0})
    path = run.paths.metrics_of(1, 1)
    make_directory(path.parent)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


@pytest.fixture(scope="module")
def api(home: Path) -> Iterator[httpx.Client]:
    root = home / "runs"
    root.mkdir()
    one = build(root, "one", 1, config={"lr": 0.1, "data": {"seed": 1}}, checkpoint=BEST)
    one.tell("rank0", EventKind.TRACKED, tracker="wandb", tracker_id="x1", url=PAGE)
    build(root, "other", 2, config={"lr": 0.2, "data": {"seed": 1}})
    with serving(home, {}) as served, served.client() as client:
        wait_for(lambda: served.services.watch.lag_s() is not None)
        yield client


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_runs_are_compared_fact_by_fact_in_the_given_order(api: httpx.Client) -> None:
    found = get(api, "/compare/runs", run=["other", "one"])
    assert (found["runs"], found["left_out"]) == (["other", "one"], 0)
    facts = {(one["group"], one["name"]): one for one in found["facts"]}
    lr = facts["settings", "config.lr"]
    assert (lr["values"], lr["is_same"]) == ([0.2, 0.1], False)
    assert facts["settings", "config.data.seed"]["is_same"] is True
    assert facts["arguments", "word 1"]["values"] == ["train.py", "train.py"]
    assert facts["code", "code_commit"]["is_same"] is None, "an unknown commit is not equal"
    assert facts["outcome", "newest loss"]["values"] == [2.0, 2.0]
    settings = [one["is_same"] for one in found["facts"] if one["group"] == "settings"]
    assert settings == sorted(settings), "the differences are first"
    refused = api.get("/api/v1/compare/runs", params={"run": ["one", "nobody"]})
    assert refused.status_code == 404
    assert "nobody: no such run" in refused.json()["message"]


def test_curves_are_a_table_with_a_line_for_each_value(api: httpx.Client) -> None:
    rows = get(api, "/tables/curves", run=["one", "other"], name="loss", format="json")
    assert [one["run"] for one in rows] == ["one"] * 4 + ["other"] * 4
    assert [(one["step"], one["last"]) for one in rows[:4]] == [
        *((step, 3.0 / step) for step in (10, 20, 30)),
        (31, None),
    ], "a loss that is no number has no value"
    rates = get(api, "/tables/curves", run="one", name="steps_per_s", format="json")
    assert [one["last"] for one in rates] == [None, 1.0, 1.0, 1.0]
    text = api.get("/api/v1/tables/curves", params={"run": "one"}).text
    metrics = {one["metric"] for one in csv.DictReader(io.StringIO(text, newline=""))}
    assert metrics == {"loss", "steps_per_s", "'=cmd"}, "a name must not become a formula"


def test_the_best_checkpoint_is_the_one_that_best_names(api: httpx.Client) -> None:
    listed = get(api, "/runs/one/checkpoints")["items"]
    assert [one["step"] for one in listed if one["is_best"]] == [20]
    assert get(api, "/checkpoints/one:best")["step"] == 20
    assert get(api, "/checkpoints/one:best")["is_best"] is True
    assert not any(one["is_best"] for one in get(api, "/runs/other/checkpoints")["items"])


def test_a_comparison_of_checkpoints_has_each_version_and_each_setting(api: httpx.Client) -> None:
    found = get(api, "/compare", a="one:best", b="other:latest")
    config = {one["name"]: one["is_same"] for one in found["config"]}
    assert (config["config.lr"], config["config.data.seed"]) == (False, True)
    assert not any(isinstance(one["one"], dict) for one in found["facts"])


def test_a_run_links_to_the_page_of_its_tracker(api: httpx.Client) -> None:
    tracked = {"tracker": "wandb", "tracker_id": "x1", "url": PAGE}
    assert get(api, "/runs/one")["trackers"] == [tracked]


@pytest.mark.parametrize("url", ["javascript:alert(1)", "http:///x", "http://[", "/x", 5, None])
def test_only_an_address_of_the_web_becomes_a_link(url: object) -> None:
    data = {"tracker": "w\x1b", "tracker_id": "a\nb", "url": url}
    event = Event(
        writer="rank0", opening=1, sequence=1, time=NOW, kind=EventKind.TRACKED, data=data
    )
    (found,) = trackers_in([event])
    assert found["url"] is None
    assert found["tracker_id"] == "a b"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (("train.py", "--lr", "0.1"), {"word 1": "train.py", "--lr": "0.1"}),
        (("-m", "pkg", "--lr=0.1", "-q"), {"-m": "pkg", "--lr": "0.1", "-q": True}),
        (("a", "b", "--x", "-1", "c"), {"word 1": "a", "word 2": "b", "--x": "-1", "word 3": "c"}),
        ((), {}),
    ],
)
def test_arguments_are_compared_by_option(command: Any, arguments: dict[str, Any]) -> None:
    assert flat_arguments({"command": command}) == arguments
