"""The main scenarios on a real Slurm: preemption, time limit, cancel, killed flow, lost node.

Every run uses the whole chain: `prefect deployment run`, a process worker, sbatch, an agent on
every node, torchrun. A rank takes a whole node of four GPUs, so that a higher-priority job takes
whole nodes away.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from examples.demo_service import PrefectService
from slurm_cluster import SlurmCluster
from tests.support.flow_runs import (
    FlowRuns,
    step_of,
    submissions,
    supervisions,
    wait_for,
    wait_for_end,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Outcome, read_document
from holdfast.contracts.records.history import load_events

GRACE_S = 10.0
# The sum of the cluster's grace time and kill wait.
PATIENCE_S = 20.0


@pytest.fixture
def runs(slurm_service: PrefectService, tmp_path: Path) -> Iterator[FlowRuns]:
    made = FlowRuns(slurm_service, tmp_path)
    yield made
    made.end_all()


def spec_of(
    runs: FlowRuns, name: str, *, nodes: int, settings: dict[str, Any], **more: Any
) -> Path:
    """A run with one rank on each of `nodes` whole nodes, in the preemptible partition."""
    resources = {"executor": "slurm", "nodes": nodes, "gpus_per_node": 1, "gres": "gpu:4"}
    resources |= {"partition": "spot", **more.pop("resources", {})}
    supervision = {"grace_s": GRACE_S, **more.pop("supervision", {})}
    return runs.write_spec(name, settings, resources=resources, supervision=supervision, **more)


def jobs_named_for(slurm: SlurmCluster, paths: RunPaths) -> list[str]:
    """Ids of all jobs that Slurm ever had for the run, found by job name."""
    lines = slurm.run(
        *("sacct", "-X", "-n", "-P", "--starttime", "now-1days", "--format", "JobID,JobName")
    )
    fields = [line.split("|") for line in lines.splitlines() if line]
    return [job for job, name in fields if name.startswith(f"holdfast-{paths.name}-")]


def test_preempted_run_continues_on_the_remaining_nodes(
    slurm: SlurmCluster, runs: FlowRuns
) -> None:
    spec = spec_of(
        runs,
        "spot-run",
        nodes=2,
        settings={"steps": 300, "sleep_s": 0.2},
        elastic={"min_gpus": 1, "max_gpus": 2},
    )
    paths = runs.type_run(spec)
    wait_for("step 15", lambda: step_of(paths) >= 15)
    prod = slurm.run(
        *("sbatch", "--parsable", "--partition=prod", "--nodes=3", "--gres=gpu:4"),
        *("--output=/dev/null", "--wrap", "sleep 600"),
    ).strip()
    try:
        wait_for("training on the nodes left", lambda: step_of(paths, 2) >= 16)
        runs.hurry()
        wait_for_end(paths)
    finally:
        slurm.run("scancel", prod)
    first, second = runs.holdfast("show", "spot-run")["attempts"]
    assert (first["state"], first["cause"]) == ("preempted", "preemption")
    assert any("PreemptTime" in line for line in first["evidence"])
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert first["signal_to_commit_s"] < GRACE_S
    assert first["committed_step"] == first["last_step"]
    assert second["first_step"] == first["last_step"] + 1, "nothing is trained twice"
    assert second["last_step"] == 300
    assert first["command_digest"] == second["command_digest"]
    assert len(jobs_named_for(slurm, paths)) == 2


@pytest.mark.slow
def test_attempt_saves_before_its_time_limit_and_is_relaunched(
    slurm: SlurmCluster, runs: FlowRuns
) -> None:
    spec = spec_of(
        runs,
        "short-job",
        nodes=2,
        settings={"steps": 400, "sleep_s": 0.2},
        resources={"time_limit_min": 1},
    )
    paths = runs.deploy_run(spec)
    wait_for("the second attempt's steps", lambda: step_of(paths, 2) > 0)
    runs.hurry()
    wait_for_end(paths)
    shown = runs.holdfast("show", "short-job")
    assert shown["goodput"]["steps_lost"] == 0
    # On a busy machine an attempt may do only a few steps; then there are more attempts.
    attempts = shown["attempts"]
    first, second = attempts[0], attempts[1]
    assert (first["state"], first["cause"]) == ("timed_out", "time_limit")
    signals = [e.data for e in load_events(paths) if e.kind is EventKind.SIGNAL]
    asked, *more = [data for data in signals if data["attempt"] == 1]
    assert (asked["source"], asked["cause"]) == ("time_limit", "time_limit")
    assert "the last flush must start" in asked["detail"]
    assert more == [], "the time limit must be reported once"
    outcome = read_document(Outcome, paths.attempt(1).outcome)
    assert outcome is not None
    assert outcome.stop_committed_at is not None
    assert outcome.stop_committed_at < asked["deadline"]
    assert first["committed_step"] == first["last_step"]
    assert second["first_step"] == first["last_step"] + 1, "nothing is trained twice"
    assert attempts[-1]["last_step"] == 400
    assert {a["world_size"] for a in attempts} <= {2, None}


@pytest.mark.more
def test_scancel_saves_and_cancels_the_run_and_relaunch_continues_it(
    slurm: SlurmCluster, runs: FlowRuns
) -> None:
    spec = spec_of(runs, "scancelled", nodes=1, settings={"steps": 300, "sleep_s": 0.2})
    paths = runs.deploy_run(spec)
    wait_for("step 15", lambda: step_of(paths) >= 15)
    (job,) = jobs_named_for(slurm, paths)
    slurm.run("scancel", job)
    wait_for_end(paths, "cancelled")
    (taken,) = supervisions(paths)
    wait_for("Prefect's word", lambda: runs.flow_state(taken["flow_run"]) == "CANCELLED")
    (first,) = runs.holdfast("show", "scancelled")["attempts"]
    assert (first["state"], first["cause"]) == ("cancelled", "operator")
    assert first["committed_step"] == first["last_step"]
    assert first["signal_to_commit_s"] < GRACE_S
    assert submissions(paths) == 1, "a cancelled run is not relaunched by itself"
    runs.hurry()
    runs.holdfast("relaunch", "scancelled")
    wait_for_end(paths)
    first, second = runs.holdfast("show", "scancelled")["attempts"]
    assert second["first_step"] == first["last_step"] + 1
    assert second["last_step"] == 300


@pytest.mark.more
def test_killed_flow_is_replaced_without_a_second_slurm_job(
    slurm: SlurmCluster, runs: FlowRuns
) -> None:
    spec = spec_of(runs, "re-attached", nodes=2, settings={"steps": 1200, "sleep_s": 0.2})
    paths = runs.deploy_run(spec)
    wait_for("step 5", lambda: step_of(paths) >= 5)
    (taken,) = supervisions(paths)
    os.kill(taken["pid"], signal.SIGKILL)
    before = step_of(paths)
    wait_for("more steps with no flow", lambda: step_of(paths) >= before + 5)
    runs.deploy_run(spec)
    wait_for("a second supervisor", lambda: len(supervisions(paths)) == 2)
    runs.hurry()
    wait_for_end(paths)
    (attempt,) = runs.holdfast("show", "re-attached")["attempts"]
    assert attempt["last_step"] == 1200
    assert len(jobs_named_for(slurm, paths)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flush_s", [PATIENCE_S + 4.0, 60.0])
def test_cancelled_flow_does_not_interrupt_a_slow_flush(
    slurm: SlurmCluster, runs: FlowRuns, flush_s: float
) -> None:
    name = f"slow-flush-{flush_s:.0f}"
    spec = spec_of(runs, name, nodes=1, settings={"steps": 900, "sleep_s": 0.2})
    paths = runs.deploy_run(spec)
    wait_for("step 15", lambda: step_of(paths) >= 15)
    (taken,) = supervisions(paths)
    flusher = flusher_of(paths)
    # Simulates storage that hangs: the flusher makes no progress for longer than Slurm would let
    # a job run that it ends.
    os.kill(flusher, signal.SIGSTOP)
    try:
        runs.service.command("prefect", "flow-run", "cancel", taken["flow_run"])
        wait_for("Prefect's word", lambda: runs.flow_state(taken["flow_run"]) == "CANCELLED")
        asked = next(e for e in load_events(paths) if e.kind is EventKind.OPERATOR_REQUEST)
        assert asked.data["action"] == "cancel"
        assert asked.data["by"].startswith("prefect flow run ")
        wait_for("the flow's end", lambda: not psutil.pid_exists(taken["pid"]))
        wait_for("a long flush", lambda: time.time() - asked.time >= flush_s)
        assert not paths.attempt(1).outcome.exists(), "the job should still be flushing"
        assert runs.holdfast("show", name)["state"] == "running"
    finally:
        os.kill(flusher, signal.SIGCONT)
    wait_for("the job's own end", paths.attempt(1).outcome.exists)
    shown = runs.holdfast("show", name)
    (attempt,) = shown["attempts"]
    assert shown["state"] == "cancelled"
    assert (attempt["state"], attempt["cause"]) == ("cancelled", "operator")
    assert attempt["committed_step"] == attempt["last_step"]


@pytest.mark.slow
def test_lost_node_loses_no_committed_step_and_reindex_gives_equal_results(
    slurm: SlurmCluster, runs: FlowRuns
) -> None:
    spec = spec_of(
        runs,
        "lost-node",
        nodes=2,
        settings={"steps": 400, "sleep_s": 0.2},
        supervision={"restarts_in_place": 0},
        elastic={"min_gpus": 1, "max_gpus": 2},
    )
    paths = runs.deploy_run(spec)
    wait_for("a checkpoint", lambda: step_of(paths) >= 25)
    lost = sorted(runs.holdfast("show", "lost-node")["attempts"][0]["nodes"])[-1]
    slurm.kill_node(lost)
    try:
        wait_for("steps on the node left", lambda: step_of(paths, 2) >= 1)
        runs.hurry()
        wait_for_end(paths)
    finally:
        wait_for("Slurm's word", lambda: slurm.node_states()[lost].startswith("down"))
        slurm.start_node(lost)
    shown = runs.holdfast("show", "lost-node")
    first, last = shown["attempts"][0], shown["attempts"][-1]
    assert (first["state"], first["cause"]) == ("node_failed", "node_failure")
    assert last["last_step"] == 400
    resumed = read_manifest(paths.checkpoint(last["resumed_from"].split(":")[1]))
    assert resumed is not None
    assert resumed.step >= 10
    answers = [runs.holdfast(view, "lost-node") for view in ("show", "lineage", "checkpoints")]
    home = Path(runs.service.environment["HOLDFAST_HOME"])
    for path in home.glob("holdfast.db*"):
        path.unlink()
    runs.service.command("holdfast", "reindex", str(runs.root))
    again = [runs.holdfast(view, "lost-node") for view in ("show", "lineage", "checkpoints")]
    assert again == answers


def flusher_of(paths: RunPaths) -> int:
    """The process that writes the checkpoints of the run's only node."""
    (found,) = [
        process.pid
        for process in psutil.process_iter()
        if "holdfast.trainer.flusher" in _words(process) and str(paths.directory) in _words(process)
    ]
    return int(found)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return ""
