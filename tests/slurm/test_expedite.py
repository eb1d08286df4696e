"""A run with `resources.standby = "expedite"` or "auto" loses a node while the queue is full.

Slurm 25.11 and later restart the job ahead of all others. Older ones have a successor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from tests.process.local_runs import LocalRun, wait_until
from tests.slurm.test_lost_nodes import run_on_all, supervised
from tests.slurm.test_successors import ANOTHER_UID, cancel_others, jobs_of

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import newest_committed
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.states import Cause, RunState
from holdfast.workers.runs import preflight
from holdfast.workers.schedulers import executor_for, slurm_client

TWO_NODES = {"executor": "slurm", "nodes": 2, "gpus_per_node": 1, "partition": "spot"}
# Jobs of another user, and how long each holds a node.
OTHERS = 30
OTHERS_S = 20
# From the loss of the node to the first new step. Slurm notices the loss after 15 to 25 s.
TRAINS_S_MAX = 120.0


def is_new() -> bool:
    """Return True if this machine's Slurm has an expedited requeue."""
    return tuple(int(part) for part in slurm_client.version().split(".")[:2]) >= (25, 11)


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A cluster that allows expedited requeue, in a folder that another user's jobs can reach."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="holdfast-slurm-")))
        folder.chmod(0o711)
        cluster = SlurmCluster(folder / "cluster", ClusterSpec(kill_wait_s=10, expedite=True))
        stack.enter_context(cluster)
        cluster.paths.directory.chmod(0o711)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


def fill_queue(slurm: SlurmCluster) -> None:
    """Fill the nodes and the queue with short jobs of another user."""
    options = [f"--uid={ANOTHER_UID}", "--partition=spot", "--nodes=1", "--exclusive"]
    options += ["--time=20", "--output=/dev/null", "--chdir=/", f"--wrap=sleep {OTHERS_S}"]
    for _ in range(OTHERS):
        slurm.run("sbatch", *options)


def run_with(root: Path, standby: str, **fields: Any) -> LocalRun:
    resources: dict[str, Any] = {**TWO_NODES, "standby": standby, "extra": {"exclusive": True}}
    supervision = {"poll_s": 1.0, "backoff_s": 0}
    return run_on_all(
        root, resources=resources, elastic={"choices": [2]}, supervision=supervision, **fields
    )


@pytest.mark.more
@pytest.mark.timeout(400)
def test_a_lost_node_of_a_run_on_a_full_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With an old Slurm, `auto` takes a successor, which the queue of others does not pass."""
    run = run_with(tmp_path / "root", "expedite" if is_new() else "auto")
    try:
        with supervised(run):
            first = wait_until(run.paths.list_attempts, "an attempt")[0]
            run.wait_for_step(first, 5)
            wait_until(lambda: newest_committed(run.paths, 1), "a checkpoint", 60)
            if not is_new():
                wait_until(lambda: run.events(EventKind.SUCCESSOR_SUBMITTED), "the successor", 60)
            fill_queue(slurm)
            name = slurm_client.expand_hosts(run.claim(first).host)[0]
            slurm.kill_node("n2" if name == "n1" else "n1")
            lost_at = time.time()
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt", 120)[0]
            run.wait_for_step(second, (run.history().attempts[0].last_step or 1) + 1)
            trains_s = time.time() - lost_at
            others = slurm.run("squeue", "-h", "-u", str(ANOTHER_UID), "-o", "%T").split()
    finally:
        cancel_others(slurm)
        slurm.start_node("n2" if name == "n1" else "n1")
    print(f"trains again {trains_s:.1f} s after the loss, load {os.getloadavg()}")
    history = run.history()
    lost, again = history.attempts
    assert lost.cause is Cause.NODE_FAILURE, lost.evidence
    assert again.resumed_from is not None
    assert trains_s <= TRAINS_S_MAX
    # Each node that becomes free could take one of them.
    assert "PENDING" in others
    (adopted,) = run.events(EventKind.SUCCESSOR_ADOPTED)
    assert (adopted.data["attempt"], adopted.data["job_id"]) == (2, again.job_id)
    if is_new():
        assert (again.job_id, adopted.data["restarts"]) == (lost.job_id, 1)
    else:
        assert again.job_id != lost.job_id
    assert history.state is RunState.CANCELLED
    wait_until(lambda: not jobs_of(slurm, run), "an empty queue", 60)


@pytest.mark.more
def test_the_version_of_the_cluster_decides(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = run_with(tmp_path / "root", "expedite")
    assert executor_for("slurm").expedites() is is_new()
    if is_new():
        preflight.check(run.spec, tmp_path)
        return
    with pytest.raises(PreflightError, match=r"25\.11 added it; set 'successor'"):
        preflight.check(run.spec, tmp_path)


@pytest.mark.more
@pytest.mark.timeout(300)
def test_a_failed_job_of_a_run_leaves_nothing_in_the_queue(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm holds the restart of a job that fails while its nodes are healthy."""
    run = run_with(tmp_path / "root", "auto")
    with supervised(run):
        first = wait_until(run.paths.list_attempts, "an attempt")[0]
        run.wait_for_step(first, 5)
        job = run.history().attempts[0].job_id
        slurm.run("scancel", "--signal=KILL", f"{job}.0")
        second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt", 120)[0]
        run.wait_for_step(second, 1)
    assert run.history().state is RunState.CANCELLED
    wait_until(lambda: not jobs_of(slurm, run), "an empty queue", 60)
