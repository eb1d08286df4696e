"""The limits of `alerts`, judged from a run's history."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.sections import Alerts
from holdfast.flows.supervisor import limits
from holdfast.flows.supervisor.limits import LimitWatch, findings, new_findings

HOUR_S = 3600.0


def started(tmp_path: Path, **alerts: float) -> RunFolder:
    """A run whose first attempt, of two GPUs, has just begun to train."""
    folder = RunFolder(tmp_path, "kelp", "5" * 32, {"alerts": alerts})
    folder.submit(1, 2, T0)
    folder.claim(1, T0)
    folder.launch(1, 1, 0, None)
    return folder


def test_age_of_the_newest_checkpoint_counts_from_the_last_commit(tmp_path: Path) -> None:
    folder = started(tmp_path, checkpoint_age_max_min=30)
    begun = load_history(folder.paths).events[-1].time
    history = load_history(folder.paths)
    assert new_findings(history, begun + 29 * 60) == []
    (late,) = new_findings(history, begun + 31 * 60)
    assert (late.limit, late.passed, round(late.value)) == ("checkpoint_age_max_min", True, 31)
    assert late.text == "training since the newest checkpoint: 31.0 min"
    folder.commit(10, 1)
    history = load_history(folder.paths)
    committed = max(one.time for one in history.events if one.kind is EventKind.COMMITTED)
    assert new_findings(history, committed + 29 * 60) == []


def test_waiting_run_has_no_age(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "kelp", "5" * 32, {"alerts": {"checkpoint_age_max_min": 1}})
    folder.submit(1, 2, T0)
    assert findings(load_history(folder.paths), T0 + 9 * HOUR_S) == []


def test_budget_is_told_at_nine_tenths_and_share_after_an_hour(tmp_path: Path) -> None:
    folder = started(tmp_path, gpu_hours_max=10, ettr_min=0.5)
    history = load_history(folder.paths)
    (budget,) = findings(history, T0 + 0.9 * HOUR_S)
    assert (budget.limit, budget.passed) == ("gpu_hours_max", False)
    assert budget.value == pytest.approx(1.8)
    budget, share = sorted(findings(history, T0 + 4.6 * HOUR_S), key=lambda one: one.limit)[::-1]
    assert (budget.limit, budget.passed) == ("gpu_hours_max", True)
    assert budget.text == "GPU hours: 9.2 of 10.0"
    assert share.limit == "ettr_min"


def test_each_passing_is_journaled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOK_S", 0.0)
    folder = started(tmp_path, gpu_hours_max=1e-9)
    watch = LimitWatch(logging.getLogger(__name__))
    with JournalWriter(folder.paths.journal_of("flow")) as journal:
        for _ in range(3):
            watch.look(load_history(folder.paths), journal)
    (alert,) = noticed(load_history(folder.paths).events)
    assert (alert["kind"], alert["attempt"]) == ("limit_passed", 1)
    assert alert["text"].startswith("GPU hours: ")


@pytest.mark.parametrize(
    "given",
    [
        {"ettr_min": 1.5},
        {"checkpoint_age_max_min": 0},
        {"gpu_hours_max": -1},
        {"on": ["everything"]},
        {"targets": {"a b": {"from_env": "X"}}},
        {"targets": {"ops": "json://host/path"}},
    ],
)
def test_impossible_alerts_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Alerts.model_validate(given)
