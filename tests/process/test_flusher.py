"""The flusher as a process: it commits what ranks sealed, whichever process dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.flusher_supervisor import (
    FakeRank,
    SlotHolder,
    fork,
    kill_process,
    wait_for,
    wait_until,
)

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.node import wire
from holdfast.trainer.slots.slots import DATA_OFFSET, SlotState

NAME = "step-00000007.a0001.l01"


@pytest.fixture
def flusher_supervisor() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


def checkpoint(run: Path, step: int = 7, launch: int = 1) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.a0001.l{launch:02d}"


def test_step_is_committed_once_every_local_rank_has_sealed_it(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ranks = [FakeRank(flusher_supervisor, run, rank=rank, world_size=2) for rank in range(2)]
    first = ranks[0].stage(7, b"zero" * 9000)
    time.sleep(0.3)
    assert first.state is SlotState.SEALED
    assert not checkpoint(run).exists()
    second = ranks[1].stage(7, b"one" * 5000)
    wait_for(first, SlotState.DONE)
    wait_for(second, SlotState.DONE)
    manifest = read_manifest(checkpoint(run))
    assert manifest is not None
    assert find_damage(checkpoint(run), manifest) == []
    assert [(f.path, f.bytes) for f in manifest.files] == [
        ("__0_0.distcp", 36000),
        ("__1_0.distcp", 15000),
    ]
    assert manifest.blocked_s == 0.5
    assert sorted(os.listdir(checkpoint(run))) == ["__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert os.readlink(run / "checkpoints" / "latest") == NAME
    wait_until(lambda: flusher_supervisor.of_kind("committed"), "word of the commit")
    assert flusher_supervisor.of_kind("committed")[0]["checkpoint"] == NAME
    for rank in ranks:
        rank.close()


def test_sealed_steps_are_committed_after_all_ranks_are_killed(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ready, tell = os.pipe()
    children, said = [], []

    def run_rank(rank: int) -> None:
        fake = FakeRank(flusher_supervisor, run, rank=rank, world_size=2)
        if rank == 1:
            flusher_supervisor.signal(signal.SIGSTOP)
        os.write(tell, b"g")
        fake.stage(7, bytes([rank]) * 50_000)
        fake.stage(8, bytes([rank]) * 50_000, slot=1, seal=rank == 0)
        os.write(tell, b"s")
        signal.pause()

    try:
        for rank in range(2):
            children.append(fork(run_rank, rank))
            said.append(os.read(ready, 1))
        said += [os.read(ready, 1) for _ in range(2)]
        assert sorted(said) == [b"g", b"g", b"s", b"s"]
    finally:
        for child in children:
            kill_process(child)
    flusher_supervisor.signal(signal.SIGCONT)
    answer = flusher_supervisor.drain()
    wait_until(lambda: flusher_supervisor.of_kind("failed"), "the torn step to be given up")
    assert answer["committed"] == [7]
    assert read_manifest(checkpoint(run)) is not None
    assert not checkpoint(run, 8).exists()
    assert "before it sealed step 8" in flusher_supervisor.of_kind("failed")[0]["error"]
    # Of the four slots, none holds memory any longer once the ranks are gone.
    wait_until(
        lambda: all(os.fstat(h).st_size <= DATA_OFFSET for h in flusher_supervisor.kept.values()),
        "the slots' memory to be freed",
    )
    assert len(flusher_supervisor.kept) == 4


def test_replacement_of_a_killed_flusher_commits_sealed_steps(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    rank = FakeRank(flusher_supervisor, run)
    wait_until(
        lambda: len(flusher_supervisor.kept) == 2, "the flusher supervisor to have the slots"
    )
    flusher_supervisor.signal(signal.SIGSTOP)
    sealed = rank.stage(7, b"x" * 100_000)
    begun = rank.stage(8, b"y" * 100_000, slot=1)
    begun.state = SlotState.FLUSHING
    checkpoint(run, 8).mkdir(parents=True)
    (checkpoint(run, 8) / "__0_0.distcp").write_bytes(b"written, not yet in a manifest")
    (checkpoint(run, 8) / "__0_0.distcp.tmp").write_bytes(b"torn")
    flusher_supervisor.kill()
    flusher_supervisor.start()
    wait_for(sealed, SlotState.DONE)
    wait_for(begun, SlotState.DONE)
    for step in (7, 8):
        manifest = read_manifest(checkpoint(run, step))
        assert manifest is not None
        assert find_damage(checkpoint(run, step), manifest) == []
    assert not (checkpoint(run, 8) / "__0_0.distcp.tmp").exists()
    # The new flusher also commits the live rank's next step.
    again = FakeRank(flusher_supervisor, run, launch=2)
    wait_for(again.stage(9, b"z" * 10), SlotState.DONE)
    rank.close()
    again.close()


def test_restarted_flusher_recognises_an_existing_commit(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    rank = FakeRank(flusher_supervisor, run)
    wait_until(
        lambda: len(flusher_supervisor.kept) == 2, "the flusher supervisor to have the slots"
    )
    slot = rank.stage(7, b"x" * 100)
    wait_for(slot, SlotState.DONE)
    before = (checkpoint(run) / "manifest.json").read_bytes()
    flusher_supervisor.kill()
    slot.state = SlotState.FLUSHING
    flusher_supervisor.start()
    wait_for(slot, SlotState.DONE)
    assert (checkpoint(run) / "manifest.json").read_bytes() == before
    rank.close()


def test_step_that_a_rank_never_sealed_fails_and_the_next_is_committed(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ranks = [FakeRank(flusher_supervisor, run, rank=rank, world_size=2) for rank in range(2)]
    ranks[0].stage(8, b"x", slot=1)
    wait_for(ranks[1].stage(9, b"x"), SlotState.SEALED)
    wait_for(ranks[0].slots[1], SlotState.FAILED)
    assert "went on to step 9" in ranks[0].slots[1].error
    wait_for(ranks[0].stage(9, b"x"), SlotState.DONE)
    assert [p.name for p in (run / "checkpoints").iterdir() if p.is_dir() and "9" in p.name]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("committed", [True, False])
def test_existing_checkpoint_directory_is_never_overwritten(
    flusher_supervisor: SlotHolder, tmp_path: Path, committed: bool
) -> None:
    run = tmp_path / "r"
    rank = FakeRank(flusher_supervisor, run)
    if committed:
        wait_for(rank.stage(7, b"mine" * 10), SlotState.DONE)
    else:
        checkpoint(run).mkdir(parents=True)
        (checkpoint(run) / "__0_0.distcp").write_bytes(b"mine" * 10)
    slot = rank.stage(7, b"other" * 10, slot=1)
    wait_for(slot, SlotState.FAILED)
    assert "is never overwritten" in slot.error
    assert (checkpoint(run) / "__0_0.distcp").read_bytes() == b"mine" * 10
    wait_for(rank.stage(8, b"next"), SlotState.DONE)
    rank.close()


@contextlib.contextmanager
def limited_storage(run: Path, flusher_supervisor: SlotHolder, bytes_max: int) -> Iterator[int]:
    """Storage with room for `bytes_max`; yields the errno of writes beyond it.

    A small tmpfs where one may be mounted, else a limit on the flusher's own files.
    """
    run.mkdir(exist_ok=True)
    size = f"size={bytes_max}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(run)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield errno.ENOSPC
        finally:
            subprocess.run(["umount", "-l", str(run)], check=True)
        return
    _, hard = resource.prlimit(flusher_supervisor.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(flusher_supervisor.process.pid, resource.RLIMIT_FSIZE, (bytes_max, hard))
    yield errno.EFBIG


def test_full_storage_is_reported_and_the_next_save_works(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    with limited_storage(run, flusher_supervisor, 256 * 1024) as code:
        rank = FakeRank(flusher_supervisor, run)
        wait_for(rank.stage(6, b"a" * 10_000), SlotState.DONE)
        slot = rank.stage(7, b"b" * 1_000_000)
        wait_for(slot, SlotState.FAILED)
        assert os.strerror(code) in slot.error
        assert read_manifest(checkpoint(run)) is None
        assert os.readlink(run / "checkpoints" / "latest") == "step-00000006.a0001.l01"
        wait_for(rank.stage(8, b"c" * 10_000), SlotState.DONE)
        wait_until(lambda: flusher_supervisor.of_kind("failed"), "word of the failure")
        assert flusher_supervisor.of_kind("failed")[0]["step"] == 7
        rank.close()


def test_two_nodes_commit_one_manifest_in_the_shared_directory(tmp_path: Path) -> None:
    run = tmp_path / "r"
    stem = f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}"
    flusher_supervisors = [SlotHolder(f"{stem}-{node}", node=node, nodes=2) for node in range(2)]
    try:
        ranks = [
            FakeRank(flusher_supervisors[n], run, rank=n, world_size=2, node=n, nodes=2)
            for n in range(2)
        ]
        waiting = ranks[1].stage(7, b"one" * 1000)
        wait_until(lambda: (checkpoint(run) / "parts" / "node-0001.json").exists(), "node 1's part")
        assert waiting.state is SlotState.FLUSHING
        slots = [waiting, ranks[0].stage(7, b"zero" * 1000)]
        for slot in slots:
            wait_for(slot, SlotState.DONE)
        manifest = read_manifest(checkpoint(run))
        assert manifest is not None
        assert find_damage(checkpoint(run), manifest) == []
        assert {f.path for f in manifest.files} == {"__0_0.distcp", "__1_0.distcp"}
        wait_until(lambda: not (checkpoint(run) / "parts").exists(), "the parts to be removed")
        # One node's storage fails: the other sees it in the shared directory at once.
        (checkpoint(run, 8)).mkdir()
        (checkpoint(run, 8) / "__1_0.distcp").write_bytes(b"in the way")
        slots = [rank.stage(8, b"x", slot=1) for rank in ranks]
        for slot in slots:
            wait_for(slot, SlotState.FAILED)
        assert "node 1" in slots[0].error
        # One node skips a step: the other sees that it continued.
        lonely = ranks[0].stage(9, b"x")
        ranks[1].stage(10, b"x")
        wait_for(lonely, SlotState.FAILED)
        assert "nodes [1] continued" in lonely.error
        wait_for(ranks[0].stage(10, b"x", slot=1), SlotState.DONE)
        for rank in ranks:
            rank.close()
    finally:
        for flusher_supervisor in flusher_supervisors:
            flusher_supervisor.close()


def test_flusher_ignores_signals_and_exits_after_its_supervisor_and_work(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    rank = FakeRank(flusher_supervisor, run)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        flusher_supervisor.signal(number)
    slot = rank.stage(7, b"x" * 500_000)
    rank.connection.close()
    assert flusher_supervisor.leave() == 0
    assert slot.state is SlotState.DONE
    assert json.loads((checkpoint(run) / "manifest.json").read_bytes())["step"] == 7


@pytest.mark.more
def test_drain_reply_fits_after_many_failed_saves(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / ("ü" * 100)
    run.mkdir()
    (run / "checkpoints").write_text("a file where a directory should be")
    rank = FakeRank(flusher_supervisor, run)
    steps = range(1, 131)
    for step in steps:
        slot = rank.stage(step, b"x", slot=step % 2)
        wait_for(slot, SlotState.FAILED)
    answer = flusher_supervisor.drain()
    assert [failure["step"] for failure in answer["failed"]] == [*steps][-len(answer["failed"]) :]
    assert len(answer["failed"]) > 10
    assert [message["step"] for message in flusher_supervisor.of_kind("failed")] == [*steps]
    assert flusher_supervisor.leave() == 0
    rank.close()


def test_text_is_clipped_to_the_message_limit() -> None:
    assert wire.clip("short", 100) == "short"
    assert len(json.dumps(wire.clip("ü" * 90_000, 6000))) <= 6000
    names = [f"step-{n:08d}" for n in range(9000)]
    kept = wire.newest_that_fit(names, 20_000)
    assert kept == names[-len(kept) :]
    assert 19_000 < len(json.dumps(kept)) <= 20_000
