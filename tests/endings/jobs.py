"""Captures endings of whole jobs: real agents on this machine or on a test Slurm cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.endings.endings import JobEnding
from tests.endings.records import CHECKOUT
from tests.process.local_runs import LocalRun

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.workers.runs import operator
from holdfast.workers.runs.endings import job_log_tail, observe

GRACE_S: Final = 8.0
CLUSTER: Final = CHECKOUT / "infra" / "slurm"
Start = Callable[..., tuple[LocalRun, AttemptPaths]]
WAYS: dict[str, Callable[[Start, Any], LocalRun]] = {}


def way(act: Callable[[Start, Any], LocalRun]) -> Callable[[Start, Any], LocalRun]:
    """Register a function that produces an ending. It gets the cluster, or None for local jobs."""
    WAYS[act.__name__] = act
    return act


def capture_jobs(endings: list[JobEnding]) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """(name, inputs of `classify`, private parts of them) of each ending; one cluster for all."""
    here = [ending for ending in endings if not ending.on_slurm]
    there = [ending for ending in endings if ending.on_slurm]
    with tempfile.TemporaryDirectory(prefix="endings-") as scratch:
        for ending in here:
            yield _capture(ending, Path(scratch), {"gpus_per_node": 2}, None)
        if not there:
            return
        resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 2, "partition": "spot"}
        with _cluster(Path(scratch)) as cluster:
            for ending in there:
                yield _capture(ending, Path(scratch), resources, cluster)


@contextlib.contextmanager
def _cluster(scratch: Path) -> Iterator[Any]:
    sys.path.append(str(CLUSTER))
    from slurm_cluster import SlurmCluster
    from slurm_config import ClusterSpec

    spec = ClusterSpec(grace_time_s=10, kill_wait_s=10)
    with SlurmCluster(scratch / "slurm", spec) as cluster:
        os.environ.update(cluster.env)
        yield cluster


def _capture(
    ending: JobEnding, scratch: Path, resources: dict[str, Any], cluster: Any
) -> tuple[str, dict[str, Any], dict[str, str]]:
    made: list[LocalRun] = []

    def start(*, step: int = 3, **more: Any) -> tuple[LocalRun, AttemptPaths]:
        given = {**resources, **more.pop("resources", {})}
        settings = {"steps": 100_000, "sleep_s": 0.05, **more}
        run = LocalRun(scratch / ending.name, resources=given, grace_s=GRACE_S, **settings)
        made.append(run)
        attempt = run.submit()
        if step:
            run.wait_for_step(attempt, step)
        return run, attempt

    try:
        run = WAYS[ending.name](start, cluster)
        run.wait_for_end()
        return ending.name, _inputs(run), {str(scratch): "/scratch"}
    finally:
        for run in made:
            run.end_all()


def _inputs(run: LocalRun) -> dict[str, Any]:
    """The inputs of `classify` for the run's only attempt."""
    attempt = run.paths.attempt(1)
    seen = observe(attempt)
    losses = [str(event.data["host"]) for event in run.events(EventKind.NODE_LOST)]
    return {
        "outcome": seen.outcome.model_dump(mode="json") if seen.outcome else None,
        "status": asdict(seen.status) if seen.status else None,
        "signals": [event.data for event in run.events(EventKind.SIGNAL)],
        "stop": seen.stop.model_dump(mode="json") if seen.stop else None,
        "claimed": seen.claim is not None,
        "lost_hosts": list(dict.fromkeys(losses)),
        "job_log": "" if seen.claim else job_log_tail(attempt),
    }


# --- here ---------------------------------------------------------------------------------------


@way
def agent_killed(start: Start, cluster: Any) -> LocalRun:
    run, attempt = start()
    os.kill(run.claim(attempt).pid, signal.SIGKILL)
    return run


@way
def terminated_by_sender(start: Start, cluster: Any) -> LocalRun:
    run, attempt = start()
    os.kill(run.claim(attempt).pid, signal.SIGTERM)
    return run


@way
def paused(start: Start, cluster: Any) -> LocalRun:
    run, _ = start()
    operator.request(run.paths, "pause", by="ann")
    return run


@way
def completed(start: Start, cluster: Any) -> LocalRun:
    run, _ = start(step=0, steps=5)
    return run


# --- on Slurm -----------------------------------------------------------------------------------


@way
def slurm_cancelled(start: Start, cluster: Any) -> LocalRun:
    run, _ = start()
    cluster.run("scancel", _job_id(run))
    return run


@way
def slurm_cancelled_while_queued(start: Start, cluster: Any) -> LocalRun:
    run, _ = start(step=0, resources={"extra": {"begin": "now+1hour"}})
    cluster.run("scancel", _job_id(run))
    return run


@way
def slurm_preempted(start: Start, cluster: Any) -> LocalRun:
    run, _ = start()
    _preempt(cluster, run)
    return run


@way
def slurm_preempted_without_session(start: Start, cluster: Any) -> LocalRun:
    run, attempt = start(step=0, session=False, sleep_s=300)
    run.claim(attempt)
    time.sleep(3)
    _preempt(cluster, run)
    return run


@way
def slurm_time_limit(start: Start, cluster: Any) -> LocalRun:
    run, _ = start(resources={"time_limit_min": 1})
    return run


@way
def slurm_agent_killed(start: Start, cluster: Any) -> LocalRun:
    run, attempt = start()
    os.kill(run.claim(attempt).pid, signal.SIGKILL)
    return run


@way
def slurm_node_lost(start: Start, cluster: Any) -> LocalRun:
    return _lose(start, cluster, 1)


@way
def slurm_leading_node_lost(start: Start, cluster: Any) -> LocalRun:
    return _lose(start, cluster, 0)


@way
def slurm_only_node_lost(start: Start, cluster: Any) -> LocalRun:
    return _lose(start, cluster, 0, resources={"nodes": 1})


@way
def slurm_python_missing(start: Start, cluster: Any) -> LocalRun:
    return start(step=0, launch={"python": "/opt/no-such-environment/bin/python"})[0]


@way
def slurm_module_missing(start: Start, cluster: Any) -> LocalRun:
    bare = Path(sys.base_prefix, "bin", "python3")
    return start(step=0, launch={"python": str(bare)})[0]


@way
def slurm_option_refused(start: Start, cluster: Any) -> LocalRun:
    return start(step=0, launch={"srun": ["--no-such-option=3"]})[0]


def _lose(start: Start, cluster: Any, node: int, **more: Any) -> LocalRun:
    run, attempt = start(**more)
    host = next(beat.host for beat in run.beats(attempt) if beat.node == node)
    cluster.kill_node(host)
    try:
        run.wait_for_end()
    finally:
        cluster.start_node(host)
    return run


def _preempt(cluster: Any, run: LocalRun) -> None:
    rival = cluster.run(
        "sbatch", "--parsable", "-p", "prod", "-N4", "--gpus-per-node=4", "--no-requeue",
        "--output=/dev/null", "--wrap", "sleep 30",
    ).strip()  # fmt: skip
    try:
        run.wait_for_end()
    finally:
        cluster.run("scancel", rival)


def _job_id(run: LocalRun) -> str:
    return run.history().attempts[0].job_id or ""
