"""A real Slurm cluster for the tests of this folder: one per test session."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "slurm"))

from examples.demo_service import PrefectService
from slurm_cluster import SlurmCluster, check_prerequisites
from slurm_config import ClusterSpec
from tests.process.local_runs import LocalRun, processes_of, wait_until
from tests.support.flow_runs import service_environment

Make = Callable[..., LocalRun]
TWO_NODES = {"executor": "slurm", "nodes": 2, "gpus_per_node": 2, "partition": "spot"}
# Beside another Slurm, the first would start these tests again, and the soak tests no version.
# The others are about file systems, and need the FUSE library of this machine.
NOT_BESIDE_OTHERS = [
    "test_newer_version.py",
    "test_caching_root.py",
    "test_glusterfs_root.py",
    "test_operations_soak.py",
]
collect_ignore = NOT_BESIDE_OTHERS if "OTHER_SLURM_VERSION" in os.environ else []


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of the test's own, where the answers of Slurm that processes share are kept."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running cluster: n1 to n4 with four GPUs each, partitions `spot` and `prod`.

    SLURM_CONF points at it, so sbatch, squeue and sacct just work. Grace time and kill wait
    are 10 s. All tests share it, so leave no jobs behind and every node up. If Slurm's packages
    are missing, the tests fail with a message that says what to install; they are never skipped.
    """
    check_prerequisites()
    cluster = SlurmCluster(
        tmp_path_factory.mktemp("slurm"), ClusterSpec(grace_time_s=10, kill_wait_s=10)
    )
    with cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="module")
def slurm_service(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectService]:
    """A real Prefect server, deployment and process worker whose flows submit to the cluster."""
    folder: Path = tmp_path_factory.mktemp("prefect")
    service = PrefectService(folder, {**service_environment(folder), **slurm.env})
    with service.serving():
        service.command("holdfast", "deploy")
        with service.working():
            yield service


@pytest.fixture
def make(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Make]:
    """Creates runs whose attempts are Slurm jobs, and ends their processes afterwards."""
    made: list[LocalRun] = []

    def make_run(resources: dict[str, Any] | None = None, **settings: Any) -> LocalRun:
        given = {**TWO_NODES, **(resources or {})}
        one = LocalRun(tmp_path / f"root{len(made)}", resources=given, grace_s=8.0, **settings)
        made.append(one)
        return one

    yield make_run
    for run in made:
        run.end_all()
    wait_until(lambda: not any(processes_of(r.paths) for r in made), "the end of all", 60)
