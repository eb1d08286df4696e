"""Runs whose nodes each see the root through caches of their own, which are a minute out of date.

Every slurmd has a mount of the root in a separate mount namespace, and the supervisor has another
one. The kernel believes names, absences and attributes for a minute, as the clients of network file
systems may. So a file that one node writes is not there for the others unless they ask the server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from caching_mount import in_own_mount, mounted, read_counts, set_fault
from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from tests.slurm.shared_roots import SupervisedRun, check_lost_node, check_preemption

from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.runs import operator

CACHE_S = 60.0
STALL_S = 45.0
STEADY_S = 40.0


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


@pytest.mark.slow
def test_preempted_run_on_two_nodes_continues_on_one(cached: CachedCluster) -> None:
    check_preemption(cached.slurm, cached.root)


@pytest.mark.more
def test_operator_and_a_lost_node_are_noticed_through_the_caches(cached: CachedCluster) -> None:
    check_lost_node(cached.slurm, cached.root)


@pytest.mark.slow
def test_a_stall_of_the_root_ends_no_training(cached: CachedCluster) -> None:
    supervised = SupervisedRun(cached.root, "stalled", nodes=2, interval=10_000, steps=100_000)
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


@pytest.mark.slow
def test_steady_training_hardly_uses_the_metadata_of_the_root(cached: CachedCluster) -> None:
    supervised = SupervisedRun(cached.root, "steady", nodes=2, interval=10_000, steps=100_000)
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
