"""A run whose successor waits in the queue loses its allocation while the queue is full."""

from __future__ import annotations

import os
import signal
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

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.workers.nodes.heartbeats import read_heartbeats
from holdfast.workers.schedulers import slurm_client

ALL_NODES = {"executor": "slurm", "nodes": 4, "gpus_per_node": 1, "partition": "spot"}
ANOTHER_UID = 65534
OTHERS = 6
BETWEEN_S = 10
# From the end of the lost allocation to the start of the next job, without the job that preempted.
STARTS_S_MAX = 60.0
# A controller that does not answer scancel in time.
DEAF = "#!/bin/sh\necho scancel: error: Socket timed out on send/recv operation >&2\nexit 1\n"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A cluster in a folder that another user's jobs can reach."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="holdfast-slurm-")))
        folder.chmod(0o711)
        cluster = SlurmCluster(folder / "cluster", ClusterSpec(grace_time_s=10, kill_wait_s=10))
        stack.enter_context(cluster)
        cluster.paths.directory.chmod(0o711)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


def fill_queue(slurm: SlurmCluster, nodes: int) -> None:
    """Queue jobs of another user, of `nodes` nodes each."""
    options = [f"--uid={ANOTHER_UID}", "--partition=spot", f"--nodes={nodes}", "--exclusive"]
    options += ["--time=20", "--output=/dev/null", "--chdir=/", "--wrap=sleep 600"]
    for _ in range(OTHERS):
        slurm.run("sbatch", *options)


def kill_rank(run: LocalRun) -> None:
    """Kill a rank of the first attempt, which ends by that."""
    beats = read_heartbeats(run.paths.attempt(1))
    os.kill(beats[0].ranks[0].pid, signal.SIGKILL)


def preempt(slurm: SlurmCluster, seconds: int = BETWEEN_S) -> None:
    """Take every node of the partition `spot` for a short job of higher priority."""
    options = ["--partition=prod", "--nodes=4", "--exclusive", "--output=/dev/null", "--chdir=/"]
    slurm.run("sbatch", *options, f"--wrap=srun sleep {seconds}")


def lose_allocation(slurm: SlurmCluster, run: LocalRun, how: str = "preempted") -> float:
    """End the run's first attempt in a full queue; return when it had ended."""
    first = wait_until(run.paths.list_attempts, "an attempt")[0]
    run.wait_for_step(first, 5)
    if run.spec.resources.standby == "successor":
        wait_until(lambda: run.events(EventKind.SUCCESSOR_SUBMITTED), "the successor", 60)
    if how == "preempted":
        fill_queue(slurm, nodes=4)
        preempt(slurm)
    else:
        # A slow machine has none yet, and would begin again.
        wait_until(lambda: committed_checkpoints(run.paths), "a checkpoint", 60)
        fill_queue(slurm, nodes=1)
        kill_rank(run)
    wait_until(lambda: run.history().attempts[0].state.is_terminal, "the end", 90)
    return time.time()


def jobs_of(slurm: SlurmCluster, run: LocalRun) -> list[str]:
    """Return the names of the run's jobs that have not ended."""
    names = slurm.run("squeue", "-h", "-o", "%j").split()
    return [name for name in names if name.startswith("holdfast-tried-")]


def run_with(root: Path, standby: str) -> LocalRun:
    resources: dict[str, Any] = {**ALL_NODES, "standby": standby}
    supervision = {"poll_s": 1.0, "backoff_s": 0, "restarts_in_place": 0}
    return run_on_all(root, resources=resources, elastic={"choices": [4]}, supervision=supervision)


def cancel_others(slurm: SlurmCluster) -> None:
    slurm.run("scancel", f"--user={ANOTHER_UID}")
    slurm.run("scancel", "--partition=prod")


@pytest.mark.more
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["preempted", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_run_with_a_successor_does_not_wait_for_the_queue(
    slurm: SlurmCluster, tmp_path: Path, how: str
) -> None:
    run = run_with(tmp_path / "root", "successor")
    try:
        with supervised(run):
            lost_at = lose_allocation(slurm, run, how)
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt", 60)[0]
            run.wait_for_step(second, run.history().attempts[0].last_step or 1)
            others = slurm.run("squeue", "-h", "-u", str(ANOTHER_UID), "-o", "%T").split()
    finally:
        cancel_others(slurm)
    history = run.history()
    first, again = history.attempts
    cause = Cause.PREEMPTION if how == "preempted" else Cause.INFRASTRUCTURE
    assert first.cause is cause, first.evidence
    (adopted,) = run.events(EventKind.SUCCESSOR_ADOPTED)
    assert (adopted.data["attempt"], adopted.data["job_id"]) == (2, again.job_id)
    assert again.resumed_from is not None
    assert others == ["PENDING"] * OTHERS
    (job,) = slurm_client.recorded_jobs(job_id=again.job_id or "")
    assert job.started_at is not None
    waited_s = job.started_at - lost_at
    assert waited_s <= STARTS_S_MAX + BETWEEN_S, f"started {waited_s:.0f} s after the loss"
    assert history.state is RunState.CANCELLED
    wait_until(lambda: not jobs_of(slurm, run), "an empty queue", 60)
    withdrawn = [event.data for event in run.events(EventKind.SUCCESSOR_WITHDRAWN)]
    assert [one["successor"] for one in withdrawn] == [2]


@pytest.mark.more
@pytest.mark.timeout(400)
def test_a_successor_does_not_wait_until_slurm_has_noticed_a_lost_node(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    resources = {**ALL_NODES, "nodes": 2, "standby": "successor"}
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"choices": [2]})
    with supervised(run):
        first = wait_until(run.paths.list_attempts, "an attempt")[0]
        run.wait_for_step(first, 5)
        wait_until(lambda: run.events(EventKind.COMMITTED), "a checkpoint to continue from", 60)
        (told,) = wait_until(lambda: run.events(EventKind.SUCCESSOR_SUBMITTED), "it", 60)
        job, claim = str(told.data["job_id"]), run.claim(first)
        assert _dependency(job) == f"afterany:{claim.job_id}(unfulfilled)"
        (nodes,) = slurm.run("squeue", "-h", f"--jobs={claim.job_id}", "-o", "%N").split()
        lost = next(one for one in slurm_client.expand_hosts(nodes) if one != claim.host)
        slurm.kill_node(lost)
        try:
            wait_until(lambda: _dependency(job) == "(null)", "the end of its dependency", 60)
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt")[0]
            run.wait_for_step(second, run.history().attempts[0].last_step or 1)
        finally:
            wait_until(lambda: "down" in slurm.node_states()[lost], "the loss", 60)
            slurm.start_node(lost)
    ended, again = run.history().attempts[:2]
    assert (ended.cause, ended.facts["lost_hosts"]) == (Cause.NODE_FAILURE, [lost]), ended.evidence
    assert again.job_id == job
    assert again.resumed_from is not None
    # Its lead cancelled it before Slurm noticed the loss.
    assert _state(claim.job_id) == "CANCELLED"


def _dependency(job: str) -> str:
    line = slurm_client.show_job(job)
    assert line is not None
    return (line.fields or {})["Dependency"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_without_a_successor_waits_for_the_queue(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = run_with(tmp_path / "root", "none")
    try:
        with supervised(run):
            lose_allocation(slurm, run)
            wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt", 60)
            time.sleep(STARTS_S_MAX)
            assert run.history().attempts[1].state is AttemptState.PENDING
            others = slurm.run("squeue", "-h", "-u", str(ANOTHER_UID), "-o", "%T").split()
            assert others.count("RUNNING") == 1
    finally:
        cancel_others(slurm)
    assert not run.events(EventKind.SUCCESSOR_SUBMITTED)


@pytest.mark.more
def test_the_successor_of_a_completed_run_ends_without_training(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The successor starts when the attempt's job has ended, or is withdrawn before."""
    resources = {**ALL_NODES, "nodes": 2, "standby": "successor"}
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"choices": [2]}, steps=200)
    with supervised(run):
        wait_until(lambda: run.history().state is RunState.COMPLETED, "the end", 120)
        wait_until(lambda: not jobs_of(slurm, run), "an empty queue", 60)
    assert len(run.history().attempts) == 1
    (withdrawn,) = run.events(EventKind.SUCCESSOR_WITHDRAWN)
    assert withdrawn.data["successor"] == 1


@pytest.mark.more
@pytest.mark.timeout(400)
def test_a_successor_that_cannot_be_cancelled_starts_and_does_not_train(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is too slow for scancel, and starts the successor of a run that has ended."""
    deaf = tmp_path / "deaf"
    deaf.mkdir()
    monkeypatch.setenv("PATH", f"{deaf}{os.pathsep}{os.environ['PATH']}")
    resources = {**ALL_NODES, "nodes": 2, "standby": "successor"}
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"choices": [2]}, steps=200)
    with supervised(run):
        submitted = wait_until(lambda: run.events(EventKind.SUCCESSOR_SUBMITTED), "it", 120)
        (deaf / "scancel").write_text(DEAF)
        (deaf / "scancel").chmod(0o755)
        job = str(submitted[0].data["job_id"])
        wait_until(lambda: _state(job) == "COMPLETED", "its end", 180)
        (deaf / "scancel").unlink()
        wait_until(lambda: run.events(EventKind.SUCCESSOR_WITHDRAWN), "its withdrawal", 120)
    (ended,) = run.history().attempts
    assert ended.state is AttemptState.COMPLETED
    assert ended.job_id != job
    claim = run.claim(run.paths.attempt(1))
    assert claim.job_id == ended.job_id
    assert not jobs_of(slurm, run)


def _state(job: str) -> str:
    """Return the state of a job in the accounting; '' without one."""
    rows = slurm_client.recorded_jobs(job_id=job)
    return slurm_client.bare_state(rows[-1].state) if rows else ""
