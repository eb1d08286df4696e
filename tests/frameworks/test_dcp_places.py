"""A save that is moved up by its flusher while a load of another process completes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.frameworks.dcp_states import is_same, make_state

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer import dcp, placed
from holdfast.trainer.dcp import channel

ROUNDS = 40
MOVERS = 3


def start_mover(target: Path) -> int:
    """Start a process that completes the move, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        placed.finish(target)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.more
def test_several_processes_may_move_one_save_up_at_once(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    dcp.save(make_state(1), checkpoint_id=begun)
    dcp.save(make_state(2), checkpoint_id=tmp_path / "new")
    channel._close_all()
    manifest = read_manifest(tmp_path / "new")
    assert manifest is not None
    (tmp_path / "new").rename(begun / manifest.name)
    for number in range(ROUNDS):
        target = tmp_path / str(number)
        shutil.copytree(begun, target)
        movers = [start_mover(target) for _ in range(MOVERS)]
        assert [os.waitpid(pid, 0)[1] for pid in movers] == [0] * MOVERS
        placed.clear(target)
        assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", "manifest.json"]
        assert read_manifest(target) == manifest
    state = make_state(9)
    dcp.load(state, checkpoint_id=target)
    assert is_same(state, make_state(2))
