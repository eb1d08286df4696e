"""Steps that do not fit on storage: detected before writing, space freed once, else reported."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_for, wait_until
from tests.support.slot_tables import make_table
from tests.support.storage import small_storage

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.trainer.flusher.space_guard import MARGIN_BYTES_MAX, Need, SpaceGuard, find_shortage
from holdfast.trainer.process.flusher_supervisor import FlusherSupervisor
from holdfast.trainer.slots.slot_table import FilePlace
from holdfast.trainer.slots.slots import SlotState

GB = 10**9
KB = 1000


@pytest.mark.more
@pytest.mark.parametrize(
    ("free", "total", "budget", "taken", "code"),
    [
        (20 * GB, 1000 * GB, None, 0, None),
        (9 * GB, 1000 * GB, None, 0, errno.ENOSPC),
        # 1 % of a small disk, or 64 MiB of a large one, stays free for journals and logs.
        (10 * GB + MARGIN_BYTES_MAX, 1000 * GB, None, 0, None),
        (10 * GB + MARGIN_BYTES_MAX - 1, 1000 * GB, None, 0, errno.ENOSPC),
        (10 * GB + 10, 1000, None, 0, None),
        (None, 0, None, 0, None),
        # The budget counts the whole step, of all nodes.
        (20 * GB, 1000 * GB, 50 * GB, 10 * GB, None),
        (20 * GB, 1000 * GB, 50 * GB, 10 * GB + 1, errno.EDQUOT),
        (None, 0, 39 * GB, 0, errno.EDQUOT),
    ],
)
def test_space_check_refuses_steps_that_do_not_fit(
    free: int | None, total: int, budget: int | None, taken: int, code: int | None
) -> None:
    files = (FilePlace("a", 0, 4 * GB), FilePlace("b", 4 * GB, 6 * GB))
    need = Need.of_tables([make_table(step=7, nodes=4, files=files)])
    found = find_shortage(need, free=free, total=total, budget=budget, taken=taken)
    assert (found.errno if found else None) == code
    if code == errno.EDQUOT:
        expected = f"step 7 needs {40 * GB} bytes, but the run's checkpoints use {taken} of"
        assert expected in str(found)
    elif code:
        assert f"step 7 needs {10 * GB} bytes here" in str(found)
        assert f"{free} bytes are free" in str(found)


def test_flusher_does_not_wait_for_a_dead_supervisor() -> None:
    asked: list[str] = []

    def ask(need: Need, problem: str) -> bool:
        asked.append(problem)
        space_guard.hang_up()
        return True

    space_guard = SpaceGuard(None, ask)
    began = time.monotonic()
    assert space_guard.ask(Need(7, 1, 1), OSError(errno.ENOSPC, "no room"))[0] == 0
    assert asked == [f"[Errno {errno.ENOSPC}] no room"]
    assert time.monotonic() - began < 60


@pytest.fixture
def flusher_supervisor() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


def checkpoint(run: Path, step: int) -> Path:
    return RunPaths(run).checkpoint(CheckpointName(step, 1, 1))


class Named:
    """The only part of a flusher supervisor that a rank needs: the name to find its flusher by."""

    def __init__(self, name: str) -> None:
        self.name = name


def remove(directory: Path) -> tuple[int, str]:
    """Free space as a flusher supervisor does: (bytes freed, description)."""
    shutil.rmtree(directory)
    return 1, "freed"


def test_space_is_requested_before_anything_is_written(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    with small_storage(tmp_path, "1m") as run:
        rank = FakeRank(flusher_supervisor, run)
        wait_for(rank.stage(1, b"a" * 600 * KB), SlotState.DONE)
        # Nothing is freed: the step fails with values and advice, and leaves no files.
        slot = rank.stage(2, b"b" * 600 * KB, slot=1)
        wait_for(slot, SlotState.FAILED)
        assert "No space left on device: step 2 needs 600000 bytes here" in slot.error
        assert "this flusher supervisor frees nothing" in slot.error
        assert not checkpoint(run, 2).exists()
        # The flusher supervisor frees the older one: the second try of the next step succeeds.
        flusher_supervisor.free_space = lambda: remove(checkpoint(run, 1))
        wait_for(rank.stage(3, b"c" * 600 * KB), SlotState.DONE)
        manifest = read_manifest(checkpoint(run, 3))
        assert manifest is not None
        assert find_damage(checkpoint(run, 3), manifest) == []
        assert [m["step"] for m in flusher_supervisor.of_kind("full")] == [2, 3]
        # The freed space is not enough.
        flusher_supervisor.free_space = lambda: (1, "one byte was freed")
        slot = rank.stage(4, b"d" * 600 * KB, slot=1)
        wait_for(slot, SlotState.FAILED)
        assert slot.error.endswith("are free; one byte was freed")
        wait_for(rank.stage(5, b"e" * KB), SlotState.DONE)
        rank.close()


def test_space_is_also_freed_when_it_runs_out_during_writing(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    """There are free bytes but no free inode, which shows only when the file is created."""
    with small_storage(tmp_path, "4m", "nr_inodes=24") as run:
        rank = FakeRank(flusher_supervisor, run)
        wait_for(rank.stage(1, b"a" * KB), SlotState.DONE)
        taken = run / "taken"
        taken.mkdir()
        while os.statvfs(run).f_favail:
            (taken / str(os.statvfs(run).f_favail)).touch()
        flusher_supervisor.free_space = lambda: remove(taken)
        wait_for(rank.stage(2, b"b" * KB, slot=1), SlotState.DONE)
        assert [m["step"] for m in flusher_supervisor.of_kind("full")] == [2]
        assert read_manifest(checkpoint(run, 2)) is not None
        rank.close()


def test_storage_budget_limits_the_size_of_all_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flusher_supervisor = SlotHolder(
        f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}", budget=25 * KB
    )
    try:
        rank = FakeRank(flusher_supervisor, run)
        for step in (1, 2):
            wait_for(rank.stage(step, bytes(10 * KB)), SlotState.DONE)
        slot = rank.stage(3, bytes(10 * KB), slot=1)
        wait_for(slot, SlotState.FAILED)
        assert "Disk quota exceeded: step 3 needs 10000 bytes" in slot.error
        assert "of the 25000 bytes of checkpoint.budget" in slot.error
        flusher_supervisor.free_space = lambda: remove(checkpoint(run, 1))
        wait_for(rank.stage(4, bytes(10 * KB)), SlotState.DONE)
        rank.close()
    finally:
        flusher_supervisor.close()


def test_flusher_supervisor_without_an_agent_frees_no_space(tmp_path: Path) -> None:
    place = tmp_path / "flusher.address"
    with small_storage(tmp_path, "300k") as run:
        own = FlusherSupervisor(place, node=0, nodes=1, log=tmp_path / "flusher.log", run=run)
        try:
            rank = FakeRank(Named(str(place)), run)
            slot = rank.stage(1, b"a" * 600 * KB)
            wait_until(lambda: slot.state is SlotState.FAILED, "the failure")
            assert "no agent is running to delete checkpoints by the keep rules" in slot.error
            rank.close()
        finally:
            own.close(wait=True)
