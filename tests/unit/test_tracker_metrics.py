"""Reported metrics for a tracker: what is new, what a next launch gets, and bad files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import HoldfastError
from holdfast.trainer.trackers.mlflow import page_of
from holdfast.trainer.trackers.sink import ReportedMetrics


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, "kelp", "a" * 32)


def tell(run: RunFolder, writer: str, step: int, value: float | str) -> None:
    facts = {"checkpoint": f"step-{step:08d}.a0001.l01", "step": step, "by": "ann"}
    run.tell(writer, EventKind.METRIC, metric="accuracy", value=value, **facts)


def test_each_metric_is_taken_once_by_each_tracker(run: RunFolder) -> None:
    reported = ReportedMetrics(run.paths, "wandb")
    assert reported.take() == []
    tell(run, "flow", 10, 0.1)
    run.tell("flow", EventKind.NOTE, text="another line")
    tell(run, "cli", 20, "inf")
    assert sorted(reported.take()) == [(10, {"accuracy": 0.1}), (20, {"accuracy": float("inf")})]
    assert reported.take() == []
    reported.keep()
    tell(run, "flow", 30, 0.3)
    assert reported.take() == [(30, {"accuracy": 0.3})]
    # The tracker did not get the last one: it was not kept.
    assert ReportedMetrics(run.paths, "wandb").take() == [(30, {"accuracy": 0.3})]
    assert len(ReportedMetrics(run.paths, "mlflow").take()) == 3


def test_a_journal_that_is_replaced_sends_only_what_is_new(run: RunFolder) -> None:
    reported = ReportedMetrics(run.paths, "wandb")
    tell(run, "flow", 10, 0.1)
    reported.take()
    journal = run.paths.journal_of("flow")
    journal.write_bytes(journal.read_bytes())
    tell(run, "flow", 20, 0.2)
    assert reported.take() == [(20, {"accuracy": 0.2})]


def test_a_damaged_place_is_an_error_that_the_sink_reports(run: RunFolder) -> None:
    run.paths.deliveries.mkdir()
    (run.paths.deliveries / "tracker-wandb.json").write_text("{")
    with pytest.raises(HoldfastError):
        ReportedMetrics(run.paths, "wandb").take()


@pytest.mark.parametrize(
    ("uri", "page"),
    [
        ("https://mlflow.example/a/", "https://mlflow.example/a/#/experiments/3/runs/r1"),
        ("http://mia:secret@host:5000", "http://host:5000/#/experiments/3/runs/r1"),
        ("sqlite:////srv/mlflow.db", None),
        ("/srv/mlruns", None),
    ],
)
def test_a_run_of_mlflow_has_a_page_on_a_server_only(uri: str, page: str | None) -> None:
    assert page_of(uri, "3", "r1") == page
