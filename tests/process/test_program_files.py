"""Files of a framework that the flusher writes beside the checkpoints."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_for, wait_until

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.errors import SaveError
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.slots.slots import SlotState
from holdfast.trainer.staging.file_writers import bytes_writer

CONTENT = b"a model" * 1000


@pytest.fixture
def holder() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


def rank_with_files(holder: SlotHolder, run: Path) -> FakeRank:
    rank = FakeRank(holder, run)
    rank.open_file_slots()
    return rank


def manifest_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.a0001.l01" / "manifest.json"


def test_file_of_a_dead_rank_is_there_before_the_step_that_followed_it(
    holder: SlotHolder, tmp_path: Path
) -> None:
    rank = rank_with_files(holder, tmp_path / "run")
    path = tmp_path / "models" / "best.ckpt"
    path.parent.mkdir()
    path.write_bytes(b"an older model")
    holder.signal(signal.SIGSTOP)
    rank.stage_file(path, CONTENT)
    rank.stage(7, b"state")
    rank.close()
    holder.signal(signal.SIGCONT)
    assert holder.drain()["committed"] == [7]
    assert path.read_bytes() == CONTENT
    assert sorted(os.listdir(path.parent)) == ["best.ckpt"]
    assert path.stat().st_mtime_ns <= manifest_of(tmp_path / "run", 7).stat().st_mtime_ns


def test_drain_waits_for_a_file(holder: SlotHolder, tmp_path: Path) -> None:
    rank = rank_with_files(holder, tmp_path / "run")
    holder.signal(signal.SIGSTOP)
    rank.stage_file(tmp_path / "last.ckpt", CONTENT)
    holder.signal(signal.SIGCONT)
    assert holder.drain()["is_done"]
    assert (tmp_path / "last.ckpt").read_bytes() == CONTENT
    rank.close()


def test_replacement_of_a_killed_flusher_writes_the_file(
    holder: SlotHolder, tmp_path: Path
) -> None:
    rank = rank_with_files(holder, tmp_path / "run")
    holder.signal(signal.SIGSTOP)
    begun = rank.stage_file(tmp_path / "last.ckpt", CONTENT)
    begun.state = SlotState.FLUSHING
    wait_until(lambda: len(holder.kept) == 4, "the flusher supervisor to have the slots")
    holder.kill()
    holder.start()
    wait_for(begun, SlotState.DONE)
    assert (tmp_path / "last.ckpt").read_bytes() == CONTENT
    rank.close()


def test_file_that_cannot_be_written_fails_alone(holder: SlotHolder, tmp_path: Path) -> None:
    rank = rank_with_files(holder, tmp_path / "run")
    (tmp_path / "folder").write_bytes(b"a file")
    failed = rank.stage_file(tmp_path / "folder" / "last.ckpt", CONTENT)
    wait_for(failed, SlotState.FAILED)
    assert "folder" in failed.error
    wait_for(rank.stage(7, b"state"), SlotState.DONE)
    assert read_manifest(manifest_of(tmp_path / "run", 7).parent) is not None
    rank.close()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[FrameworkSession]:
    made = FrameworkSession(torch.nn.Linear(2, 1), directory=tmp_path / "run", snapshots="off")
    yield made
    made.close()


def test_files_of_a_session_replace_each_other_and_may_grow(
    session: FrameworkSession, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    for size in (10, 20, 30, 3 << 20, 40):
        session.write_file(path, bytes_writer(b"x" * size))
    session.wait_for_files(path)
    assert path.read_bytes() == b"x" * 40


def test_close_waits_for_files(session: FrameworkSession, tmp_path: Path) -> None:
    for number in range(4):
        session.write_file(tmp_path / f"{number}.ckpt", bytes_writer(CONTENT))
    session.close()
    assert all((tmp_path / f"{number}.ckpt").read_bytes() == CONTENT for number in range(4))


def test_failure_is_raised_once_and_names_the_file(
    session: FrameworkSession, tmp_path: Path
) -> None:
    (tmp_path / "folder").write_bytes(b"a file")
    path = tmp_path / "folder" / "last.ckpt"
    session.write_file(path, bytes_writer(CONTENT))
    with pytest.raises(SaveError, match=r"folder/last\.ckpt was not written: NotADirectory"):
        session.wait_for_files(path)
    session.write_file(tmp_path / "other.ckpt", bytes_writer(CONTENT))
