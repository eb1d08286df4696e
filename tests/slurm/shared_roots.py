"""Runs of a Slurm cluster whose nodes each see the root through a mount of their own."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Final

from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.disk.filesystems import filesystem_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import operator

STEPS: Final = 300
# Less than half a minute, so nothing has waited for a cache that is a minute out of date.
SOON_S: Final = 30.0
SPOT: Final = {"executor": "slurm", "gpus_per_node": 1, "gres": "gpu:4", "partition": "spot"}


class SupervisedRun:
    """A run with its supervisor in a thread of this process."""

    def __init__(
        self,
        root: Path,
        name: str,
        nodes: int,
        *,
        interval: int = 10,
        steps: int = STEPS,
        restarts: int = 1,
    ) -> None:
        self.run = LocalRun(
            root / name,
            grace_s=12.0,
            resources={**SPOT, "nodes": nodes},
            elastic={"min_gpus": 1, "max_gpus": nodes},
            checkpoint={"interval": interval},
            supervision={"poll_s": 0.5, "restarts_in_place": restarts},
            steps=steps,
            sleep_s=0.1,
        )
        self.thread = threading.Thread(target=self._supervise, daemon=True)
        self.thread.start()

    def _supervise(self) -> None:
        log = logging.getLogger("holdfast.test")
        with Index() as index:
            Supervisor(paths=self.run.paths, index=index, log=log, submit=self._submit).run()

    def _submit(self, paths: RunPaths, *, gpus: int, **_: object) -> AttemptPaths:
        return self.run.submit(gpus)

    def attempt(self, number: int) -> AttemptPaths:
        wait_until(lambda: len(self.run.paths.list_attempts()) >= number, f"attempt {number}")
        return self.run.paths.attempt(number)

    def wait_for_end(self) -> None:
        self.thread.join(180)
        assert not self.thread.is_alive()


def check_preemption(slurm: SlurmCluster, root: Path) -> None:
    """A run on two nodes is preempted and continues on one, and nothing waits for a cache."""
    assert filesystem_of(root).may_be_shared
    supervised = SupervisedRun(root, "main", nodes=2)
    run = supervised.run
    try:
        first = supervised.attempt(1)
        began = time.monotonic()
        run.wait_for_step(first, 1)
        started_s = time.monotonic() - began
        run.wait_for_step(first, 60)
        prod = slurm.run(
            *("sbatch", "--parsable", "--partition=prod", "--nodes=2", "--gres=gpu:4"),
            *("--output=/dev/null", "--wrap", "sleep 600"),
        ).strip()
        try:
            supervised.wait_for_end()
        finally:
            slurm.run("scancel", prod)
    finally:
        run.end_all()
    before, after = run.history().attempts
    assert (before.state, before.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert (after.state, after.world_size) == (AttemptState.COMPLETED, 1)
    assert before.facts["committed_step"] == before.last_step
    assert after.first_step == (before.last_step or 0) + 1, "no step is lost or repeated"
    assert after.last_step == STEPS
    # Nothing waited for a cache: nodes met, saves were committed and the stop was agreed at once.
    assert started_s < SOON_S
    assert before.ended_at is not None
    assert before.facts["stop_requested_at"] is not None
    assert before.ended_at - before.facts["stop_requested_at"] < 12.0
    commits = [one for one in committed_checkpoints(run.paths) if one.attempt == 1]
    assert [one.step for one in commits[:-1]] == list(range(10, commits[-1].step, 10))
    # Without hints of the agents, flushers would look for each other's files every ten seconds.
    assert max(one.committed_at - one.staged_at for one in commits) < 6.0
    assert run.events(EventKind.SAVE_FAILED) == []
    assert [event for event in run.events(EventKind.NODE_SILENT) if event.data["silent"]] == []


def check_lost_node(slurm: SlurmCluster, root: Path) -> None:
    """A node of two is lost, the run continues, and an operator stops it."""
    supervised = SupervisedRun(root, "lost", nodes=2, restarts=0)
    run = supervised.run
    try:
        first = supervised.attempt(1)
        run.wait_for_step(first, 15)
        wait_until(lambda: committed_checkpoints(run.paths), "a commit of both nodes", 60)
        lost = next(beat.host for beat in run.beats(first) if beat.node == 1)
        slurm.kill_node(lost)
        try:
            second = supervised.attempt(2)
            run.wait_for_step(second, 5)
            asked_at = time.monotonic()
            operator.request(run.paths, "stop", by="tester")
            supervised.wait_for_end()
            assert time.monotonic() - asked_at < SOON_S
        finally:
            slurm.start_node(lost)
    finally:
        run.end_all()
    before, after = run.history().attempts[0], run.history().attempts[-1]
    assert (before.state, before.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert before.facts["lost_hosts"] == [lost]
    assert (after.state, after.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert after.facts["committed_step"] == after.last_step
    assert after.first_step is not None
    assert after.first_step > 10, "it resumed from a commit of both nodes"
