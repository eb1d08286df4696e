"""Lost sbatch responses: one job trains, however many the controller accepted."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.records.documents import read_claim
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import AttemptState, RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import operator
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm import SlurmExecutor

ONE_NODE = {"executor": "slurm", "nodes": 1, "gpus_per_node": 2, "partition": "spot"}
QUICK = {"poll_s": 0.5}
# The first call times out, but its job is queued some seconds later.
LATE_SBATCH = """#!/bin/bash
if mkdir {folder}/first 2>/dev/null; then
    cp "${{@: -1}}" {folder}/script.sh
    (sleep {late_s}; {sbatch} {folder}/script.sh >{folder}/late 2>&1) >/dev/null 2>&1 &
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
    exit 1
fi
exec {sbatch} "$@"
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Path]:
    """Installs a wrapper of sbatch that loses the first response."""

    def install(late_s: float) -> Path:
        folder = tmp_path / "late"
        folder.mkdir()
        real = shutil.which("sbatch")
        script = folder / "sbatch"
        script.write_text(LATE_SBATCH.format(folder=folder, late_s=late_s, sbatch=real))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return install


def supervise(run: LocalRun, home: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)

    def carry() -> None:
        with Index() as index:
            log = logging.getLogger("holdfast.test")
            Supervisor(paths=run.paths, index=index, log=log, submit=submit_next).run()

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    return thread


@pytest.mark.more
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("late_s", "absence_s", "jobs"),
    [(4.0, 60.0, 1), pytest.param(12.0, 4.0, 2, marks=pytest.mark.slow)],
)
def test_lost_sbatch_responses_leave_exactly_one_training_job(
    slurm: SlurmCluster,
    loaded: Callable[[float], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    late_s: float,
    absence_s: float,
    jobs: int,
) -> None:
    folder = loaded(late_s)
    monkeypatch.setattr(SlurmExecutor, "absence_s", absence_s)
    run = LocalRun(
        tmp_path / "root", resources=ONE_NODE, supervision=QUICK, steps=100_000, sleep_s=0.05
    )
    thread = supervise(run, tmp_path / "home", monkeypatch)
    try:
        attempt = wait_until(lambda: next(iter(run.paths.list_attempts()), None), "the attempt")
        claim = wait_until(lambda: read_claim(attempt), "the claim")
        wait_until(lambda: (folder / "late").exists(), "the late job")
        name = load_history(run.paths).attempts[0].request
        assert name is not None

        def live() -> list[str]:
            found = slurm_client.queued_jobs(name.job_name)
            return [j.job_id for j in found if j.state in {"PENDING", "RUNNING"}]

        wait_until(lambda: len(slurm_client.queued_jobs(name.job_name)) == jobs, "all its jobs")
        wait_until(lambda: live() == [claim.job_id], "one job alone")
        run.wait_for_step(attempt, 3)
        history = load_history(run.paths)
        assert [a.job_id for a in history.attempts] == [claim.job_id]
        assert history.attempts[0].state is AttemptState.RUNNING
        operator.request(run.paths, "cancel", by="tester")
        thread.join(120)
    finally:
        run.end_all()
        subprocess.run(["scancel", "--name", job_name(run)], check=False, timeout=30)
    assert not thread.is_alive()
    assert load_history(run.paths).state is RunState.CANCELLED
    assert len(load_history(run.paths).attempts) == 1


def job_name(run: LocalRun) -> str:
    request = load_history(run.paths).attempts[0].request
    assert request is not None
    return request.job_name
