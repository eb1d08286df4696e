"""Snapshots in memory: once the ranks are gone, the flusher commits the newest common one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_for, wait_until

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer.slots.slots import DATA_OFFSET, SlotState


@pytest.fixture
def flusher_supervisors() -> Iterator[list[SlotHolder]]:
    """Two nodes' flushers; tests of one node use the first."""
    name = f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}"
    made = [SlotHolder(f"{name}-{node}", node=node, nodes=2) for node in range(2)]
    yield made
    for flusher_supervisor in made:
        flusher_supervisor.close()


@pytest.fixture
def flusher_supervisor() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


def committed(run: Path) -> list[int]:
    """Steps with a complete, committed checkpoint."""
    found = []
    for path in sorted((run / "checkpoints").glob("step-*")):
        manifest = read_manifest(path)
        if manifest is not None:
            assert find_damage(path, manifest) == []
            found.append(manifest.step)
    return found


def test_newest_snapshot_common_to_all_dead_ranks_is_committed(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ranks = [FakeRank(flusher_supervisor, run, rank=rank, world_size=2) for rank in range(2)]
    wait_for(ranks[0].stage(5, b"on disk"), SlotState.SEALED)
    wait_for(ranks[1].stage(5, b"on disk"), SlotState.DONE)
    for rank in ranks:
        rank.snapshot(6, b"six" * 1000, slot=1)
        rank.snapshot(7, b"seven" * 1000, slot=0)
    ranks[0].snapshot(8, b"eight" * 1000, slot=1)
    ranks[1].stage(8, b"ei", slot=1, seal=False)
    ranks[0].close()
    time.sleep(0.5)
    # A live rank may overwrite its snapshot, so the flusher does not decide yet.
    assert committed(run) == [5]
    ranks[1].close()
    wait_until(lambda: committed(run) == [5, 7], "the snapshot of step 7")
    assert (
        run / "checkpoints/step-00000007.a0001.l01/__1_0.distcp"
    ).read_bytes() == b"seven" * 1000
    answer = flusher_supervisor.drain()
    assert answer["committed"] == [5, 7]
    assert [m["is_salvaged"] for m in flusher_supervisor.of_kind("committed")] == [False, True]
    wait_until(
        lambda: all(os.fstat(h).st_size <= DATA_OFFSET for h in flusher_supervisor.kept.values()),
        "the slots' memory to be freed",
    )


def test_superseded_or_abandoned_snapshot_is_dropped(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    first = FakeRank(flusher_supervisor, run)
    first.snapshot(6, b"six")
    wait_for(first.stage(7, b"seven", slot=1), SlotState.DONE)
    first.close()
    assert flusher_supervisor.drain()["committed"] == [7]
    second = FakeRank(flusher_supervisor, run, launch=2)
    second.snapshot(9, b"nine").state = SlotState.EMPTY
    second.close()
    third = FakeRank(flusher_supervisor, run, launch=3)
    third.snapshot(10, b"ten")
    FakeRank(flusher_supervisor, run, launch=4).close()
    third.close()
    assert flusher_supervisor.drain()["committed"] == []
    assert committed(run) == [7]


def test_snapshot_is_committed_when_the_supervisor_dies_with_its_ranks(
    flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ranks = [FakeRank(flusher_supervisor, run, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.snapshot(7, b"seven")
    ranks[0].close()
    flusher_supervisor._hang_up()
    time.sleep(0.3)
    ranks[1].close()
    assert flusher_supervisor.leave() == 0
    assert committed(run) == [7]


def test_nodes_with_different_newest_snapshots_commit_the_common_one(
    flusher_supervisors: list[SlotHolder], tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ranks = [
        FakeRank(flusher_supervisor, run, rank=node, world_size=2, node=node, nodes=2)
        for node, flusher_supervisor in enumerate(flusher_supervisors)
    ]
    ranks[0].snapshot(7, b"seven")
    ranks[0].snapshot(8, b"eight", slot=1)
    ranks[1].snapshot(7, b"seven", slot=1)
    ranks[1].snapshot(6, b"six")
    for rank in ranks:
        rank.close()
    for flusher_supervisor in flusher_supervisors:
        assert flusher_supervisor.drain()["committed"] == [7]
    assert committed(run) == [7]


def test_no_node_commits_a_snapshot_alone(
    flusher_supervisors: list[SlotHolder], tmp_path: Path
) -> None:
    run = tmp_path / "r"
    ranks = [
        FakeRank(flusher_supervisor, run, rank=node, world_size=2, node=node, nodes=2)
        for node, flusher_supervisor in enumerate(flusher_supervisors)
    ]
    ranks[0].snapshot(7, b"seven")
    ranks[1].snapshot(6, b"six")
    flusher_supervisors[1].kill()
    ranks[0].close()
    flusher_supervisors[0].send("drain", timeout_s=20.0, lost=[1])
    wait_until(lambda: flusher_supervisors[0].of_kind("drained"), "the answer to drain")
    (failed,) = flusher_supervisors[0].of_kind("failed")
    assert "nodes [1] are lost" in failed["error"]
    assert failed["step"] == 7
    assert committed(run) == []
    ranks[1].close()
