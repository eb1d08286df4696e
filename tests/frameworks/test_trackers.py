"""Experiment trackers: one run of the tracker over a crash and a resume, on one axis of steps."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support import forked

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.history import load_events
from holdfast.contracts.records.reported import report
from holdfast.trainer.trackers import TrackedRun, WandbTracker
from holdfast.trainer.trackers.mlflow import PARENT_TAG, MlflowTracker

PROGRAM = Path(__file__).with_name("tracker_program.py")
LIMIT_S = 120
STEPS = 9
# Saves are due every four steps, so the resume repeats steps 5 and 6 or more.
KILLED_AT = 6
# Of the files of W&B.
BLOCK = 32 * 1024


@dataclass(frozen=True)
class Tracked:
    """A run that crashed after step 6, was resumed after step `resumed`, and finished.

    `ids` has what each tracker calls the run, by the names of the trackers.
    """

    folder: Path
    run: RunPaths
    ids: dict[str, str]
    resumed: int

    @property
    def database(self) -> str:
        return database_in(self.folder)


def database_in(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def train(
    folder: Path,
    trackers: dict[str, Any],
    *,
    kill_at: int | None = None,
    reports: dict[int, tuple[int, float]] | None = None,
) -> int:
    """Run the program in `folder`; its exit status.

    `reports` has, by the step, the step of a checkpoint and the accuracy that is reported for it.
    """
    settings = {"trackers": trackers, "steps": STEPS, "kill_at": kill_at, "reports": reports or {}}
    done = forked.run(
        [sys.executable, PROGRAM, json.dumps(settings)],
        cwd=folder,
        env={**os.environ, "HOLDFAST_ROOT": str(folder / "runs"), "WANDB_SILENT": "true"},
        timeout=LIMIT_S,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr[-2000:]
    assert "holdfast: wandb" not in done.stderr
    return done.returncode


def crash_and_resume(folder: Path, trackers: dict[str, Any]) -> Tracked:
    """One run with the trackers. Each launch records in the journal what they call the run."""
    assert train(folder, trackers, kill_at=KILLED_AT) == -signal.SIGKILL
    assert train(folder, trackers) == 0
    run = RunPaths(folder / "runs" / PROGRAM.stem)
    events = load_events(run)
    told = [
        (e.data["tracker"], e.data["tracker_id"]) for e in events if e.kind is EventKind.TRACKED
    ]
    assert len(told) == 2 * len(trackers)
    assert len(set(told)) == len(trackers), "the second launch continues each tracker's run"
    resumed = [e.data["step"] for e in events if e.kind is EventKind.RESUMED]
    assert 0 <= resumed[-1] < KILLED_AT
    return Tracked(folder, run, dict(told), resumed[-1])


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """One run with all trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    trackers = {
        "TensorBoardTracker": {},
        "MlflowTracker": {"tracking_uri": database_in(folder), "experiment": "kelp"},
        "WandbTracker": {"project": "kelp", "mode": "offline"},
    }
    return crash_and_resume(folder, trackers)


def test_tensorboard_alone_shows_each_step_once_after_a_crash(tmp_path: Path) -> None:
    assert_tensorboard_shows_each_step(crash_and_resume(tmp_path, {"TensorBoardTracker": {}}))


@pytest.mark.more
def test_tensorboard_beside_other_trackers_shows_each_step_once(tracked: Tracked) -> None:
    assert_tensorboard_shows_each_step(tracked)


def assert_tensorboard_shows_each_step(tracked: Tracked) -> None:
    directory = tracked.ids["tensorboard"]
    assert Path(directory) == tracked.run.directory / "tensorboard"
    shown = EventAccumulator(directory)
    shown.Reload()
    points = [(one.step, one.value) for one in shown.Scalars("loss")]
    assert points == [(step, float(step)) for step in range(1, STEPS + 1)]


@pytest.mark.more
def test_mlflow_run_continues_after_a_crash_and_a_fork_is_its_child(tracked: Tracked) -> None:
    from mlflow import MlflowClient

    uri, found = tracked.database, tracked.ids["mlflow"]
    client = MlflowClient(tracking_uri=uri)
    points = [(one.step, one.value) for one in client.get_metric_history(found, "loss")]
    assert set(points) == {(step, float(step)) for step in range(1, STEPS + 1)}
    # The process may have been killed between a line and its record.
    assert len(points) <= STEPS + 1
    shown = client.get_run(found)
    assert shown.info.status == "FINISHED"
    assert shown.info.run_name == PROGRAM.stem
    fork = TrackedRun(
        uid="f" * 32,
        name="fork",
        directory=tracked.folder,
        attempt=1,
        launch=1,
        world_size=1,
        step=4,
        forked_from=f"{tracked.run.name}:step-00000004.a0000.l01",
        parent_id=found,
    )
    tracker = MlflowTracker("kelp", tracking_uri=uri)
    child = tracker.open(fork)
    tracker.close(is_orderly=False)
    assert child != found
    assert client.get_run(child).data.tags[PARENT_TAG] == found
    assert client.get_run(child).info.status == "FAILED"
    # A launch that died before it journaled the id finds its run by the tag.
    assert MlflowTracker("kelp", tracking_uri=uri).open(fork) == child


@pytest.mark.more
def test_wandb_run_continues_after_a_crash(tracked: Tracked) -> None:
    folders = sorted((tracked.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(one.name.endswith(f"-{tracked.ids['wandb']}") for one in folders)
    # The killed process may not have written what it had. The second one repeats its steps.
    points = wandb_points(tracked.folder, "loss")
    assert {(step, float(step)) for step in range(tracked.resumed + 1, STEPS + 1)} <= set(points)


@pytest.mark.more
def test_reported_metrics_of_checkpoints_come_once_and_at_their_steps(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = database_in(tmp_path)
    trackers = {
        "TensorBoardTracker": {},
        "MlflowTracker": {"tracking_uri": uri, "experiment": "kelp"},
        "WandbTracker": {"project": "kelp", "mode": "offline"},
    }
    # The process is killed before it looks again, so the next launch sends this one.
    assert train(tmp_path, trackers, kill_at=KILLED_AT, reports={5: (4, 0.4)}) == -signal.SIGKILL
    run = RunPaths(tmp_path / "runs" / PROGRAM.stem)
    (name,) = (str(one) for one in run.list_checkpoint_names() if one.step == 4)
    with JournalWriter(run.journal_of("cli")) as journal:
        report(run, name, {"accuracy": 0.5}, by="ann", journal=journal)
    assert train(tmp_path, trackers, reports={9: (8, 0.9)}) == 0
    assert train(tmp_path, trackers) == 0, "it sends nothing again"
    points = [(4, 0.4), (4, 0.5), (8, 0.9)]
    ids = {e.data["tracker"]: e.data["tracker_id"] for e in tracked_events(run)}
    history = MlflowClient(tracking_uri=uri).get_metric_history(ids["mlflow"], "accuracy")
    assert sorted((one.step, one.value) for one in history) == points
    shown = EventAccumulator(ids["tensorboard"])
    shown.Reload()
    assert [(one.step, round(one.value, 6)) for one in shown.Scalars("accuracy")] == points
    assert sorted(wandb_points(tmp_path, "accuracy")) == points


def tracked_events(run: RunPaths) -> list[Event]:
    return [event for event in load_events(run) if event.kind is EventKind.TRACKED]


def wandb_points(folder: Path, metric: str) -> list[tuple[int, float]]:
    """The points of a metric in the files of W&B's offline runs."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {(one.key or one.nested_key[0]): one.value_json for one in record.history.item}
            if metric in items:
                found.append((int(items["step"]), float(items[metric])))
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of W&B's file: a log of LevelDB, whose first block has a header of seven bytes.

    Each part has a checksum, its length and its place in the record: 1 is whole, 4 is the last.
    """
    at, parts = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, place = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if place in {1, 4}:
            yield parts
            parts = b""


def test_wandb_refuses_arguments_that_would_make_another_run() -> None:
    with pytest.raises(SpecError, match="id, resume: Holdfast sets these arguments"):
        WandbTracker(project="kelp", id="mine", resume="must")


@pytest.mark.more
def test_tracker_that_cannot_be_opened_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tracker = {"TensorBoardTracker": {"directory": str(tmp_path / "file" / "x")}}
    assert train(tmp_path, tracker) == 0
    events = load_events(RunPaths(tmp_path / "runs" / PROGRAM.stem))
    (note,) = (e for e in events if "could not be opened" in str(e.data.get("text")))
    assert "tensorboard" in note.data["text"]
    assert not any(e.kind is EventKind.TRACKED for e in events)
