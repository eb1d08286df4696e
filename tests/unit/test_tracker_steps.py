"""Steps that a tracker has from an earlier launch: left out, or dropped by W&B before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.trackers.sink import DIGITS, NONE, LoggedStep, ReportedMetrics, TrackerSink
from holdfast.trainer.trackers.tracker import TrackedRun, Tracker
from holdfast.trainer.trackers.wandb import CHECKPOINT_STEP, WandbTracker

UID = "1" * 32


class ListTracker(Tracker):
    """Keeps what it gets. It fails for a negative loss."""

    name = "list"
    keeps_at_once = True

    def __init__(self, *, drops: bool = False) -> None:
        self.has_dropped_later = drops
        self.points: list[tuple[int, float]] = []

    def open(self, run: TrackedRun) -> str:
        return run.uid

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if values["loss"] < 0:
            raise ValueError("no room")
        self.points.append((step, values["loss"]))

    def close(self, *, is_orderly: bool) -> None:
        self.points.append((0, float(is_orderly)))


class LateTracker(ListTracker):
    """Sends what it gets later, so a killed process may have what the tracker never got."""

    keeps_at_once = False


def launch(
    run: RunPaths,
    steps: Mapping[int, float],
    *,
    drops: bool = False,
    kind: type[ListTracker] = ListTracker,
) -> list[int]:
    """Log the losses of `steps` in a new launch; return the steps that the tracker got."""
    tracker = kind(drops=drops)
    sink = TrackerSink(tracker, ReportedMetrics(run, "list"), LoggedStep(run, "list"))
    for step, loss in steps.items():
        sink.log(step, {"loss": loss})
    sink.close(is_orderly=True)
    assert tracker.points.pop() == (0, 1.0)
    return [step for step, _ in tracker.points]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunFolder(tmp_path, "quick", UID).paths


def test_a_relaunch_leaves_out_the_steps_that_the_tracker_has(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(run, dict.fromkeys(range(1, 8), 1.0)) == list(range(1, 8))
    assert capsys.readouterr().err == ""
    assert launch(run, dict.fromkeys(range(5, 10), 1.0)) == [8, 9]
    said = capsys.readouterr().err
    assert said.count("list") == 1
    assert "those of steps 5 to 7 are not sent again" in said


def test_a_tracker_that_sends_later_gets_all_steps_again(run: RunPaths) -> None:
    for _ in range(2):
        assert launch(run, {6: 1.0, 7: 1.0}, kind=LateTracker) == [6, 7]


def test_a_tracker_that_drops_later_points_gets_all_steps(run: RunPaths) -> None:
    assert launch(run, {6: 1.0, 7: 1.0}) == [6, 7]
    assert launch(run, {6: 1.0, 7: 1.0}, drops=True) == [6, 7]


def test_a_step_that_the_tracker_refused_comes_again(run: RunPaths) -> None:
    assert launch(run, {6: 1.0, 7: -1.0}) == [6]
    assert launch(run, {6: 1.0, 7: 1.0}) == [7]


@pytest.mark.parametrize("content", ["", "many\n", "9" * (DIGITS + 2)])
def test_a_record_that_cannot_be_read_leaves_nothing_out(run: RunPaths, content: str) -> None:
    run.deliveries.mkdir(parents=True, exist_ok=True)
    (run.deliveries / "tracker-list.step").write_text(content)
    assert LoggedStep(run, "list").newest == NONE
    assert launch(run, {3: 1.0}) == [3]


class PlayedWandb:
    """The calls of `wandb`, at the outermost edge: `init` refuses `resume_from` with `refusal`."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.config = SimpleNamespace(update=lambda *_, **__: None)
        self.id = "id"

    def init(self, **settings: Any) -> PlayedWandb:
        self.inits.append(settings)
        if self.refusal and "resume_from" in settings:
            raise RuntimeError(self.refusal)
        return self

    def define_metric(self, *_: Any, **__: Any) -> None:
        """Define nothing."""

    def log(self, row: dict[str, float], step: int | None = None) -> None:
        self.rows.append((row, step))


def tracked(run: RunPaths, step: int, known_id: str | None = "id") -> TrackedRun:
    return TrackedRun(
        uid=UID,
        name="quick",
        directory=run.directory,
        attempt=1,
        launch=2,
        world_size=1,
        step=step,
        known_id=known_id,
    )


def opened(
    monkeypatch: pytest.MonkeyPatch, wandb: PlayedWandb, run: TrackedRun, **settings: Any
) -> WandbTracker:
    import wandb as real

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(real, "init", wandb.init)
    tracker = WandbTracker(**settings)
    tracker.open(run)
    return tracker


def test_wandb_drops_the_later_points_if_it_can(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = PlayedWandb()
    tracker = opened(monkeypatch, wandb, tracked(run, 40), rewind=True, project="kelp")
    assert wandb.inits == [{"name": "quick", "project": "kelp", "resume_from": "id?_step=40"}]
    assert tracker.has_dropped_later
    tracker.log(41, {"loss": 1.0})
    tracker.log_reported(30, {"accuracy": 0.5})
    tracker.log(42, {"loss": 0.9})
    assert wandb.rows == [
        ({"loss": 1.0, "step": 41}, 41),
        ({"accuracy": 0.5, CHECKPOINT_STEP: 30}, 41),
        ({"loss": 0.9, "step": 42}, 42),
    ]


@pytest.mark.parametrize(
    ("refusal", "mode", "said"),
    [
        ("rewind is not enabled for this entity", None, "rewind is not enabled for this entity"),
        ("", "offline", "the mode of W&B is offline, and only a server can drop points"),
    ],
)
def test_if_wandb_cannot_the_run_continues_and_the_reason_is_reported(
    run: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: str,
    mode: str | None,
    said: str,
) -> None:
    wandb, more = PlayedWandb(refusal), {"mode": mode} if mode else {}
    tracker = opened(monkeypatch, wandb, tracked(run, 40), rewind=True, **more)
    assert wandb.inits[-1] == {"name": "quick", "id": "id", "resume": "allow", **more}
    assert not tracker.has_dropped_later
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "known_id", "rewind"), [(40, "id", False), (40, None, True), (0, "id", True)]
)
def test_nothing_is_dropped_without_a_request_an_earlier_launch_or_a_step(
    run: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    known_id: str | None,
    rewind: bool,
) -> None:
    wandb = PlayedWandb()
    opened(monkeypatch, wandb, tracked(run, step, known_id), rewind=rewind)
    assert [one["resume"] for one in wandb.inits] == ["allow"]
