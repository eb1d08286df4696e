"""Lost nodes: a step that the lost node had written is committed by the others, else it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.saves import (
    Node,
    has_committed,
    has_manifest,
    name_of,
    nodes_of,
    resume_step,
    save,
    wait_until_written,
)
from tests.faults.shim import Action, Point
from tests.support.flusher_supervisor import wait_until

from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.paths import PARTS, RunPaths
from holdfast.contracts.environment import FLUSH_TIMEOUT
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher import commit as flush_commit
from holdfast.trainer.flusher.commit import PeerState, commit_together, part_name
from holdfast.trainer.slots.slots import SlotState

PART_OF_0 = Point("rename", "run/checkpoints/STEP/parts/node-0000.json", 1)
DATA_OF_0 = Point("rename", "run/checkpoints/STEP/__0_0.distcp", 1)


@pytest.fixture
def two(shim_library: Path, tmp_path: Path) -> Iterator[list[Node]]:
    with nodes_of(shim_library, tmp_path, nodes=2) as nodes:
        yield nodes


def kill_at(node: Node, point: Point, step: int) -> None:
    """Stage the step on the node and wait for the flusher's death at the point."""
    node.shim.arm(point, name_of(step), Action.KILL_AFTER)
    node.stage(step)
    node.flusher_supervisor.process.wait(60)
    assert node.shim.has_fired


def test_step_is_committed_if_the_lost_node_had_written_its_part(two: list[Node]) -> None:
    assert has_committed(save(two, 1))
    kill_at(two[0], PART_OF_0, 2)
    staged = [rank.slots for rank in two[0].ranks]
    slots = two[1].stage(2)
    part = RunPaths(two[1].run).checkpoint(name_of(2)) / PARTS / part_name(1)
    wait_until(part.exists, "node 1's part")
    assert not has_manifest(two[1].run, 2)
    answer = two[1].flusher_supervisor.drain(lost=[0])
    assert answer["committed"][-1] == 2
    assert has_committed(slots)
    assert resume_step(two[1].run) == 2
    # If node 0 was only cut off, it finds this commit and does not make another one.
    content = (RunPaths(two[1].run).checkpoint(name_of(2)) / "manifest.json").read_bytes()
    two[0].flusher_supervisor.kill()
    two[0].flusher_supervisor.start()
    wait_until(
        lambda: all(
            any(s.state is SlotState.DONE and s.step == 2 for s in pair) for pair in staged
        ),
        "node 0 to report the commit too",
    )
    assert (RunPaths(two[1].run).checkpoint(name_of(2)) / "manifest.json").read_bytes() == content


def publish_shards(nodes: list[Node]) -> None:
    """Every rank describes what it writes, and every node publishes the list for the others."""
    for node in nodes:
        for rank in node.ranks:
            rank.describe(f"rng.rank{rank.rank}", "model.weight", "model.bias")
    folder = RunPaths(nodes[0].run).attempt(1).launch(1)
    for number in range(len(nodes)):
        path = folder / f"shards-node-{number:04d}.json"
        wait_until(path.exists, f"the list of node {number}")


@pytest.mark.more
def test_step_fails_and_names_lost_tensors_if_the_lost_node_had_not_written(
    two: list[Node],
) -> None:
    assert has_committed(save(two, 1))
    publish_shards(two)
    kill_at(two[0], DATA_OF_0, 2)
    slots = two[1].stage(2)
    answer = two[1].flusher_supervisor.drain(lost=[0])
    wait_until_written(slots)
    assert not has_committed(slots)
    error = answer["failed"][-1]["error"]
    assert "nodes [0] were lost before they wrote all their files" in error
    assert "Missing: ranks 0 to 1. Nothing was committed" in error
    shards = (
        ".metadata, __0_0.distcp, train_state.json with rng.rank0 and 2 more keys; "
        "pp1/__1_0.distcp with rng.rank1 and 2 more keys"
    )
    assert error.endswith(f"Lost: {shards}")
    assert all(slot.error == error for slot in slots)
    # A snapshot in memory fails with the same message.
    for rank in two[1].ranks:
        rank.snapshot(3, b"content")
        rank.close()
    error = two[1].flusher_supervisor.drain(lost=[0])["failed"][-1]["error"]
    assert error.endswith(f"nodes [0] are lost, together with {shards}")
    assert resume_step(two[1].run) == 1


@pytest.mark.more
def test_node_0_fails_a_step_that_a_lost_node_had_not_written(two: list[Node]) -> None:
    assert has_committed(save(two, 1))
    two[1].flusher_supervisor.kill()
    slots = two[0].stage(2)
    two[0].flusher_supervisor.drain(lost=[1])
    assert not has_committed(slots)
    assert "nodes [1] were lost before they wrote all their files" in slots[0].error
    assert "Missing: ranks 2 to 3." in slots[0].error
    assert resume_step(two[0].run) == 1


def test_two_concurrent_committers_report_the_same_commit(
    shim_library: Path, tmp_path: Path
) -> None:
    """Node 1 wrongly considers node 0 lost; node 2's part makes both commit at the same time."""
    with nodes_of(shim_library, tmp_path, nodes=3, local_ranks=1) as nodes:
        nodes[1].flusher_supervisor.drain(lost=[0])
        parts = RunPaths(nodes[0].run).checkpoints
        for step in range(1, 21):
            slots = nodes[0].stage(step) + nodes[1].stage(step)
            for node in (0, 1):
                path = parts / name_of(step) / PARTS / part_name(node)
                wait_until(path.exists, f"the part of node {node}")
            slots += nodes[2].stage(step)
            wait_until_written(slots)
            assert has_committed(slots), [slot.error for slot in slots]
            assert resume_step(nodes[0].run) == step
        wait_until(
            lambda: all(len(n.flusher_supervisor.of_kind("committed")) == 20 for n in nodes), "word"
        )
        told = [
            [(m["step"], m["bytes"]) for m in n.flusher_supervisor.of_kind("committed")]
            for n in nodes
        ]
        assert told[0] == told[1] == told[2]


def part_of(node: int, nodes: int) -> dict[str, object]:
    """The part of a node with one rank for a step without files."""
    facts = {
        "run_uid": "0" * 32,
        "run": "run",
        "name": name_of(1),
        "step": 1,
        "attempt": 1,
        "launch": 1,
        "world_size": nodes,
    }
    return {
        "node": node,
        "nodes": nodes,
        "world_size": nodes,
        "ranks": [node],
        "files": [],
        "blocked_s": 0.0,
        "staged_at": 1.0,
        "fsynced_at": 2.0,
        "manifest": facts if node == 0 else None,
    }


def test_other_nodes_commit_when_node_0_stays_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_commit, "TAKEOVER_S", 0.3)
    monkeypatch.setattr(flush_commit, "TAKEOVER_STAGGER_S", 0.0)
    run = RunPaths(tmp_path / "run")
    directory = run.checkpoint(name_of(1))
    make_directory(directory / PARTS)
    write_bytes(directory / PARTS / part_name(0), to_json(part_of(0, 4)))
    found: list[Manifest] = []

    def commit(node: int) -> None:
        peers = PeerState(abandoned=lambda: None)
        found.append(commit_together(run, directory, part_of(node, 4), peers))

    threads = [threading.Thread(target=commit, args=(node,)) for node in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len({manifest.committed_at for manifest in found}) == 1
    assert has_manifest(run.directory, 1)


def test_wait_for_missing_parts_times_out_and_names_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLUSH_TIMEOUT, "0.3")
    run = RunPaths(tmp_path / "run")
    directory = run.checkpoint(name_of(1))
    make_directory(directory)
    with pytest.raises(SaveError, match=r"nodes \[1, 2, 3\] .*ranks 1 to 3"):
        commit_together(run, directory, part_of(0, 4), PeerState(abandoned=lambda: None))
    assert not has_manifest(run.directory, 1)
