"""The watch of a program that writes its own checkpoints, without the program and the agent."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.other_users import STRANGER
from tests.support.runs import RunFolder

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.manifest import GONE, REPLACED, Manifest, committed_checkpoints
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.records.history import load_events
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.watch.program_watch import ProgramWatch
from holdfast.workers.checkpoints.own_checkpoints import CheckpointPattern, OwnCheckpoint
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.run_folders import read_record

WAIT_S = 20.0


class Watched:
    """A run in `folder` whose program writes to `folder/out`; the watch of one attempt."""

    def __init__(self, folder: Path, *, attempt: int = 1, **program: Any) -> None:
        given = {"checkpoints": f"{folder}/out/checkpoint-{{step}}", "settle_s": 0.3, **program}
        spec = {"program": given, "resources": {"gpus_per_node": 1}}
        run = RunFolder(folder / "root", "watched", "w" * 32, spec)
        self.out, self.paths = folder / "out", run.paths
        self.attempt = self.paths.attempt(attempt)
        make_directory(self.attempt.directory)
        request = build_request(
            read_record(self.paths), run.spec, attempt=attempt, gpus=1, reason="a test"
        )
        context = AgentContext(
            request=request,
            run=self.paths,
            attempt=self.attempt,
            node=0,
            nodes=1,
            job_id="1",
            host="here",
            started_at=0.0,
        )
        self.watch = ProgramWatch(context)

    def begin(self, launch: int = 1) -> None:
        with JournalWriter(self.attempt.node_journal(0)) as journal:
            journal.append(EventKind.LAUNCH_STARTED, attempt=self.attempt.number, launch=launch)
        self.watch.begin(launch)

    def save(self, step: int, text: str = "x", done: bool = True) -> Path:
        folder = self.out / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(text)
        if done:
            (folder / "done").write_text("")
        return folder

    def print(self, text: str, launch: int = 1) -> None:
        log = self.attempt.rank_log(0, launch, 0)
        make_directory(log.parent)
        with log.open("a") as stream:
            stream.write(text)

    def committed(self) -> list[Manifest]:
        return committed_checkpoints(self.paths)

    def wait_for(self, *steps: int) -> list[Manifest]:
        """Wait until exactly these steps are committed."""
        _wait_until(lambda: [one.step for one in self.committed()] == list(steps))
        return self.committed()

    def end(self, exit_code: int | None) -> None:
        self.watch.end(exit_code)
        assert self.watch.drain(WAIT_S)

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in load_events(self.paths) if event.kind is kind]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make_watched(**given: Any) -> Watched:
        made.append(Watched(tmp_path, **given))
        return made[-1]

    yield make_watched
    for one in made:
        one.watch.close()


def _wait_until(look: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < give_up
        time.sleep(0.05)


Make = Callable[..., Watched]


@pytest.mark.more
def test_each_complete_checkpoint_is_recorded_with_its_parent(make: Make) -> None:
    run = make(complete=["done"])
    run.begin()
    run.save(10)
    run.save(20)
    run.save(30, done=False)
    first, second = run.wait_for(10, 20)
    assert (first.parent, second.parent) == (None, first.id)
    assert (first.reason, first.launch, first.world_size) == ("interval", 1, 1)
    (resumed,) = run.events(EventKind.RESUMED)
    assert (resumed.data["checkpoint"], resumed.data["step"]) == (None, 0)
    _wait_until(lambda: (run.watch.completed, run.watch.resumed) == (20, 0))
    run.save(30)
    run.end(0)
    assert run.wait_for(10, 20, 30)[2].reason == "final"
    assert run.watch.problems == ()


def test_a_first_look_that_takes_a_while_is_over_before_the_program_starts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the program's first file would be taken for one that was there before it."""
    find = CheckpointPattern.find

    def find_slowly(self: CheckpointPattern) -> list[OwnCheckpoint]:
        time.sleep(0.1)
        return find(self)

    monkeypatch.setattr(CheckpointPattern, "find", find_slowly)
    file = tmp_path / "ckpt.pt"
    run = make(checkpoints=str(file))
    run.begin()
    file.write_text("a")
    (first,) = run.wait_for(1)
    assert (first.launch, first.source) == (1, str(tmp_path))


@pytest.mark.more
@pytest.mark.parametrize("has_progress", [True, False])
def test_a_file_that_each_save_overwrites_is_recorded_each_time(
    make: Make, tmp_path: Path, has_progress: bool
) -> None:
    """Its step is that of the output when it was written. Without a pattern, saves are counted."""
    file = tmp_path / "out" / "ckpt.pt"
    progress = r"step (?P<step>\d+)" if has_progress else ""
    run = make(checkpoints=str(file), progress=progress)
    run.begin()
    file.parent.mkdir()

    def save(step: int, text: str) -> None:
        run.print(f"step {step}\n")
        _wait_until(lambda: not has_progress or run.watch.completed == step)
        file.write_text(text)

    save(10, "a")
    (first,) = run.wait_for(10 if has_progress else 1)
    save(20, "ab")
    (second,) = run.wait_for(20 if has_progress else 2)
    assert (first.parent, second.parent) == (None, first.id)
    (replaced,) = run.events(EventKind.CHECKPOINT_DELETED)
    assert (replaced.data["checkpoint"], replaced.data["reason"]) == (first.name, REPLACED)
    run.end(None)
    run.begin(2)
    _wait_until(lambda: run.watch.resumed == second.step)
    # The program saves before it prints a step.
    file.write_text("abc")
    _wait_until(lambda: [one.launch for one in run.committed()] == [2])
    (third,) = run.wait_for(20 if has_progress else 3)
    assert third.parent == second.id
    # It is killed while it overwrites its only checkpoint.
    file.write_text("abcd")
    run.end(None)
    assert run.committed() == []


@pytest.mark.more
def test_progress_in_the_output_tells_where_a_launch_began(make: Make) -> None:
    run = make(complete=["done"], progress=r"step (?P<step>\d+)")
    run.begin()
    run.save(10)
    run.save(20)
    run.wait_for(10, 20)
    run.end(None)
    # The program goes back to step 10, although a newer checkpoint is there.
    run.begin(2)
    run.print("step 12\nstep 13", launch=2)
    _wait_until(lambda: run.watch.resumed == 10)
    _wait_until(lambda: run.watch.completed == 12)
    (beat,) = run.watch.beats(4711)
    assert (beat.rank, beat.step, beat.phase, beat.pid) == (0, 12, "train", 4711)
    run.end(0)
    assert run.watch.completed == 13
    origins = [event.data["step"] for event in run.events(EventKind.RESUMED)]
    assert origins == [0, 10]


@pytest.mark.more
def test_a_deleted_and_an_overwritten_checkpoint_become_tombstones(make: Make) -> None:
    run = make(complete=["done"])
    run.begin()
    folder = run.save(10)
    run.save(20)
    first, second = run.wait_for(10, 20)
    shutil.rmtree(folder)
    run.save(20, "other")
    _wait_until(lambda: len(run.events(EventKind.CHECKPOINT_DELETED)) == 2)
    run.end(0)
    (again,) = run.wait_for(20)
    assert again.name == second.name
    assert again.checksum != second.checksum
    deleted = {
        e.data["checkpoint"]: e.data["reason"]
        for e in load_events(run.paths)
        if e.kind is EventKind.CHECKPOINT_DELETED
    }
    assert deleted == {first.name: GONE, second.name: REPLACED}
    assert run.paths.tombstone(first.name).is_file()


def test_files_of_a_program_that_died_need_a_file_as_proof(make: Make) -> None:
    run = make(settle_s=60)
    run.begin()
    _wait_until(lambda: bool(run.events(EventKind.RESUMED)))
    run.save(10)
    run.end(None)
    assert run.committed() == []
    (why,) = run.watch.problems
    assert "checkpoint-10: the program died while it may still have been writing it" in why
    assert any(event.data["text"] == why for event in run.events(EventKind.NOTE))
    run.begin(2)
    run.end(0)
    assert run.committed() == []
    assert "was there before the program started" in run.watch.problems[0]


@pytest.mark.more
def test_a_late_record_counts_for_the_launch_that_wrote_it(make: Make) -> None:
    before = make(complete=["done"])
    before.begin()
    before.watch.close()
    before.save(10)
    run = make(complete=["done"], attempt=2)
    run.begin()
    (late,) = run.wait_for(10)
    assert (late.name, late.attempt, late.launch) == ("step-00000010.a0001.l01", 1, 1)
    _wait_until(lambda: bool(run.events(EventKind.COMMITTED)))
    (committed,) = run.events(EventKind.COMMITTED)
    assert committed.data["attempt"] == 1
    _wait_until(lambda: run.watch.resumed == 10)
    run.save(20)
    assert run.wait_for(10, 20)[1].parent == late.id


@pytest.mark.more
def test_a_folder_that_is_away_retires_nothing(make: Make, tmp_path: Path) -> None:
    run = make(complete=["done"])
    run.begin()
    run.save(10)
    (manifest,) = run.wait_for(10)
    run.out.rename(tmp_path / "away")
    time.sleep(2.5)
    assert run.committed() == [manifest]
    (tmp_path / "away").rename(run.out)
    run.end(0)
    assert run.committed() == [manifest]
    assert run.events(EventKind.CHECKPOINT_DELETED) == []


def test_a_pipe_among_the_files_is_reported_and_never_opened(make: Make) -> None:
    run = make(complete=["done"])
    run.begin()
    folder = run.save(10)
    os.mkfifo(folder / "pipe")
    (run.out / "checkpoint-11").symlink_to(folder)
    run.end(0)
    assert run.committed() == []
    (why,) = run.watch.problems
    assert "checkpoint-10: contains the link or special file pipe" in why
    assert "checkpoint-11: is a link or a special file" in why


@pytest.mark.more
def test_what_cannot_be_recorded_is_reported_and_the_rest_is(make: Make) -> None:
    run = make(complete=["done"])
    run.begin()
    (run.save(10) / "back\\slash").write_text("x")
    run.save(20)
    (twin := run.out / "checkpoint-020").mkdir()
    (twin / "done").write_text("")
    run.wait_for(20)
    run.save(30)
    run.end(None)
    run.wait_for(20, 30)
    names = {path.name: why for path, why in run.watch.reasons.items()}
    assert set(names) == {"checkpoint-10", "checkpoint-20"}
    assert "expected a relative path inside" in names["checkpoint-10"]
    assert "step 20 has been recorded from other files" in names["checkpoint-20"]


def test_without_a_match_the_pattern_is_named(make: Make, tmp_path: Path) -> None:
    run = make()
    assert run.watch.completed == NOWHERE
    run.begin()
    run.end(1)
    (why,) = run.watch.problems
    assert f"nothing new matched {tmp_path}/out/checkpoint-{{step}}" in why


@pytest.mark.more
def test_a_directory_that_another_user_plants_is_no_checkpoint(make: Make) -> None:
    """It has the newest step, beyond the last one, and all that makes one complete."""
    run = make(complete=["done"])
    run.begin()
    run.save(10)
    planted = run.save(999)
    for path in (planted, *planted.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    run.wait_for(10)
    run.save(20)
    run.wait_for(10, 20)
    run.end(0)
    assert [one.step for one in run.committed()] == [10, 20]
    assert run.watch.completed == 20
    assert run.watch.reasons == {planted: f"belongs to another user (uid {STRANGER})"}
