"""A lost node's part of the newest snapshot is committed from the copy at its neighbour."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until
from tests.support.agent_ranks import wait_for_commit
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.states import Cause
from holdfast.workers.nodes.heartbeats import newest_step

pytestmark = [pytest.mark.more, pytest.mark.timeout(400)]

NODES = 4
STEP_S = 0.2
# The longest time between two copies, in steps, on a machine that is busy.
ROUND_STEPS = 30


def run_on_four(root: Path, *, steps: int, sleep_s: float = STEP_S) -> LocalRun:
    return LocalRun(
        root,
        resources={
            "executor": "slurm",
            "nodes": NODES,
            "gpus_per_node": 1,
            "partition": "spot",
        },
        checkpoint={"interval": 10_000, "snapshots": 1, "neighbour": True},
        elastic={"choices": [NODES]},
        steps=steps,
        sleep_s=sleep_s,
        noise=0.1,
    )


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, but for the generators that the program does not seed."""
    reader = FileSystemReader(directory)
    found: dict[str, torch.Tensor] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in reader.read_metadata().state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
        and not re.fullmatch(r"rng\.rank\d+\.(python|numpy)", key)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("which", [0, 2], ids=["node 0", "node 2"])
def test_newest_snapshot_is_committed_with_the_bits_of_an_uninterrupted_run(
    slurm: SlurmCluster, tmp_path: Path, which: int
) -> None:
    run = run_on_four(tmp_path / "lost", steps=100_000)
    attempt = run.submit()
    try:
        run.wait_for_step(attempt, 20)
        hosts = {beat.node: beat.host for beat in run.beats(attempt)}
        reached = newest_step(run.beats(attempt)) or 0
        lost_at = time.time()
        slurm.kill_node(hosts[which])
        try:
            kept = wait_for_commit(run, lambda manifest: manifest.reason == "crash")
            wait_until(lambda: "down" in slurm.node_states()[hosts[which]], "the loss", 60)
            view = run.wait_for_end()
        finally:
            slurm.start_node(hosts[which])
    finally:
        run.end_all()
    assert view.cause is Cause.NODE_FAILURE, view.evidence
    # At most the steps since the last copy that had arrived from all nodes.
    assert kept.step >= reached - ROUND_STEPS
    told = [e.data for e in run.events(EventKind.COMMITTED) if e.data.get("reason") == "crash"]
    assert [one["checkpoint"] for one in told] == [kept.name]
    log = attempt.node_logs((which + 1) % NODES) / "flusher.log"
    assert f"the files of node {which}, which is lost, were written" in log.read_text()

    whole = run_on_four(tmp_path / "whole", steps=kept.step, sleep_s=0.0)
    whole.submit()
    try:
        whole.wait_for_end()
    finally:
        whole.end_all()
    last = read_manifest(whole.paths.list_checkpoints()[-1])
    assert last is not None
    assert last.step == kept.step
    ours, theirs = tensors_of(run.paths.checkpoint(kept.name)), tensors_of(whole.paths.latest)
    assert ours.keys() == theirs.keys()
    assert {f"rng.rank{rank:05d}.torch" for rank in range(NODES)} <= ours.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    # The node whose copies were on the lost one may say so afterwards.
    assert not [e for e in run.events(EventKind.PROTECTION) if e.time < lost_at]
