"""Metrics that are reported after a commit: what counts, what is refused, and who uses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.history_cache import HistoryReader
from holdfast.contracts.records.reported import report, reported_metrics, require_metrics
from holdfast.workers.checkpoints import deletion, retention

RULES = {"checkpoint": {"keep": {"last": 1, "best": {"metric": "accuracy", "mode": "max"}}}}
STEPS = (10, 20, 30)


def name_of(step: int) -> str:
    return f"step-{step:08d}.a0001.l01"


@pytest.fixture
def run(root: Path) -> RunFolder:
    made = RunFolder(root, "kelp", "a" * 32, RULES)
    made.submit(1, 2, T0)
    for step in STEPS:
        made.commit(step, 1, metrics={"loss": 1 / step}, at=T0 + step)
    return made


def tell(paths: RunPaths, step: int, **metrics: float) -> None:
    with JournalWriter(paths.journal_of("cli")) as journal:
        report(paths, name_of(step), metrics, by="ann", journal=journal)


def test_the_newest_report_counts_and_keeps_the_best(run: RunFolder) -> None:
    tell(run.paths, 10, accuracy=0.3, f1=0.1)
    tell(run.paths, 20, accuracy=0.9)
    tell(run.paths, 20, accuracy=0.2)
    tell(run.paths, 30, accuracy=float("nan"))
    found = reported_metrics(load_history(run.paths).events)
    assert found[name_of(10)] == {"accuracy": 0.3, "f1": 0.1}
    assert found[name_of(20)] == {"accuracy": 0.2}
    assert choose_checkpoint(run.paths, "best") == name_of(10)
    plan = {one.name: one.reason for one in retention.plan_run(run.paths)}
    assert plan[name_of(10)] == "best 1 of 1 by accuracy (0.3)"
    assert [one.name for one in deletion.apply(run.paths, by="keep rules")] == [name_of(20)]
    # An evaluation may end after its checkpoint was deleted.
    tell(run.paths, 20, accuracy=0.5)


def test_a_turn_keeps_one_line_for_each_metric(run: RunFolder) -> None:
    reader = HistoryReader(run.paths)
    tell(run.paths, 10, accuracy=0.0)
    reader.load()
    before = reader.kept
    for value in range(5):
        tell(run.paths, 10, accuracy=value)
    history = reader.load()
    assert reader.kept == before
    assert reported_metrics(history.events) == {name_of(10): {"accuracy": 4.0}}


def test_the_index_and_the_command_show_them(call: Call, run: RunFolder) -> None:
    assert call("checkpoints", "kelp", "--json").json[0]["metrics"] == {"loss": 0.1}
    done = call("metric", "kelp:step-10", "accuracy=0.25", "f1=nan", "--json")
    assert done.json == {
        "checkpoint": f"kelp:{name_of(10)}",
        "metrics": {"accuracy": 0.25, "f1": "nan"},
    }
    call("metric", "kelp:step-30", "accuracy=0.75")
    rows = {row["step"]: row for row in call("checkpoints", "kelp", "--json").json}
    assert rows[10]["metrics"] == {"loss": 0.1, "accuracy": 0.25, "f1": "nan"}
    ranked = call("checkpoints", "kelp", "--best", "accuracy", "--mode", "max", "--json").json
    assert [row["step"] for row in ranked] == [30, 10]
    assert call("checkpoints", "kelp", "--best", "f1").status == 3
    assert "best 1 of 1 by accuracy (0.75)" in rows[30]["reason"]
    call("reindex")
    again = {row["step"]: row for row in call("checkpoints", "kelp", "--json").json}
    assert {step: row["metrics"] for step, row in again.items()} == {
        step: row["metrics"] for step, row in rows.items()
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("accuracy", "expected NAME=NUMBER"),
        ("accuracy=high", "expected NAME=NUMBER"),
        ("accuracy=-1e400", "-1e400: expected a number between"),
        ("loss=2", "loss is given twice"),
        ("=1", "expected the name of a metric"),
        ("a b=1", "expected the name of a metric"),
        ("a\x1b=1", "expected the name of a metric"),
    ],
)
def test_what_is_no_number_is_refused(call: Call, run: RunFolder, word: str, said: str) -> None:
    refused = call("metric", "kelp:latest", "loss=1", word)
    assert refused.status == 2
    assert said in refused.err
    assert EventKind.METRIC not in {event.kind for event in load_history(run.paths).events}


def test_values_from_a_file_are_numbers_or_refused() -> None:
    assert require_metrics({"a": 1, "b": "-inf"}) == {"a": 1.0, "b": float("-inf")}
    for value in (True, None, "1", [1], {"x": 1}, 10**400):
        with pytest.raises(SpecError, match="a: "):
            require_metrics({"a": value})
    with pytest.raises(SpecError, match="1001 metrics"):
        require_metrics(dict.fromkeys(map(str, range(1001)), 0))


def test_a_checkpoint_that_never_was_has_no_metrics(run: RunFolder) -> None:
    with pytest.raises(NotFoundError, match="no committed checkpoint"):
        tell(run.paths, 99, accuracy=1.0)


def test_a_line_with_another_value_is_damaged(run: RunFolder) -> None:
    tell(run.paths, 10, accuracy=0.5)
    path = run.paths.journal_of("cli")
    line = json.loads(path.read_text().splitlines()[-1])
    for value in ("high", True, [0.5], None, "NaN"):
        line["data"]["value"] = value
        path.write_text(json.dumps(line) + "\n")
        assert read_journal(path)[0] == []
