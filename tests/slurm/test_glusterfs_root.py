"""Runs whose root is on a real GlusterFS, with a FUSE client of its own for each slurmd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from served_mounts import served
from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from tests.slurm.shared_roots import check_lost_node, check_preemption

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Gluster = tuple[SlurmCluster, Path]


@pytest.fixture(scope="module")
def gluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gluster]:
    """A cluster of three nodes, and the root as this process sees it."""
    base = tmp_path_factory.mktemp("served")
    root = base / "root"
    root.mkdir()
    with served("glusterfs", base / "served") as shared:
        cluster = SlurmCluster(
            tmp_path_factory.mktemp("slurm"),
            ClusterSpec(nodes=3, grace_time_s=15, kill_wait_s=10),
            node_prefix=lambda node: shared.in_own_mount(root, node),
        )
        with cluster, shared.mounted(root, "login"), pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.env.items():
                patch.setenv(name, value)
            yield cluster, root


def test_preempted_run_on_two_nodes_continues_on_one(gluster: Gluster) -> None:
    check_preemption(*gluster)


def test_operator_and_a_lost_node_are_noticed(gluster: Gluster) -> None:
    check_lost_node(*gluster)
