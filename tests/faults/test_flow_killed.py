"""The supervisor is killed after each change that it makes to files, and the next one continues.

First the system calls of a run with two attempts are recorded. Then runs get many supervisors,
each of which is killed at the next recorded change.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.faults.shim import Action, Call, Point, Shim, pattern_of

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.documents import Submission, read_claim, read_document
from holdfast.contracts.records.history import RunHistory, load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, RunState
from holdfast.lineage.index import Index
from holdfast.lineage.queries import run_queries
from holdfast.workers.runs.run_folders import create_run
from holdfast.workers.schedulers import executor_for
from holdfast.workers.schedulers.local import LAUNCHER
from holdfast_bench.live_drills.invariants import check_submissions

LIFE_S = 300.0
LIVES_MAX = 200
SUPERVISED = Path(__file__).with_name("supervised.py")
EFFECTS = {"mkdir", "write", "rename", "link", "unlink"}
# The first journal line of each supervisor is `supervised`; the second is its first action.
JOURNAL = Point("write", "runs/kelp/journal/flow.jsonl", 2)
# With the argument 2 it kills its agent at the first start, so that a second attempt follows. It
# runs for as long as the file `hold` exists.
PROGRAM = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["HOLDFAST_RUN_DIR"])
attempt = os.environ["HOLDFAST_ATTEMPT"]
starts = run.parent.parent / "starts"
is_fatal = sys.argv[1] == "2" and not starts.exists()
with open(starts, "a") as told:
    told.write(attempt + "\\n")
give_up = time.monotonic() + 300
while (run.parent.parent / "hold").exists() and time.monotonic() < give_up:
    time.sleep(0.02)
if is_fatal:
    claim = json.loads((run / "attempts" / f"{int(attempt):04d}" / "claim.json").read_text())
    os.kill(claim["pid"], signal.SIGKILL)
    time.sleep(60)
"""


class Flow:
    """Supervisors of one run, one after the other, each with the fault shim loaded."""

    def __init__(self, library: Path, folder: Path, attempts: int) -> None:
        folder.mkdir()
        self.attempts = attempts
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        spec = {
            "name": "kelp",
            "command": ["program.py", str(attempts)],
            "launch": {"working_directory": str(folder)},
            "supervision": {
                "poll_s": 0.1,
                "heartbeat_s": 0.3,
                "backoff_s": 0.1,
            },
        }
        self.paths = create_run(RunSpec.model_validate(spec), folder / "runs", created_by="tester")
        self.shim = Shim(library, folder, folder / "shim")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the next supervisor."""
        home = {"HOLDFAST_HOME": str(self.folder / "home")}
        with open(self.folder / "flow.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, str(SUPERVISED), str(self.paths.directory)],
                env={**os.environ, **home, **self.shim.environment},
                stdout=log,
                stderr=log,
            )

    def live(self, point: Point, action: Action = Action.KILL_AFTER) -> bool:
        """Run one supervisor; True if the fault killed it, False if the run ended first."""
        self.shim.arm(point, "", action)
        process = self.start()
        code = process.wait(LIFE_S)
        assert code == (-9 if self.shim.has_fired else 0), (point, self.log())
        return self.shim.has_fired

    def live_until_launch(self) -> None:
        """Run one supervisor and kill it while it starts the job."""
        self.shim.disarm()
        process = self.start()
        give_up = time.monotonic() + LIFE_S
        while time.monotonic() < give_up and not _is_launching(process.pid):
            time.sleep(0.005)
        process.kill()
        process.wait(LIFE_S)

    def finish(self) -> RunHistory:
        """Run a last supervisor without a fault; returns the run's history on disk."""
        self.shim.disarm()
        assert self.start().wait(LIFE_S) == 0, self.log()
        return load_history(self.paths)

    def log(self) -> str:
        return (self.folder / "flow.log").read_text()

    def close(self) -> None:
        """End all jobs, also those that a failed test left running."""
        self.shim.close()
        for view in load_history(self.paths).attempts:
            if view.request is not None and not view.state.is_terminal:
                executor = executor_for("local")
                found = executor.find(view.request)
                if found is not None:
                    executor.cancel(view.request, found)


def _is_launching(pid: int) -> bool:
    for child in psutil.Process(pid).children():
        try:
            if LAUNCHER in child.cmdline():
                return True
        except psutil.NoSuchProcess:
            continue
    return False


@pytest.fixture
def flow(shim_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flow]:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "flow" / "home"))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    made = Flow(shim_library, tmp_path / "flow", attempts=1)
    yield made
    made.close()


def expect_complete_records(flow: Flow, history: RunHistory) -> None:
    """One job per attempt, one journal line per event, and the index has all of it."""
    assert history.state is RunState.COMPLETED, flow.log()
    assert check_submissions(flow.paths, history.events) == []
    starts = (flow.folder / "starts").read_text().split()
    tried = [view for view in history.attempts if view.job_id is not None]
    assert starts == [str(view.number) for view in tried], "each job must train once, in order"
    states = [AttemptState.LOST] * (flow.attempts - 1) + [AttemptState.COMPLETED]
    assert [view.state for view in tried] == states
    told = Counter((e.kind, e.data.get("attempt")) for e in history.events)
    for view in history.attempts:
        assert told[EventKind.ATTEMPT_ENDED, view.number] == 1
        # An attempt that was given up before its request has no goodput.
        assert told[EventKind.GOODPUT, view.number] == 1 or view.request is None
        assert told[EventKind.ATTEMPT_RESERVED, view.number] == (view.request is not None)
        attempt = flow.paths.attempt(view.number)
        job = read_document(Submission, attempt.submission) or read_claim(attempt)
        assert told[EventKind.ATTEMPT_SUBMITTED, view.number] == (job is not None)
    assert told[EventKind.RUN_ENDED, None] == 1
    with Index() as index:
        shown = run_queries.show_run(index.open(), str(flow.paths.directory))
    assert shown["state"] == "completed"
    numbers = [attempt["number"] for attempt in shown["attempts"]]
    assert numbers == [view.number for view in history.attempts]


@pytest.mark.more
def test_flow_killed_while_submitting_loses_nothing(flow: Flow) -> None:
    document = "runs/kelp/attempts/*/{}.json"
    assert flow.live(Point("mkdir", "runs/kelp/attempts/*", 1))
    assert flow.live(Point("rename", document.format("request"), 1))
    # The job must still run: no submission is recorded for a job that has ended.
    (flow.folder / "hold").touch()
    assert flow.live(Point("rename", document.format("submission"), 1), Action.KILL_BEFORE)
    assert flow.live(Point("rename", document.format("submission"), 1))
    (flow.folder / "hold").unlink()
    expect_complete_records(flow, flow.finish())


def recorded_points(calls: list[Call]) -> list[Point]:
    """The calls by which a supervisor changes files, in order, each once.

    Attempt numbers are replaced by `*`, because interrupted attempts shift them. Every journal
    line counts as the same point.
    """
    points = []
    for call in calls:
        pattern = re.sub(r"attempts/\d+", "attempts/*", pattern_of(call.path))
        if call.op in EFFECTS and not call.only_reads and call.result >= 0:
            points.append(JOURNAL if pattern == JOURNAL.pattern else Point(call.op, pattern, 1))
    return [p for i, p in enumerate(points) if p is JOURNAL or p not in points[:i]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_flow_killed_after_any_file_change_loses_nothing(
    shim_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Flow(shim_library, tmp_path / "recorded", attempts=2)
    recording.shim.trace()
    assert recording.start().wait(LIFE_S) == 0, recording.log()
    points = recorded_points(recording.shim.calls())
    expect_all_recorded(points)
    recording.close()
    struck, lives = 0, 0
    while points and lives < LIVES_MAX:
        flow = Flow(shim_library, tmp_path / f"flow{lives}", attempts=2)
        monkeypatch.setenv("HOLDFAST_HOME", str(flow.folder / "home"))
        try:
            flow.live_until_launch()
            is_over = False
            while points and not is_over and lives < LIVES_MAX:
                lives += 1
                point = points.pop(0)
                is_over = not flow.live(point)
                struck += not is_over
            expect_complete_records(flow, flow.finish())
        finally:
            flow.close()
    print(json.dumps({"struck": struck, "lives": lives}))
    assert not points
    assert struck > 20


def expect_all_recorded(points: list[Point]) -> None:
    """The recording includes the changes that every supervisor makes."""
    names = {os.path.basename(point.pattern) for point in points}
    assert {"request.json", "submission.json", "flow.jsonl"} <= names, names
    assert any("holdfast.db" in point.pattern for point in points), names
