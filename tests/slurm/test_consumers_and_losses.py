"""Consumers work while the training beside them loses a node, and while they lose their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until
from tests.slurm.test_lost_nodes import run_on_all, supervised

from holdfast.contracts.disk import leases
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.leases import readers
from holdfast.contracts.disk.manifest import newest_committed
from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.records.consumers import ConsumerState, Use, uses_in
from holdfast.contracts.records.documents import Claim, Submission, read_document
from holdfast.contracts.states import Cause
from holdfast.workers.checkpoints import deletion
from holdfast.workers.runs import operator

WAIT_S = 300.0
# Each start leaves a mark with its name, and waits for a file.
EVALUATION = """
import os, sys, time
name, folder = os.environ["HOLDFAST_CONSUMER"], sys.argv[1]
open(os.path.join(folder, name), "a").write("x")
while not os.path.exists(os.path.join(folder, f"go-{name}")):
    assert os.path.exists(os.environ["HOLDFAST_CHECKPOINT_PATH"] + "/manifest.json")
    time.sleep(0.1)
"""


class Watched:
    """A run on two nodes with a consumer here and one in a job, for a checkpoint that is pinned."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", EVALUATION, str(folder)]
        one = {"command": command, "event": "pin", "retries": 3, "timeout_min": 60}
        job = {"gpus": 1, "partition": "prod"}
        self.folder = folder
        self.run = run_on_all(
            folder / "root",
            resources={"executor": "slurm", "nodes": 2, "gpus_per_node": 1, "partition": "spot"},
            supervision={"poll_s": 1.0, "backoff_s": 1, "restarts_in_place": 0},
            elastic={"choices": [1, 2]},
            checkpoint={"interval": 20, "keep": {"last": 1}},
            on=[{"name": "here", **one}, {"name": "there", "job": job, **one}],
        )
        self.checkpoint = ""

    def pin_the_newest(self) -> None:
        found = wait_until(lambda: newest_committed(self.run.paths, 1), "a commit")
        self.checkpoint = found.name
        operator.pin(self.run.paths, self.checkpoint, by="ann")

    def has_newer(self) -> bool:
        newest = newest_committed(self.run.paths, 1)
        return newest is not None and newest.name != self.checkpoint

    def uses(self) -> dict[str, Use]:
        return {one.consumer: one for one in uses_in(self.run.events(EventKind.CONSUMER)).values()}

    def starts(self, name: str) -> list[int]:
        lines = (event.data for event in self.run.events(EventKind.CONSUMER))
        return [x["start"] for x in lines if x["consumer"] == name and x["state"] == "started"]

    def marks(self, name: str) -> int:
        mark = self.folder / name
        return len(mark.read_text()) if mark.exists() else 0

    def holders(self) -> set[str]:
        return set(readers(self.run.paths.checkpoint(self.checkpoint)))

    def has_checkpoint(self) -> bool:
        deletion.apply(self.run.paths, by="keep rules")
        return (self.run.paths.checkpoint(self.checkpoint) / MANIFEST).exists()

    def node_of_job(self, slurm: SlurmCluster, start: int) -> str:
        paths = self.run.paths.consumer(start).submission
        found = wait_until(lambda: read_document(Submission, paths), "the consumer's job")
        return slurm.run("squeue", "-h", "-j", found.job_id, "-o", "%N").strip()


def nodes_of(run: LocalRun, slurm: SlurmCluster) -> list[str]:
    (view,) = [one for one in run.history().attempts if not one.state.is_terminal]
    found = read_document(Submission, run.paths.attempt(view.number).submission)
    assert found is not None
    listed = slurm.run("squeue", "-h", "-j", found.job_id, "-o", "%N").strip()
    return slurm.run("scontrol", "show", "hostnames", listed).split()


def lose(slurm: SlurmCluster, name: str) -> None:
    slurm.kill_node(name)
    wait_until(lambda: "down" in slurm.node_states()[name], "the loss", 60)


@pytest.mark.more
@pytest.mark.timeout(900)
def test_consumers_survive_the_loss_of_nodes(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Watched(tmp_path)
    run, lost = world.run, []
    with supervised(run):
        try:
            first = wait_until(run.paths.list_attempts, "an attempt")[0]
            run.wait_for_step(first, 5)
            world.pin_the_newest()
            wait_until(lambda: world.marks("here") and world.marks("there"), "the consumers")
            operator.unpin(run.paths, world.checkpoint, by="ann")
            before = world.holders()
            assert len(before) == 2, "each consumer has a lease"
            # The checkpoint from which the next attempt resumes would be kept.
            wait_until(world.has_newer, "a newer commit")
            # The training loses a node, and the attempt is relaunched on one node.
            there = world.node_of_job(slurm, world.starts("there")[0])
            lost.append(next(one for one in nodes_of(run, slurm)[::-1] if one != there))
            lose(slurm, lost[-1])
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt")[0]
            run.wait_for_step(second, 1)
            assert world.has_checkpoint()
            assert world.holders() == before, "a lease was lost"
            assert (world.starts("here"), world.starts("there")) == ([1], [2])
            assert {name: one.state for name, one in world.uses().items()} == dict.fromkeys(
                ("here", "there"), ConsumerState.STARTED
            )
            # The job of a consumer loses its node. It is started again, and only then.
            lost.append(there)
            lose(slurm, there)
            wait_until(lambda: world.marks("there") == 2, "a second start", WAIT_S)
            assert world.has_checkpoint()
        finally:
            for name in lost:
                slurm.start_node(name)
        assert world.marks("here") == 1
        assert len(world.starts("there")) == 2
        for name in ("here", "there"):
            (tmp_path / f"go-{name}").touch()
        wait_until(lambda: _are_done(world), "the end of the consumers", WAIT_S)
        claims = [
            read_document(Claim, run.paths.consumer(number).claim)
            for number in world.starts("there")
        ]
        assert all(claims)
        # The start that was killed with its node has left a lease, which would expire later.
        monkeypatch.setattr(leases, "LEASE_S", 5.0)
        wait_until(lambda: not world.has_checkpoint(), "its deletion", WAIT_S)
    assert (world.marks("here"), world.marks("there")) == (1, 2)
    assert run.history().attempts[0].cause is Cause.NODE_FAILURE


def _are_done(world: Watched) -> bool:
    found: dict[str, Any] = world.uses()
    return all(found[name].state is ConsumerState.DONE for name in ("here", "there"))
