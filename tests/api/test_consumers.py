"""Consumers of checkpoints: what the API, `holdfast show` and the lineage say about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import Served, get, serving, wait_for
from tests.support.runs import T0, RunFolder
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.disk.journal import EventKind
from holdfast.lineage.queries import consumers
from holdfast.lineage.queries.formats import dot, mermaid

SECOND = "step-00000020.a0001.l01"


def name_of(step: int) -> str:
    return f"step-{step:08d}.a0001.l01"


def line(run: RunFolder, consumer: str, step: int, state: str, **more: Any) -> None:
    facts = {"start": 0, "tries": 0, "reason": "", **more}
    run.tell(
        "flow", EventKind.CONSUMER, consumer=consumer, checkpoint=name_of(step), step=step,
        state=state, **facts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(home: Path) -> Any:
    table = {
        "on": [
            {"name": "eval", "command": ["eval.py"]},
            {"name": "weights", "command": ["copy.sh"], "event": "end"},
        ]
    }
    run = RunFolder(home / "runs", "kelp", "a" * 32, table)
    run.submit(1, 2, T0)
    run.claim(1, T0)
    for step in (10, 20, 30):
        run.commit(step, 1, at=T0 + step)
    line(run, "eval", 10, "due")
    line(run, "eval", 10, "started", start=1, tries=1)
    line(run, "eval", 10, "failed", start=1, tries=1, reason="it ended with exit status 7")
    line(run, "eval", 20, "due")
    line(run, "eval", 20, "started", start=2, tries=1)
    facts = {"checkpoint": SECOND, "step": 20, "by": "eval", "consumer": "eval"}
    run.tell("flow", EventKind.METRIC, **facts, metric="accuracy", value=0.5)
    run.tell("flow", EventKind.METRIC, **facts, metric="odd", value="nan")
    of_person = {"checkpoint": f"kelp:{SECOND}", "step": 20, "by": "ann"}
    run.tell("cli", EventKind.METRIC, **of_person, metric="taste", value=1)
    line(run, "eval", 20, "done", start=2, tries=1)
    # A newer version may have a state that this one does not know.
    line(run, "eval", 30, "suspended")
    line(run, "weights", 30, "due")
    with serving(home, {"kelp": run}) as one:
        wait_for(lambda: len(one.services.store.show_run("kelp")["consumers"]) == 3)
        yield one


@pytest.fixture(scope="module")
def api(served: Served) -> httpx.Client:
    return served.client()


def test_a_run_and_a_checkpoint_list_their_consumers(api: httpx.Client, served: Served) -> None:
    found = get(api, "/runs/kelp")["consumers"]
    facts = ("name", "event", "step", "state", "tries", "start", "reason", "metrics")
    folder = served.root / "kelp/consumers"
    assert [tuple(one[key] for key in facts) for one in found] == [
        ("eval", "commit", 10, "failed", 1, 1, "it ended with exit status 7", {}),
        ("eval", "commit", 20, "done", 1, 2, "", {"accuracy": 0.5, "odd": "nan"}),
        ("weights", "end", 30, "due", 0, 0, "", {}),
    ]
    logs = [str(folder / "0001/output.log"), str(folder / "0002/output.log"), None]
    assert [one["log"] for one in found] == logs
    assert get(api, f"/checkpoints/kelp:{SECOND}")["consumers"] == [found[1]]
    assert get(api, f"/checkpoints/kelp:{name_of(10)}")["consumers"] == [found[0]]


def test_open_consumers_are_shown_beside_the_newest(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "SHOWN_MAX", 1)
    found = served.services.store.show_run("kelp")["consumers"]
    assert [one["step"] for one in found] == [10, 30], "the one that is done is left out"
    monkeypatch.setattr(consumers, "LINES_MAX", 3)
    found = served.services.store.show_run("kelp")["consumers"]
    assert [one["step"] for one in found] == [30]


def test_the_lineage_leads_from_a_checkpoint_to_its_consumers(
    api: httpx.Client, served: Served
) -> None:
    graph = get(api, "/runs/kelp/lineage")
    nodes = {one["id"]: one for one in graph["nodes"] if one["kind"] == "consumer"}
    evaluation = f"kelp:{SECOND}/eval"
    assert nodes.keys() == {
        f"kelp:{name_of(10)}/eval", evaluation, f"kelp:{name_of(30)}/weights",
    }  # fmt: skip
    assert (nodes[evaluation]["consumer"], nodes[evaluation]["state"]) == ("eval", "done")
    edge = {"from": f"kelp:{SECOND}", "to": evaluation, "kind": "consumed_by"}
    assert edge in graph["edges"]
    assert "consumed by" in mermaid(graph)
    assert "hexagon" in dot(graph)


def test_the_commands_show_consumers(served: Served) -> None:
    root = ["--root", str(served.root)]
    shown = CliRunner().invoke(app, ["show", "kelp", *root])
    assert shown.exit_code == 0, shown.output
    (row,) = [one for one in shown.output.splitlines() if "exit status 7" in one]
    assert row.split() == [
        *("eval", "commit", name_of(10), "failed", "1", "it", "ended", "with", "exit"),
        *("status", "7", "consumers/0001/output.log"),
    ]
    told = json.loads(CliRunner().invoke(app, ["show", "kelp", "--json", *root]).stdout)
    assert [one["state"] for one in told["consumers"]] == ["failed", "done", "due"]
    tree = CliRunner().invoke(app, ["lineage", "kelp", *root])
    assert f"{SECOND} · consumed by kelp:{SECOND}/eval" in tree.output


@pytest.mark.parametrize("number", ["1e400", "-1e400", "Infinity", "NaN", f"1{'0' * 400}"])
def test_a_number_that_is_too_large_is_no_metric(api: httpx.Client, number: str) -> None:
    """JSON's reader makes infinity of it. Infinity itself is text."""
    answer = api.post(
        f"/api/v1/checkpoints/kelp:{SECOND}/metrics",
        content=f'{{"metrics": {{"accuracy": {number}}}}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 422
    assert "metrics.accuracy" in answer.json()["message"]
