"""The Prefect worker type `holdfast` with flows that are small Slurm jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo_service import POOL, PrefectService
from slurm_cluster import SlurmCluster
from tests.support.flow_runs import (
    FlowRuns,
    service_environment,
    step_of,
    submissions,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.paths import RunPaths
from holdfast.workers.schedulers.flow_places import JOB_NAME

JOB = {"place": "slurm", "partition": "prod", "time_limit_min": 10, "memory_mb": 512}


@pytest.fixture
def service(slurm: SlurmCluster, tmp_path: Path) -> Iterator[PrefectService]:
    """A server, and a worker of the type `holdfast`."""
    made = PrefectService(tmp_path, {**service_environment(tmp_path), **slurm.env})
    with made.serving():
        made.command("holdfast", "deploy", "--type", "holdfast")
        start = ("prefect", "worker", "start", "--pool", POOL, "--type", "holdfast")
        with made.background("worker", start):
            yield made
    slurm.run("scancel", f"--name={JOB_NAME}")


def flow_jobs(slurm: SlurmCluster) -> list[str]:
    return slurm.run("squeue", "-h", f"--name={JOB_NAME}", "--states=RUNNING", "-o", "%i").split()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_flow_that_is_a_slurm_job_is_submitted_again(
    slurm: SlurmCluster, service: PrefectService, tmp_path: Path
) -> None:
    runs = FlowRuns(service, tmp_path)
    spec = runs.write_spec(
        "kept",
        {"steps": 20000, "sleep_s": 0.1},
        resources={"executor": "slurm", "nodes": 1, "gpus_per_node": 1, "partition": "spot"},
    )
    deployment = runs.ask("deployments/name/train/holdfast")["id"]
    made = runs.ask(
        f"deployments/{deployment}/create_flow_run",
        parameters={"spec": str(spec)},
        job_variables=JOB,
    )
    paths = RunPaths(runs.root / "kept")
    runs.made.append(paths)
    try:
        wait_for("step 5", lambda: step_of(paths) >= 5)
        (job,) = flow_jobs(slurm)
        assert runs.ask(f"flow_runs/{made['id']}")["infrastructure_pid"] == f"slurm:{job}"
        slurm.run("scancel", "--signal=KILL", "--full", job)
        wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2)
        (again,) = flow_jobs(slurm)
        assert again != job
        assert {one["flow_run"] for one in supervisions(paths)} == {made["id"]}
        service.command("prefect", "flow-run", "cancel", made["id"])
        wait_for_end(paths, "cancelled")
        wait_for("Prefect's state", lambda: runs.flow_state(made["id"]) == "CANCELLED")
        wait_for("no flow's job", lambda: not flow_jobs(slurm))
        assert submissions(paths) == 1
    finally:
        runs.end_all()
