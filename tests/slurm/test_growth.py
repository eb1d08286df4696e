"""A run that started small grows when another job releases GPUs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.disk.journal import GROWER, EventKind
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import operator
from holdfast.workers.schedulers import slurm_client

ONE_NODE = {"executor": "slurm", "gpus_per_node": 4, "partition": "spot"}


@pytest.mark.slow
def test_run_grows_from_two_gpus_to_four_when_another_job_ends(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this, the nodes are looked at once a minute.
    monkeypatch.setattr(slurm_client, "CAPACITY_AGE_S", 2.0)
    # Other jobs use all nodes except for half of one; the run starts on that half.
    whole = _occupy(slurm, "-N3", "--gpus-per-node=4")
    half = _occupy(slurm, "-N1", "--gpus-per-node=2")
    run = LocalRun(
        tmp_path / "root",
        resources=ONE_NODE,
        elastic={"choices": [2, 4], "grow": True, "grow_after_s": 3},
        steps=100_000,
        sleep_s=0.05,
    )

    def submit(paths: RunPaths, *, gpus: int, **_: object) -> AttemptPaths:
        return run.submit(gpus)

    first = run.submit(2)
    log = logging.getLogger("holdfast.test")
    try:
        with Index() as index:
            supervisor = Supervisor(paths=run.paths, index=index, log=log, submit=submit)
            thread = threading.Thread(target=supervisor.run, daemon=True)
            thread.start()
            run.wait_for_step(first, 3)
            assert len(run.paths.list_attempts()) == 1
            slurm.run("scancel", half)
            second = wait_until(lambda: run.paths.list_attempts()[1:], "another attempt")[0]
            run.wait_for_step(second, 1)
            operator.request(run.paths, "stop", by="tester")
            thread.join(90)
            assert not thread.is_alive()
    finally:
        slurm.run("scancel", whole, half)
        run.end_all()
    before, after = run.history().attempts
    assert (before.world_size, after.world_size) == (2, 4)
    assert (before.state, before.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert before.facts["committed_step"] == before.last_step
    assert after.first_step == (before.last_step or 0) + 1
    asked = [event.data["by"] for event in run.events(EventKind.OPERATOR_REQUEST)]
    assert asked == [GROWER, "tester"]


def _occupy(slurm: SlurmCluster, *size: str) -> str:
    """Start another job of that size and wait until it runs; returns its id."""
    job = slurm.run(
        "sbatch", "--parsable", "-p", "prod", *size, "--no-requeue", "--output=/dev/null",
        "--wrap", "sleep 600",
    ).strip()  # fmt: skip
    wait_until(lambda: slurm.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", job)
    return job
