"""What many supervisors on one login node cost: their Slurm commands, processor time and memory.

    python -m benchmarks.supervisors --runs 500 --json

Run it by hand. Each run has its own process with the real supervisor, as `holdfast submit` starts
it without a Prefect API, and all share one index. Only the cluster is played: `sbatch`, `squeue`
and `scontrol` are scripts that count their calls and answer for all jobs, and one process writes
the heartbeats of all nodes. A tenth of the jobs is pending, and a tenth of the runs would grow.

`slurm_per_minute` counts Slurm's commands of all supervisors together. `cores` is their share of
one core together. `uss_mb` is the memory per supervisor that no other process shares. Supervisors
are forked here, so one that starts by itself needs more: `alone_uss_mb`, measured with the first.
With `--service`, one `holdfast supervise --stay` supervises all runs. `uss_mb` is then its memory
divided by the runs, and `alone_uss_mb` all of it. With `--saves`, the runs are a year old, and only
their turns are measured, see `benchmarks.supervisor_turns`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from benchmarks.heartbeats import make_beat
from benchmarks.supervisor_turns import (
    KEPT,
    compare,
    grow_old,
    journal_mb,
    write_deletions,
    write_saves,
)

from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Request, Submission, read_document
from holdfast.contracts.records.supervision import is_supervised
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.supervisor.carry import carry
from holdfast.flows.supervisor.submission import submit_next
from holdfast.lineage.index import Index
from holdfast.workers.agent.claim import claim
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.nodes.heartbeats import HeartbeatWriter
from holdfast.workers.runs.run_folders import create_run

GPUS: Final = 8
PENDING_EACH: Final = 10
GROWING_EACH: Final = 10
# The first minute starts the supervisors and fills the index.
START_S: Final = 60.0
COMMANDS: Final = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo", "sacctmgr")
PARTITION: Final = (
    "PartitionName=spot AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A "
    "Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[1-{nodes}] "
    "OverSubscribe=NO State=UP TotalNodes={nodes}"
)
NODE: Final = (
    "NodeName=n{node} Arch=x86_64 CPUAlloc=64 CPUTot=64 Gres=gpu:8 GresUsed=gpu:8 State=ALLOCATED "
    "Partitions=spot CfgTRES=cpu=64,gres/gpu=8"
)
# Each command records its call, then answers. `sbatch` gives the next job id and lists the job.
SCRIPT: Final = """#!/bin/sh
cd {place}
command=${{0##*/}}
echo "$command" >> calls
case "$command $*" in
  sbatch*)
    job=$(($(cat serial) + 1)); echo $job > serial
    name=$(sed -n 's/^#SBATCH --job-name=//p' "$1")
    if [ $((job % {pending})) = 0 ]
    then echo "$job|PENDING|Resources||N/A|N/A||$name" >> jobs
    else echo "$job|RUNNING|None|n$job|{began}|N/A|n$job|$name" >> jobs
    fi
    echo "Submitted batch job $job";;
  squeue*-u*) cat jobs;;
  *"show node") cat nodes;;
  *"show partition") cat partition;;
  "scontrol show config") echo "AccountingStorageEnforce = none";;
  *) echo "$command $*" >> others; exit 1;;
esac
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--service", action="store_true", help="one process for all runs")
    parser.add_argument("--saves", type=int, help="measure the turns in runs with so many saves")
    parser.add_argument("--attempts", type=int, default=10, help="of each run with --saves")
    parser.add_argument("--deleted", action="store_true", help="with --saves: delete them again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-supervisors-") as folder:
        if options.saves is None:
            facts = measure(Path(folder), options.runs, options.seconds, service=options.service)
        else:
            facts = measure_old(
                Path(folder), options.runs, options.saves, options.attempts, options.deleted
            )
    if options.json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:>18} {value}")


def measure(folder: Path, runs: int, seconds: float, *, service: bool) -> dict[str, Any]:
    """Start a supervisor for each of `runs` runs, and return what they cost over `seconds`.

    With `service`, start one process for all of them.
    """
    cluster = play_site(folder, runs)
    made = [make_run(folder / "root", number) for number in range(runs)]
    with Index() as index:
        index.open()
    gc.freeze()
    processes: list[int] = []
    try:
        processes.append(in_child(partial(play_heartbeats, made)))
        if service:
            processes.append(start_service(folder / "root").pid)
        else:
            processes.append(start_alone(made[0]).pid)
            for paths in made[1:]:
                processes.append(in_child(partial(supervise, paths)))
        time.sleep(START_S)
        supervisors = [psutil.Process(pid) for pid in processes[1:]]
        before, spent, began = count_calls(cluster), cpu_of(supervisors), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        calls = count_calls(cluster) - before
        memory = [one.memory_full_info().uss / 1e6 for one in supervisors]
        others = cluster / "others"
        return {
            "runs": runs,
            "supervised": sum(is_supervised(paths.flow_lock) for paths in made),
            "seconds": round(elapsed, 1),
            "slurm_per_minute": round(60 * calls.total() / elapsed, 2),
            "by_command": {name: round(60 * n / elapsed, 2) for name, n in calls.items()},
            "cores": round((cpu_of(supervisors) - spent) / elapsed, 3),
            "uss_mb": round(memory[0] / runs if service else statistics.median(memory[1:]), 1),
            "alone_uss_mb": round(memory[0], 1),
            "unanswered": others.read_text().splitlines() if others.exists() else [],
        }
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        for pid in processes:
            os.waitpid(pid, 0)


def measure_old(
    folder: Path, runs: int, saves: int, attempts: int, deleted: bool
) -> dict[str, Any]:
    """Return what a turn costs in each of `runs` runs that are a year old, in one process."""
    play_site(folder, 2 * runs)
    young: list[RunPaths] = []
    old: list[RunPaths] = []
    for number in range(runs):
        young.append(make_run(folder / "young", number, is_pending=False))
    for number in range(runs):
        like = old[0] if old else None
        age = partial(grow_old, saves=saves, attempts=attempts, like=like)
        old.append(make_run(folder / "old", number, is_pending=False, age=age, deleted=deleted))
        if deleted:
            write_deletions(old[-1], saves, attempts)
        newest = old[-1].attempt(attempts)
        write_saves(newest, saves // attempts, saves - saves // attempts, is_live=True)
    journal = {"journal_mb": journal_mb(old[0])}
    return {"runs": runs, "saves": saves, "attempts": attempts, **journal, **compare(young, old)}


def play_site(folder: Path, nodes: int) -> Path:
    """Play a cluster, and use a home and an index in `folder`; return the cluster's place."""
    cluster = folder / "cluster"
    play_cluster(cluster, nodes)
    os.environ["PATH"] = f"{cluster}:{os.environ['PATH']}"
    os.environ["HOLDFAST_HOME"] = str(folder / "home")
    os.environ.pop("PREFECT_API_URL", None)
    return cluster


def play_cluster(place: Path, nodes: int) -> None:
    """Write the commands of a cluster with `nodes` nodes, all of them in use."""
    place.mkdir()
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    script = SCRIPT.format(place=place, pending=PENDING_EACH, began=began)
    for name in COMMANDS:
        (place / name).write_text(script)
        (place / name).chmod(0o755)
    (place / "serial").write_text("0\n")
    (place / "calls").touch()
    (place / "partition").write_text(PARTITION.format(nodes=nodes) + "\n")
    lines = [NODE.format(node=number) + "\n" for number in range(1, nodes + 1)]
    (place / "nodes").write_text("".join(lines))


def make_run(
    root: Path,
    number: int,
    *,
    is_pending: bool | None = None,
    age: Callable[[RunPaths], None] | None = None,
    deleted: bool = False,
) -> RunPaths:
    """Create a run and submit an attempt; claim it unless its job is pending.

    `age` gives the run former attempts. With `deleted`, it keeps only its last checkpoints.
    """
    spec = RunSpec.model_validate(
        {
            "name": f"run-{number:04d}",
            "command": ["train.py"],
            "launch": {"working_directory": str(root.parent)},
            "resources": {"executor": "slurm", "gpus_per_node": GPUS, "partition": "spot"},
            "checkpoint": {"keep": {"last": KEPT}} if deleted else {},
            "elastic": {"max_gpus": 2 * GPUS, "grow": True} if number % GROWING_EACH == 1 else {},
        }
    )
    paths = create_run(spec, root, created_by="benchmark")
    if age is not None:
        age(paths)
    attempt = submit_next(paths, gpus=GPUS, reason="first attempt", exclude=())
    request, submission = (
        read_document(Request, attempt.request),
        read_document(Submission, attempt.submission),
    )
    assert request is not None
    assert submission is not None
    job = int(submission.job_id)
    if not (job % PENDING_EACH == 0 if is_pending is None else is_pending):
        context = AgentContext(
            request=request,
            run=paths,
            attempt=attempt,
            node=0,
            nodes=1,
            job_id=str(job),
            host=f"n{job}",
            started_at=time.time(),
        )
        with JournalWriter(attempt.node_journal(0)) as journal:
            claim(context, journal)
    return paths


def play_heartbeats(made: Sequence[RunPaths]) -> None:
    """Write the heartbeats of all running jobs, as their agents do, until killed."""
    claimed = [(number + 1, paths.attempt(1)) for number, paths in enumerate(made)]
    writers = [
        (job, HeartbeatWriter(attempt)) for job, attempt in claimed if attempt.claim.exists()
    ]
    every_s = RunSpec(name="x", command=("x",)).supervision.heartbeat_s
    step = 0
    while True:
        began = time.monotonic()
        step += 1
        for job, writer in writers:
            beat = make_beat(0, step, every_s)
            writer.write([{**beat, "host": f"n{job}", "monotonic_s": began}])
        time.sleep(max(0.0, began + every_s - time.monotonic()))


def start_alone(paths: RunPaths) -> subprocess.Popen[bytes]:
    """Start a supervisor as `holdfast submit` does without a Prefect API."""
    command = [sys.executable, "-m", "holdfast.flows.detached", str(paths.directory)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_service(root: Path) -> subprocess.Popen[bytes]:
    """Start one supervisor for all runs under `root`."""
    command = [str(Path(sys.executable).with_name("holdfast")), "supervise", "--stay"]
    return subprocess.Popen(
        [*command, "--root", str(root)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def supervise(paths: RunPaths) -> None:
    with Index() as index:
        carry(paths, logging.getLogger("holdfast.benchmark"), index)


def in_child(work: Callable[[], None]) -> int:
    """Fork a process that does `work` and then ends; return its pid."""
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(1)


def count_calls(cluster: Path) -> Counter[str]:
    return Counter((cluster / "calls").read_text().split())


def cpu_of(processes: Sequence[psutil.Process]) -> float:
    """Return the processor seconds of the processes and of the commands that they have run."""
    times = [one.cpu_times() for one in processes]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


if __name__ == "__main__":
    main()
