"""`checkpoint.write_limit`: the flusher writes no faster, unless training waits for the step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_for
from torch import nn

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.environment import CHECKPOINT_WRITE_LIMIT
from holdfast.contracts.node import wire
from holdfast.trainer import Session
from holdfast.trainer.slots.slots import SlotState

STATE_BYTES = 40 << 20
# Much longer than an unlimited write takes, also on a busy machine.
LIMITED_S = 120.0
WAIT_S = 60.0


@pytest.fixture
def flusher() -> Iterator[SlotHolder]:
    """A flusher that may write 1 % of the state per second or so: see `LIMITED_S`."""
    limit = {CHECKPOINT_WRITE_LIMIT: str(round(STATE_BYTES / LIMITED_S))}
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}", environment=limit)
    yield made
    made.close()


def begun(flusher: SlotHolder, run: Path) -> FakeRank:
    """A rank whose step 3 the flusher is writing, as slowly as it may."""
    rank = FakeRank(flusher, run, data_bytes=STATE_BYTES)
    slot = rank.stage(3, os.urandom(STATE_BYTES))
    wait_for(slot, SlotState.FLUSHING)
    time.sleep(2.0)
    assert slot.state is SlotState.FLUSHING
    return rank


def test_a_limited_write_takes_as_long_as_its_bytes(tmp_path: Path) -> None:
    limit = {CHECKPOINT_WRITE_LIMIT: "20MB"}
    made = SlotHolder(f"holdfast-test-limit-{os.getpid()}", environment=limit)
    rank = FakeRank(made, tmp_path / "r", data_bytes=STATE_BYTES)
    began = time.monotonic()
    wait_for(rank.stage(3, os.urandom(STATE_BYTES)), SlotState.DONE)
    assert time.monotonic() - began >= STATE_BYTES / 20e6
    (path,) = RunPaths(tmp_path / "r").list_checkpoints()
    manifest = read_manifest(path)
    assert manifest is not None
    assert find_damage(path, manifest) == []
    rank.close()
    made.close()


def test_a_step_that_training_waits_for_is_not_limited(flusher: SlotHolder, tmp_path: Path) -> None:
    rank = begun(flusher, tmp_path / "r")
    # The rank wants to save step 5, which needs the slot of an earlier one.
    wire.send(rank.connection, "hurry", step=5)
    wait_for(rank.slots[0], SlotState.DONE)
    wait_for(rank.stage(5, os.urandom(STATE_BYTES), slot=1), SlotState.DONE)
    # Later ones are limited again.
    later = rank.stage(6, os.urandom(STATE_BYTES))
    time.sleep(2.0)
    assert later.state is SlotState.FLUSHING
    rank.close()


def test_a_stop_that_waits_for_the_flusher_lifts_the_limit(
    flusher: SlotHolder, tmp_path: Path
) -> None:
    rank = begun(flusher, tmp_path / "r")
    assert flusher.drain(WAIT_S)["committed"] == [3]
    rank.close()


def test_without_ranks_nothing_is_limited(flusher: SlotHolder, tmp_path: Path) -> None:
    began = time.monotonic()
    rank = begun(flusher, tmp_path / "r")
    rank.connection.close()
    wait_for(rank.slots[0], SlotState.DONE)
    assert time.monotonic() - began < LIMITED_S
    (path,) = RunPaths(tmp_path / "r").list_checkpoints()
    manifest = read_manifest(path)
    assert manifest is not None
    assert (manifest.step, find_damage(path, manifest)) == (3, [])
    rank.close()


def test_the_last_save_of_a_session_is_not_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monkeypatch.setenv(CHECKPOINT_WRITE_LIMIT, str(round(STATE_BYTES / LIMITED_S)))
    run, began = tmp_path / "r", time.monotonic()
    session = Session(model, optimizer, directory=run, interval=100, snapshots="off")
    for step in session.steps(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        if step == 1:
            session.checkpoint()
        if step == 3:
            # The save that the program asked for is limited, and training went on.
            assert session._saver.engine.in_flight == (1,)
            began = time.monotonic()
    session.close()
    assert time.monotonic() - began < WAIT_S
    found = [read_manifest(path) for path in RunPaths(run).list_checkpoints()]
    assert {one.step: one.reason for one in found if one is not None} == {1: "request", 3: "final"}
