"""Seconds from the loss of a run's node to its first new step, while others wait in the queue.

`python benchmarks/restart.py --kills 0 --queue N` does this N times for each `resources.standby`
that this machine's Slurm has. It needs root, and starts a cluster of four nodes. A run trains on
two of them. Another user's jobs then fill the other two and the queue, and one node of the run is
lost. The others' jobs are short, and together they take two minutes, so that a run without a
standby trains again within the benchmark.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

# Appended at the end, so that none of these modules hides an installed one.
sys.path.append(str(Path(__file__).parents[1] / "infra" / "slurm"))

from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from slurm_errors import ClusterError

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import newest_committed
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.documents import Claim, read_document
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs import operator
from holdfast.workers.runs.run_folders import create_run
from holdfast.workers.schedulers import executor_for
from holdfast.workers.schedulers.slurm_client import expand_hosts
from holdfast_bench.drills.steps import Records, Step

PROGRAM: Final = ("-m", "holdfast_bench.drills.program")
NODES: Final = 2
STEP_S: Final = 0.05
INTERVAL_STEPS: Final = 20
# Jobs of another user, of one node each, and the seconds that each of them runs.
ANOTHER_UID: Final = 65534
OTHERS: Final = 24
OTHERS_S: Final = 15
WAIT_S_MAX: Final = 600.0
END_S_MAX: Final = 120.0
POLL_S: Final = 0.1
T = TypeVar("T")


class SilentError(RuntimeError):
    """Something that the benchmark waits for did not happen."""


def lose_allocations(
    rounds: int, folder: Path, report: Callable[[str], None]
) -> dict[str, list[dict[str, float] | None]]:
    """Return the recoveries by the value of `resources.standby`; None for one that never came."""
    folder.mkdir()
    found: dict[str, list[dict[str, float] | None]] = {}
    with _cluster(folder) as slurm:
        ways = ["none", "successor", *(["expedite"] if executor_for("slurm").expedites() else [])]
        report(f"Slurm {slurm.run('sinfo', '--version').split()[-1]}: {', '.join(ways)}")
        for number in range(rounds):
            for way in ways:
                one = _Run(slurm, folder / f"{way}-{number}", way)
                recovery = None
                try:
                    recovery = one.lose_node()
                except SilentError as error:
                    report(f"{way}: {error}")
                finally:
                    one.end()
                report(f"{way} {recovery}")
                found.setdefault(way, []).append(recovery)
    return found


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Yield a cluster that this process asks, in a folder that another user's jobs can reach."""
    for one in (folder.parent, folder):
        one.chmod(0o711)
    os.environ["HOLDFAST_HOME"] = str(folder / "home")
    spec = ClusterSpec(gpus_per_node=1, kill_wait_s=10, expedite=True)
    with SlurmCluster(folder / "slurm", spec) as slurm:
        slurm.paths.directory.chmod(0o711)
        os.environ.update(slurm.env)
        yield slurm


class _Run:
    """A run on two nodes of the cluster, and its supervisor."""

    def __init__(self, slurm: SlurmCluster, folder: Path, standby: str) -> None:
        folder.mkdir()
        records = folder / "records"
        records.mkdir()
        settings = {"records": str(records), "poison": str(folder / "poison")}
        spec = RunSpec.model_validate(
            {
                "name": "queued",
                "command": PROGRAM,
                "config": {**settings, "steps": 10**7, "step_s": STEP_S},
                "environment": {"OMP_NUM_THREADS": "1"},
                "launch": {"working_directory": str(folder)},
                "resources": {
                    "executor": "slurm",
                    "partition": "spot",
                    "nodes": NODES,
                    "gpus_per_node": 1,
                    "standby": standby,
                    "extra": {"exclusive": True},
                },
                "elastic": {"choices": [NODES]},
                "checkpoint": {"interval": INTERVAL_STEPS},
                "supervision": {"poll_s": 1.0, "standby_after_s": "off"},
            }
        )
        self._slurm, self._standby = slurm, standby
        self._records, self._steps = Records(records), list[Step]()
        self._lost = ""
        self._paths: RunPaths = create_run(spec, folder / "runs", created_by="benchmark")
        command = [sys.executable, "-m", "holdfast.flows.detached", str(self._paths.directory)]
        with open(folder / "supervisor.log", "wb") as log:
            self._supervisor = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def lose_node(self) -> dict[str, float]:
        """Return the stages of the recovery, in seconds from the loss. Raises `SilentError`."""
        _wait("a checkpoint", lambda: newest_committed(self._paths, 1))
        if self._standby == "successor":
            _wait("the successor", lambda: self._time_of(EventKind.SUCCESSOR_SUBMITTED))
        self._fill_queue()
        claim = read_document(Claim, self._paths.attempt(1).claim)
        assert claim is not None
        # Not the leading node. Which of the others it is makes no difference.
        leading = expand_hosts(claim.host)[0]
        self._lost = next(name for name in self._nodes() if name != leading)
        lost_at = time.time()
        self._slurm.kill_node(self._lost)
        first = _wait("a new step", self._first_again)
        pending = self._slurm.run("squeue", "-h", "-u", str(ANOTHER_UID), "-t", "PENDING")
        before = max(step.step for step in self._steps if step.place.attempt == 1)
        return {
            "ended": round(self._time_of(EventKind.ATTEMPT_ENDED) - lost_at, 1),
            "started": round(self._time_of(EventKind.CLAIMED, 2) - lost_at, 1),
            "first_step": round(first.time - lost_at, 1),
            "steps_lost": float(before - first.step + 1),
            "others_pending": float(len(pending.splitlines())),
            "load": round(os.getloadavg()[0], 1),
        }

    def end(self) -> None:
        """End the run and the jobs of others, and start the lost node again."""
        try:
            with contextlib.suppress(HoldfastError):
                operator.request(self._paths, "cancel", by="benchmark", now=True)
            self._slurm.run("scancel", f"--user={ANOTHER_UID}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(END_S_MAX)
        finally:
            self._supervisor.kill()
            self._supervisor.wait(END_S_MAX)
        self._slurm.run("scancel", "--partition=spot")
        if self._lost:
            # A young job of a node that is back too early would count as running.
            lost = self._lost
            _wait("the node's loss", lambda: "down" in self._slurm.node_states()[lost], END_S_MAX)
            self._slurm.start_node(lost)
        _wait("an empty queue", lambda: not self._slurm.run("squeue", "-h"), END_S_MAX)

    def _fill_queue(self) -> None:
        options = [f"--uid={ANOTHER_UID}", "--partition=spot", "--nodes=1", "--exclusive"]
        options += ["--time=20", "--output=/dev/null", "--chdir=/", f"--wrap=sleep {OTHERS_S}"]
        for _ in range(OTHERS):
            self._slurm.run("sbatch", *options)

    def _nodes(self) -> tuple[str, ...]:
        """Return the nodes of the run's only job that runs."""
        names = self._slurm.run("squeue", "-h", f"--user={os.getuid()}", "-t", "R", "-o", "%N")
        return expand_hosts(names.strip())

    def _first_again(self) -> Step | None:
        """Return the first step of the second attempt."""
        self._steps += self._records.read_new()
        again = [step for step in self._steps if step.place.attempt == 2]
        return min(again, key=lambda step: step.time, default=None)

    def _time_of(self, kind: EventKind, attempt: int = 1) -> float:
        """Return the time of an attempt's first event of a kind; 0 without one."""
        events = load_events(self._paths)
        times = [e.time for e in events if e.kind is kind and e.data.get("attempt") == attempt]
        return min(times, default=0.0)


def _wait(what: str, look: Callable[[], T | None], wait_s: float = WAIT_S_MAX) -> T:
    """Poll `look` until it returns a true value, and return that. Raises `SilentError`."""
    give_up = time.monotonic() + wait_s
    while time.monotonic() < give_up:
        with contextlib.suppress(ClusterError):
            if found := look():
                return found
        time.sleep(POLL_S)
    raise SilentError(f"{what} did not come within {wait_s:.0f} s")
