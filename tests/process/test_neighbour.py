"""Copies of snapshots at a neighbour: real flushers, of which one is lost with all its memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.test_snapshots import committed
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_until

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import PARTS, CheckpointName, RunPaths
from holdfast.trainer.flusher.salvage import LISTS_WAIT_S

NODES = 3


class Nodes:
    """The flushers of some nodes, each with one rank."""

    def __init__(self, run: Path, nodes: int) -> None:
        self.run = run
        name = f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}"
        self.flushers = [SlotHolder(f"{name}-{n}", node=n, nodes=nodes) for n in range(nodes)]
        self.ranks = [
            FakeRank(each, run, rank=n, world_size=nodes, node=n, nodes=nodes)
            for n, each in enumerate(self.flushers)
        ]
        self.folder = RunPaths(run).attempt(1).launch(1)
        self.folder.mkdir(parents=True)

    def protect(self, *nodes: int) -> None:
        """Have each node's snapshots copied to the next one; all of them if none is named."""
        count = len(self.flushers)
        for node in nodes or range(count):
            self.flushers[node].send(
                "neighbour",
                launch=1,
                node=node,
                holder=(node + 1) % count,
                folder=str(self.folder),
                addresses=["127.0.0.1"],
            )

    def round(self, number: int, keep: int) -> None:
        for each in self.flushers:
            each.send("copy", launch=1, round=number, keep=keep)

    def snapshot(self, step: int, *, slot: int = 0) -> None:
        for rank in self.ranks:
            rank.snapshot(step, content_of(rank.rank, step), slot=slot)

    def wait_for_copies(self, step: int) -> None:
        def missing() -> list[int]:
            heard = [each.of_kind("protected") for each in self.flushers]
            return [n for n, each in enumerate(heard) if not any(m["step"] >= step for m in each)]

        wait_until(lambda: not missing(), f"the copies of step {step}")

    def lose(self, *lost: int) -> None:
        """Lose nodes with their flushers and slots, then end the other nodes' ranks."""
        for node in lost:
            if self.flushers[node].process.poll() is None:
                self.flushers[node].kill()
            for slot in self.ranks[node].slots:
                slot.data[:] = bytes(len(slot.data))
        for rank in self.ranks:
            rank.close()
        for node, each in enumerate(self.flushers):
            if node not in lost:
                each.send("drain", timeout_s=30.0, lost=list(lost))

    def await_drained(self, *lost: int) -> list[SlotHolder]:
        left = [each for node, each in enumerate(self.flushers) if node not in lost]
        wait_until(lambda: all(each.of_kind("drained") for each in left), "the drains", 60)
        return left

    def close(self) -> None:
        for each in self.flushers:
            each.close()


def content_of(rank: int, step: int) -> bytes:
    return f"rank {rank} after step {step}; ".encode() * 500


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "r", NODES)
    yield made
    made.close()


@pytest.mark.parametrize("lost", range(NODES))
def test_newest_snapshot_is_committed_from_the_copy_of_a_lost_node(nodes: Nodes, lost: int) -> None:
    nodes.protect()
    nodes.snapshot(7)
    nodes.wait_for_copies(7)
    nodes.round(8, keep=7)
    nodes.snapshot(8, slot=1)
    nodes.wait_for_copies(8)
    nodes.lose(lost)
    left = nodes.await_drained(lost)
    lists = {path.name: path.read_text() for path in nodes.folder.glob("*.json")}
    assert committed(nodes.run) == [8], (lists, [each.heard for each in left])
    directory = RunPaths(nodes.run).checkpoint(str(CheckpointName(8, 1, 1)))
    for rank in range(NODES):
        assert (directory / f"__{rank}_0.distcp").read_bytes() == content_of(rank, 8)
    manifest = read_manifest(directory)
    assert manifest is not None
    assert len(manifest.files) == NODES
    for each in left:
        assert [m["step"] for m in each.of_kind("committed")] == [8]


def test_step_that_ranks_overwrote_is_committed_from_the_copies_of_all(nodes: Nodes) -> None:
    """The network is slower than the snapshots: no slot has the step that was copied."""
    nodes.protect()
    nodes.snapshot(7)
    nodes.wait_for_copies(7)
    for step in (8, 9, 10):
        nodes.snapshot(step, slot=step % 2)
    nodes.lose(1)
    nodes.await_drained(1)
    assert committed(nodes.run) == [7]
    directory = RunPaths(nodes.run).checkpoint(str(CheckpointName(7, 1, 1)))
    for rank in range(NODES):
        assert (directory / f"__{rank}_0.distcp").read_bytes() == content_of(rank, 7)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes whose ranks have planned."""
    made = Nodes(tmp_path / "r", 2)
    for rank in made.ranks:
        rank.describe("layer")
    yield made
    made.close()


def test_node_without_a_snapshot_does_not_keep_the_others_waiting(two: Nodes) -> None:
    """Its rank died in the first copy of the launch."""
    two.ranks[0].snapshot(7, content_of(0, 7))
    two.ranks[1].slots[0].begin(7)
    began = time.monotonic()
    two.lose()
    left = two.await_drained()
    assert time.monotonic() - began < LISTS_WAIT_S / 4
    assert [each.of_kind("drained")[0]["is_done"] for each in left] == [True, True]
    assert committed(two.run) == []


def test_node_without_a_snapshot_commits_its_copy(two: Nodes) -> None:
    two.protect()
    two.snapshot(7)
    two.wait_for_copies(7)
    two.ranks[0].snapshot(8, content_of(0, 8), slot=1)
    for slot in two.ranks[1].slots:
        slot.begin(8)
    two.lose()
    two.await_drained()
    assert committed(two.run) == [7]


def test_loss_is_not_waited_for_where_a_node_has_no_snapshot(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "r", NODES)
    try:
        for rank in nodes.ranks:
            rank.describe("layer")
        for rank in nodes.ranks[:2]:
            rank.snapshot(7, content_of(rank.rank, 7))
        began = time.monotonic()
        nodes.lose(1)
        nodes.await_drained(1)
        assert time.monotonic() - began < LISTS_WAIT_S / 4
    finally:
        nodes.close()


def test_ranks_that_end_as_planned_list_nothing(two: Nodes) -> None:
    for rank in two.ranks:
        rank.leave()
    for each in two.flushers:
        each.send("drain", timeout_s=30.0, lost=[])
    two.await_drained()
    assert list(two.folder.glob("snapshots-node-*.json")) == []


def test_two_lost_nodes_that_are_neighbours_leave_the_checkpoint_on_disk(nodes: Nodes) -> None:
    nodes.protect()
    for rank in nodes.ranks:
        rank.describe(f"layer.{rank.rank}")
    nodes.snapshot(7)
    nodes.wait_for_copies(7)
    # Node 1's copy was at node 2; that of node 2 is at node 0.
    nodes.lose(1, 2)
    (left,) = nodes.await_drained(1, 2)
    assert committed(nodes.run) == []
    (failed,) = left.of_kind("failed")
    assert "nodes [1] are lost, as nodes [2] are, together with __1_0.distcp" in failed["error"]


def test_two_lost_nodes_that_are_not_neighbours_are_both_written(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "r", 4)
    try:
        nodes.protect()
        nodes.snapshot(7)
        nodes.wait_for_copies(7)
        nodes.lose(1, 3)
        nodes.await_drained(1, 3)
        assert committed(nodes.run) == [7]
    finally:
        nodes.close()


@pytest.mark.parametrize(("copied", "expected"), [(7, 7), (8, 8)])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "after the answer"])
def test_a_node_is_lost_after_it_has_listed_its_snapshots(
    nodes: Nodes, copied: int, expected: int, is_known: bool
) -> None:
    """It does not write what it listed. Its neighbour has the newest step, or the one before."""
    nodes.protect()
    nodes.snapshot(7)
    nodes.wait_for_copies(7)
    if copied == 8:
        nodes.round(8, keep=7)
    nodes.snapshot(8, slot=1)
    if copied == 8:
        nodes.wait_for_copies(8)
    nodes.flushers[1].kill()
    listed = {"node": 1, "steps": [7, 8]}
    (nodes.folder / "snapshots-node-0001.json").write_text(json.dumps(listed))
    for rank in nodes.ranks:
        rank.close()
    others = (nodes.flushers[0], nodes.flushers[2])
    for each in others:
        each.send("drain", timeout_s=30.0, lost=[1] if is_known else [])
    if not is_known:
        wait_until((nodes.folder / "snapshots-answer.json").exists, "the answer")
        for each in others:
            each.send("drain", timeout_s=30.0, lost=[1])
    nodes.await_drained(1)
    said = [each.of_kind("failed") for each in others]
    assert committed(nodes.run) == [expected], said
    directory = RunPaths(nodes.run).checkpoint(str(CheckpointName(expected, 1, 1)))
    for number in range(NODES):
        content = content_of(number, expected)
        assert (directory / f"__{number}_0.distcp").read_bytes() == content
    assert not (directory / PARTS).exists()


def test_what_no_neighbour_has_is_tried_once(two: Nodes) -> None:
    """The error is that of the first try."""
    two.ranks[0].snapshot(7, content_of(0, 7))
    two.flushers[1].kill()
    (two.folder / "snapshots-node-0001.json").write_text(json.dumps({"node": 1, "steps": [7]}))
    two.lose(1)
    (left,) = two.await_drained(1)
    assert committed(two.run) == []
    (failed,) = left.of_kind("failed")
    assert "nodes [1] were lost before they wrote all their files" in failed["error"]


def test_restarted_flusher_keeps_copies_again(nodes: Nodes) -> None:
    nodes.protect()
    nodes.snapshot(7)
    nodes.wait_for_copies(7)
    # Node 1 keeps node 0's copy. Its agent asks the next flusher again.
    nodes.flushers[1].kill()
    nodes.flushers[1].start()
    nodes.protect(1)
    nodes.round(8, keep=7)
    nodes.snapshot(8, slot=1)
    nodes.wait_for_copies(8)
    nodes.lose(0)
    nodes.await_drained(0)
    assert committed(nodes.run) == [8]


def damage_memory(pid: int, content: bytes) -> int:
    """Change a byte of every place in a process's writable memory that has `content`."""
    changed = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, permissions = line.split()[:2]
            if not permissions.startswith("rw-p"):
                continue
            start, end = (int(number, 16) for number in span.split("-"))
            memory.seek(start)
            held, at = memory.read(end - start) or b"", -1
            while (at := held.find(content, at + 1)) >= 0:
                memory.seek(start + at + len(content) // 2)
                memory.write(b"!")
                changed += 1
    return changed


def test_copy_that_is_damaged_in_a_flusher_s_memory_is_passed_over(
    nodes: Nodes,
) -> None:
    nodes.protect()
    nodes.snapshot(7)
    nodes.wait_for_copies(7)
    # Node 2 keeps node 1's copy.
    assert damage_memory(nodes.flushers[2].process.pid, content_of(1, 7)) >= 1
    nodes.lose(1)
    left = nodes.await_drained(1)
    assert committed(nodes.run) == []
    assert all("nodes [1] are lost" in each.of_kind("failed")[0]["error"] for each in left)
