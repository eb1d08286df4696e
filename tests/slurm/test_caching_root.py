"""Runs whose nodes each see the root through caches of their own, which are a minute out of date.

Every slurmd has a mount of the root in a mount namespace of its own, and the supervisor has another
one. The kernel believes names, absences and attributes for a minute, as the clients of network file
systems may. So a file that one node writes is not there for the others unless they ask the server.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from caching_mount import in_own_mount, mounted, read_counts, set_fault
from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.filesystems import filesystem_of
from holdfast.contracts.journal import EventKind
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers import operator
from holdfast.workers.checkpoints import committed_checkpoints

CACHE_S = 60.0
STEPS = 300
STALL_S = 45.0
STEADY_S = 40.0
SPOT = {"executor": "slurm", "gpus_per_node": 1, "gres": "gpu:4", "partition": "spot"}


class CachedCluster:
    """A cluster of three nodes, and the root as this process sees it."""

    def __init__(self, slurm: SlurmCluster, root: Path, control: Path, base: Path) -> None:
        self.slurm, self.root, self.control, self._base = slurm, root, control, base

    def counts(self, nodes: Iterable[str]) -> tuple[int, int]:
        """Operations on metadata and on data that these nodes' mounts have received."""
        found = [read_counts(self._base / f"counts-{node}") for node in nodes]
        return sum(one[0] for one in found), sum(one[1] for one in found)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedCluster]:
    base = tmp_path_factory.mktemp("cached")
    source, root, control = base / "server", base / "root", base / "fault"
    source.mkdir()
    root.mkdir()
    set_fault(control)
    cluster = SlurmCluster(
        tmp_path_factory.mktemp("slurm"),
        ClusterSpec(nodes=3, grace_time_s=15, kill_wait_s=10),
        node_prefix=lambda node: in_own_mount(
            source, control, root, CACHE_S, base / f"counts-{node}"
        ),
    )
    with cluster, mounted(source, control, root, CACHE_S), pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield CachedCluster(cluster, root, control, base)


class SupervisedRun:
    """A run with its supervisor in a thread of this process."""

    def __init__(
        self,
        cached: CachedCluster,
        name: str,
        nodes: int,
        *,
        interval: int = 10,
        steps: int = STEPS,
    ) -> None:
        self.run = LocalRun(
            cached.root / name,
            grace_s=12.0,
            resources={**SPOT, "nodes": nodes},
            elastic={"min_gpus": 1, "max_gpus": nodes},
            checkpoint={"interval": interval},
            supervision={"poll_s": 0.5, "restarts_in_place": 1},
            steps=steps,
            sleep_s=0.1,
        )
        self.thread = threading.Thread(target=self._supervise, daemon=True)
        self.thread.start()

    def _supervise(self) -> None:
        log = logging.getLogger("holdfast.test")
        with Index() as index:
            Supervisor(paths=self.run.paths, index=index, log=log, submit=self._submit).run()

    def _submit(
        self, paths: RunPaths, *, gpus: int, reason: str, exclude: Sequence[str]
    ) -> AttemptPaths:
        return self.run.submit(gpus)

    def attempt(self, number: int) -> AttemptPaths:
        wait_until(lambda: len(self.run.paths.list_attempts()) >= number, f"attempt {number}")
        return self.run.paths.attempt(number)

    def wait_for_end(self) -> None:
        self.thread.join(180)
        assert not self.thread.is_alive()


def test_preempted_run_on_two_nodes_continues_on_one(cached: CachedCluster) -> None:
    assert filesystem_of(cached.root).may_be_shared
    supervised = SupervisedRun(cached, "main", nodes=2)
    run = supervised.run
    try:
        first = supervised.attempt(1)
        began = time.monotonic()
        run.wait_for_step(first, 1)
        started_s = time.monotonic() - began
        run.wait_for_step(first, 60)
        prod = cached.slurm.run(
            *("sbatch", "--parsable", "--partition=prod", "--nodes=2", "--gres=gpu:4"),
            *("--output=/dev/null", "--wrap", "sleep 600"),
        ).strip()
        try:
            supervised.wait_for_end()
        finally:
            cached.slurm.run("scancel", prod)
    finally:
        run.end_all()
    before, after = run.history().attempts
    assert (before.state, before.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert (after.state, after.world_size) == (AttemptState.COMPLETED, 1)
    assert before.facts["committed_step"] == before.last_step
    assert after.first_step == (before.last_step or 0) + 1, "no step is lost or repeated"
    assert after.last_step == STEPS
    # Nothing waited for a cache: nodes met, saves were committed and the stop was agreed at once.
    assert started_s < CACHE_S / 2
    assert before.ended_at is not None
    assert before.facts["stop_requested_at"] is not None
    assert before.ended_at - before.facts["stop_requested_at"] < 12.0
    commits = [one for one in committed_checkpoints(run.paths) if one.attempt == 1]
    assert [one.step for one in commits[:-1]] == list(range(10, commits[-1].step, 10))
    # Without hints of the agents, flushers would look for each other's files every ten seconds.
    assert max(one.committed_at - one.staged_at for one in commits) < 6.0
    assert run.events(EventKind.SAVE_FAILED) == []
    assert [event for event in run.events(EventKind.NODE_SILENT) if event.data["silent"]] == []


def test_operator_and_a_lost_node_are_noticed_through_the_caches(cached: CachedCluster) -> None:
    supervised = SupervisedRun(cached, "lost", nodes=2)
    run = supervised.run
    try:
        first = supervised.attempt(1)
        run.wait_for_step(first, 15)
        lost = next(beat.host for beat in run.beats(first) if beat.node == 1)
        cached.slurm.kill_node(lost)
        try:
            second = supervised.attempt(2)
            run.wait_for_step(second, 5)
            asked_at = time.monotonic()
            operator.request(run.paths, "stop", by="tester")
            supervised.wait_for_end()
            assert time.monotonic() - asked_at < CACHE_S / 2
        finally:
            cached.slurm.start_node(lost)
    finally:
        run.end_all()
    before, after = run.history().attempts[0], run.history().attempts[-1]
    assert (before.state, before.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert before.facts["lost_hosts"] == [lost]
    assert (after.state, after.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert after.facts["committed_step"] == after.last_step
    assert after.first_step is not None
    assert after.first_step > 10, "it resumed from a commit of both nodes"


def test_a_stall_of_the_root_ends_no_training(cached: CachedCluster) -> None:
    supervised = SupervisedRun(cached, "stalled", nodes=2, interval=10_000, steps=100_000)
    run = supervised.run
    try:
        first = supervised.attempt(1)
        before = run.wait_for_step(first, 20)
        set_fault(cached.control, latency="stall")
        # Longer than a node may leave a question of node 0 unanswered.
        time.sleep(STALL_S)
        set_fault(cached.control)
        operator.request(run.paths, "stop", by="tester")
        supervised.wait_for_end()
    finally:
        set_fault(cached.control)
        run.end_all()
    (only,) = run.history().attempts
    assert (only.state, only.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert [one.ending for one in run.outcome(first).launches] == ["stopped"]
    assert only.facts["committed_step"] == only.last_step
    assert (only.last_step or 0) - before > STALL_S * 5, "the ranks trained while the root hung"


def test_steady_training_hardly_uses_the_metadata_of_the_root(cached: CachedCluster) -> None:
    supervised = SupervisedRun(cached, "steady", nodes=2, interval=10_000, steps=100_000)
    run = supervised.run
    try:
        first = supervised.attempt(1)
        run.wait_for_step(first, 20)
        hosts = [beat.host for beat in run.beats(first)]
        # The start is over once the warm standby, if any, and the first look for requests are.
        time.sleep(10)
        before = cached.counts(hosts)
        time.sleep(STEADY_S)
        after = cached.counts(hosts)
        operator.request(run.paths, "stop", by="tester")
        supervised.wait_for_end()
    finally:
        run.end_all()
    metadata, data = (now - then for now, then in zip(after, before, strict=True))
    print(f"{metadata} operations on metadata and {data} on data in {STEADY_S:.0f} s on 2 nodes")
    assert metadata <= len(hosts) * STEADY_S / 10
    assert data > 0, "heartbeats and metrics were written"
