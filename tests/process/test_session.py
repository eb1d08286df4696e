"""The session in real processes without an agent: torchrun, gloo, kills and signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.local_runs import wait_until
from tests.support.forked import Forked
from torch.distributed.checkpoint.filesystem import FileSystemReader

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.trainer.process.flusher_supervisor import listener_of

PROGRAM = Path(__file__).with_name("session_program.py")
STEPS = 40
WAIT_S = 150.0


class Launch:
    """One launch of the program; the context manager ends all its processes.

    With `is_new`, torchrun and its ranks are new processes of Python.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int,
        interval: str = "5",
        snapshots: str = "off",
        is_new: bool = False,
        **more: Any,
    ) -> None:
        self.run = RunPaths(directory)
        settings = {"steps": STEPS, "directory": str(directory), **more}
        command = [sys.executable, str(PROGRAM), json.dumps(settings, sort_keys=True)]
        if ranks:
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            torchrun += ["--log-dir", str(directory.parent / "logs"), "--master-port", "0"]
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
            command[1:1] = torchrun
        self._output = directory.parent / f"output-{time.monotonic_ns()}.txt"
        ours = {"HOLDFAST_CHECKPOINT_INTERVAL": interval, "OMP_NUM_THREADS": "1"}
        ours["HOLDFAST_CHECKPOINT_SNAPSHOTS"] = snapshots
        env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        begin = partial(subprocess.Popen, start_new_session=True) if is_new else Forked
        with open(self._output, "wb") as stream:
            self.process = begin(command, stdout=stream, stderr=stream, env=env | ours)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            kill(self.rank_pids())
        self.process.wait(WAIT_S)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def rank_pids(self) -> dict[int, int]:
        """Live processes of the newest launch, by rank."""
        pids = [path.name.split("-") for path in (self.run.directory / "pids").glob("*-*")]
        return {int(rank): int(pid) for rank, pid in pids if Path(f"/proc/{pid}").exists()}

    def wait_until(self, step: int, *, committed: int = 0) -> None:
        """Wait until rank 0 recorded `step` and a checkpoint of `committed` or later exists."""
        give_up = time.monotonic() + WAIT_S
        while True:
            lines = steps_of(self.run, 0) if (self.run.directory / "records").exists() else []
            newest = max((line["step"] for line in lines), default=0)
            if newest >= step and max(committed_steps(self.run), default=0) >= committed:
                return
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up, self.output
            time.sleep(0.02)


def kill(pids: dict[int, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)


def lines_of(run: RunPaths, rank: int) -> list[dict[str, Any]]:
    path = run.directory / "records" / f"rank{rank}.jsonl"
    # The folder may exist before this rank's file, because another rank created it.
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def steps_of(run: RunPaths, rank: int) -> list[dict[str, Any]]:
    return [line for line in lines_of(run, rank) if "step" in line]


def ends_of(run: RunPaths, rank: int) -> list[dict[str, Any]]:
    return [line for line in lines_of(run, rank) if "end" in line]


def committed_steps(run: RunPaths) -> list[int]:
    manifests = [read_manifest(path) for path in run.list_checkpoints()]
    return [manifest.step for manifest in manifests if manifest]


def events_of(run: RunPaths, kind: EventKind) -> list[Event]:
    events, _ = read_journal(run.attempt(0).rank_journal)
    return [event for event in events if event.kind is kind]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """An uninterrupted run of two ranks with dropout."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    with Launch(directory, ranks=2, dropout=0.2) as launch:
        assert launch.wait() == 0, launch.output
    return launch.run


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """An uninterrupted run of one rank without dropout."""
    directory = tmp_path_factory.mktemp("single") / "run"
    with Launch(directory, ranks=1, is_new=True) as launch:
        assert launch.wait() == 0, launch.output
    return launch.run


@pytest.mark.more
def test_killed_run_resumes_bit_identical(uninterrupted: RunPaths, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings: dict[str, Any] = {"ranks": 2, "dropout": 0.2, "slow": [17, 0.5]}
    with Launch(directory, **settings) as launch:
        launch.wait_until(17, committed=10)
        kill(launch.rank_pids())
        assert launch.wait() != 0
    (tmp_path / "hurry").touch()
    with Launch(directory, **settings) as launch:
        assert launch.wait() == 0, launch.output
    for rank in range(2):
        whole, resumed = steps_of(uninterrupted, rank), steps_of(launch.run, rank)
        redone = {line["step"]: line for line in resumed}
        assert [redone[line["step"]] for line in whole] == whole
        assert ends_of(launch.run, rank) == ends_of(uninterrupted, rank)
    first, second = events_of(launch.run, EventKind.RESUMED)
    assert (first.data["checkpoint"], first.data["step"]) == (None, 0)
    step = second.data["step"]
    assert step >= 10
    assert step % 5 == 0
    assert second.data["checkpoint"] == f"run:step-{step:08d}.a0000.l01"
    assert second.data["restored"] == ["model", "optimizer", "scheduler", "rng"]
    assert second.data["world_size"] == 2
    assert second.data["attempt"] == 0
    assert second.data["argv"][0] == str(PROGRAM)
    assert first.data["command_digest"] == second.data["command_digest"]
    assert f"continues after step {step} from run:step-{step:08d}.a0000.l01" in launch.output


@pytest.mark.slow
def test_run_with_a_custom_planner_resumes(uninterrupted: RunPaths, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Launch(directory, ranks=2, dropout=0.2, planner=True, sleep_s=0.02) as launch:
        launch.wait_until(8, committed=5)
        kill(launch.rank_pids())
        launch.process.wait(WAIT_S)
    saves = len(committed_steps(launch.run))
    with Launch(directory, ranks=2, dropout=0.2, planner=True, sleep_s=0.02) as launch:
        assert launch.wait() == 0, launch.output
    for rank in range(2):
        assert ends_of(launch.run, rank)[-1:] == ends_of(uninterrupted, rank)
    asked = [len(path.read_text().split()) for path in (directory / "planned").iterdir()]
    # Each launch also plans before its first step.
    assert len(asked) == 4
    assert sum(asked) >= 2 * (len(committed_steps(launch.run)) + 2)
    assert len(committed_steps(launch.run)) > saves
    metadata = FileSystemReader(launch.run.list_checkpoints()[-1]).read_metadata()
    assert "model.0.weight" in metadata.state_dict_metadata


@pytest.mark.more
def test_checkpoint_with_a_flipped_bit_is_skipped_and_reported(
    uninterrupted: RunPaths, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted.directory, directory, symlinks=True)
    *_, older, newest = (p for p in RunPaths(directory).list_checkpoints() if read_manifest(p))
    with open(newest / "__1_0.distcp", "r+b") as stream:
        content = stream.read()
        stream.seek(len(content) // 2)
        stream.write(bytes([content[len(content) // 2] ^ 1]))
    with Launch(directory, ranks=2, dropout=0.2) as launch:
        assert launch.wait() == 0, launch.output
    resumed = events_of(launch.run, EventKind.RESUMED)[-1]
    assert resumed.data["checkpoint"] == f"run:{older.name}"
    (line,) = [one for one in resumed.data["skipped"] if one.startswith(newest.name)]
    assert "damaged: __1_0.distcp: checksum " in line
    assert f"skipped {line}" in launch.output
    for rank in range(2):
        assert ends_of(launch.run, rank)[-1:] == ends_of(uninterrupted, rank)


@pytest.mark.more
def test_journal_and_manifests_record_every_save(uninterrupted: RunPaths) -> None:
    staged = events_of(uninterrupted, EventKind.STAGED)
    committed = events_of(uninterrupted, EventKind.COMMITTED)
    # On slow storage a save may be skipped while two are being written; all are recorded.
    steps = [event.data["step"] for event in committed]
    assert steps == sorted(committed_steps(uninterrupted))
    assert {5, STEPS} <= set(steps) <= set(range(5, STEPS + 1, 5))
    assert [e.data["checkpoint"] for e in staged] == [e.data["checkpoint"] for e in committed]
    assert all(event.data["attempt"] == 0 for event in (*staged, *committed))
    parent = None
    for path in uninterrupted.list_checkpoints():
        manifest = read_manifest(path)
        assert manifest is not None
        assert find_damage(path, manifest) == []
        assert manifest.parent in {None, parent} or manifest.parent < f"run:{path.name}"
        assert "loss" in manifest.metrics
        parent = manifest.id
    document = json.loads((path / "train_state.json").read_text())
    assert document["step"] == STEPS
    assert document["data"]["position"] == STEPS * 12
    losses = {line["step"]: line["loss"] for line in steps_of(uninterrupted, 0)}
    assert document["best"]["value"] == min(losses.values())
    assert losses[document["best"]["step"]] == document["best"]["value"]


def stop_by(number: signal.Signals, signalled: list[int], directory: Path) -> RunPaths:
    """A run of two ranks that both stopped after the same step when some of them got a signal."""
    with Launch(directory, ranks=2, slow=[8, 0.5]) as launch:
        launch.wait_until(8)
        pids = launch.rank_pids()
        for rank in signalled:
            os.kill(pids[rank], number)
        assert launch.wait() == 0, launch.output
    run = launch.run
    (end,) = ends_of(run, 0)
    assert end["stop"] is True
    assert [line["end"] for line in ends_of(run, 1)] == [end["end"]]
    assert 8 <= end["end"] < STEPS
    assert max(committed_steps(run)) == end["end"]
    (agreed,) = events_of(run, EventKind.STOP_AGREED)
    assert agreed.data["step"] == end["end"]
    assert events_of(run, EventKind.SIGNAL)[0].data["name"] == number.name
    return run


@pytest.mark.more
def test_signal_to_one_rank_stops_both(tmp_path: Path) -> None:
    run = stop_by(signal.SIGUSR2, [1], tmp_path / "run")
    assert ends_of(run, 0)[0]["end"] == ends_of(run, 1)[0]["end"] == max(committed_steps(run))


def test_signalled_ranks_stop_together_and_fewer_ranks_continue(
    single: RunPaths, tmp_path: Path
) -> None:
    run = stop_by(signal.SIGTERM, [0, 1], tmp_path / "run")
    with Launch(run.directory, ranks=1) as launch:
        assert launch.wait() == 0, launch.output
    resumed, expected = steps_of(run, 0), steps_of(single, 0)
    assert [line["step"] for line in resumed] == list(range(1, STEPS + 1))
    for line, wanted in zip(resumed, expected, strict=True):
        share = len(line["ids"])
        assert line["ids"] == wanted["ids"][:share]
        assert line["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
    assert {line["world"] for line in resumed} == {1, 2}


@pytest.mark.more
def test_additional_ranks_are_reseeded_and_reported(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Launch(directory, ranks=1, steps=6) as launch:
        assert launch.wait() == 0, launch.output
    with Launch(directory, ranks=2, steps=9) as launch:
        assert launch.wait() == 0, launch.output
    assert "ranks 1 had no saved random state" in launch.output
    assert [line["end"] for line in ends_of(launch.run, 1)] == [9]


@pytest.mark.more
def test_stop_file_ends_a_program_without_torchrun(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Launch(directory, ranks=0, slow=[3, 0.5]) as launch:
        launch.wait_until(3)
        launch.run.stop_file.touch()
        assert launch.wait() == 0, launch.output
    (end,) = ends_of(launch.run, 0)
    assert end["stop"] is True
    assert max(committed_steps(launch.run)) == end["end"] < STEPS
    assert not launch.run.stop_file.exists()
    with Launch(directory, ranks=0) as launch:
        assert launch.wait() == 0, launch.output
    assert [line["step"] for line in steps_of(launch.run, 0)] == list(range(1, STEPS + 1))


@pytest.mark.more
def test_killed_flusher_is_replaced_and_saves_continue(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", ranks=2, slow=[8, 0.5]) as launch:
        launch.wait_until(8, committed=5)
        (parent,) = (psutil.Process(pid) for rank, pid in launch.rank_pids().items() if rank == 0)
        (flusher,) = (c for c in parent.children() if "holdfast.trainer.flusher" in c.cmdline())
        newest = max(committed_steps(launch.run))
        flusher.kill()
        # The next flusher may take seconds to start.
        launch.wait_until(8, committed=newest + 5)
        assert launch.wait() == 0, launch.output
    committed = committed_steps(launch.run)
    assert max(committed) == STEPS
    # A save that was due while there was no flusher is reported.
    told = {event.data["step"] for event in events_of(launch.run, EventKind.SAVE_FAILED)}
    notes = "; ".join(event.data["text"] for event in events_of(launch.run, EventKind.NOTE))
    told |= {step for step in range(5, STEPS, 5) if f"step {step}: no checkpoint" in notes}
    assert set(committed) | told >= set(range(5, STEPS + 1, 5))
    assert len(committed) >= 3


@pytest.mark.slow
def test_ranks_agree_on_saves_with_an_interval_in_seconds(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", ranks=2, interval="0.5s", sleep_s=0.05) as launch:
        assert launch.wait() == 0, launch.output
    steps = committed_steps(launch.run)
    assert 3 <= len(steps) <= 8
    assert max(steps) == STEPS


@pytest.mark.more
def test_failing_rank_writes_its_traceback_and_saves_nothing(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", ranks=2, fail_at=[1, 8]) as launch:
        assert launch.wait() == 1
    errors = [json.loads(p.read_text()) for p in (tmp_path / "logs").rglob("error.json")]
    messages = [error["message"]["message"] for error in errors]
    assert "RuntimeError: a bad batch at step 8" in messages
    failed = errors[messages.index("RuntimeError: a bad batch at step 8")]
    assert "session_program.py" in failed["message"]["extraInfo"]["py_callstack"]
    # The flusher may still write when the ranks have ended.
    address = launch.run.attempt(0).flusher_address(1, 0)
    wait_until(lambda: listener_of(address) is None, "the flusher's end")
    assert committed_steps(launch.run) == [5]


@pytest.mark.more
def test_missing_process_group_is_reported_with_the_fix(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", ranks=2, forget_group=True) as launch:
        assert launch.wait() == 1
    assert "call torch.distributed.init_process_group() before Session" in launch.output


@pytest.mark.more
def test_second_launch_in_a_run_folder_waits_for_the_first(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Launch(directory, ranks=0, sleep_s=0.1) as first:
        first.wait_until(5)
        with Launch(directory, ranks=0, sleep_s=0.1) as second:
            assert first.wait() == 0, first.output
            assert second.wait() == 0, second.output
    # The second launch waited for the first and had nothing left to do.
    assert [line["end"] for line in ends_of(first.run, 0)] == [STEPS, STEPS]
    assert len(steps_of(first.run, 0)) == STEPS


@pytest.mark.slow
def test_state_created_late_on_one_rank_is_planned_by_all_ranks(tmp_path: Path) -> None:
    """Both at an agreed step and at the last save."""
    for run, at in (("meeting", 8), ("end", 12)):
        with Launch(tmp_path / run, ranks=2, steps=13, late=[0, at]) as launch:
            assert launch.wait() == 0, launch.output
            saved = {
                name.step: b"extra.late.average" in (path / ".metadata").read_bytes()
                for path in launch.run.list_checkpoints()
                if (name := CheckpointName.parse(path.name)) and read_manifest(path)
            }
        assert saved == {5: False, 10: at <= 10, 13: True}
