"""Seconds from the death of a rank or a node to the first new step, and repeated steps.

Run `python benchmarks/restart.py [--kills N] [--train-s S] [--node-losses N] [--queue N]
[--real-time]`. It runs the small program of the drills on two ranks, and sends SIGKILL to one rank
after every S seconds of training.
It compares three ways to start the program: an agent with a warm standby, an agent without one, and
`torchrun --max-restarts` alone. All save every 20 steps. The faults alternate and all three train
meanwhile, so that other load on the machine affects all of them.

`--node-losses` then rehearses the loss of one node of four so often with a spare node, and so often
without one, as `holdfast drill` does. Each has a separate job.

`--queue` then loses the node of a job on a full Slurm cluster so often, see
`benchmarks/full_queue.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.full_queue import lose_allocations

from holdfast.contracts import environment
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.supervisor.submission import submit_next
from holdfast.workers.nodes.processes import descendants
from holdfast.workers.runs.run_folders import create_run
from holdfast.workers.schedulers import executor_for
from holdfast_bench.drills.campaign import Plan, drill_throw_away
from holdfast_bench.live_drills.kinds import select_kinds
from holdfast_bench.live_drills.results import DrillResult

PROGRAM: Final = ("-m", "holdfast_bench.drills.program")
RANKS: Final = 2
VICTIM: Final = 1
STEP_S: Final = 0.05
INTERVAL_STEPS: Final = 20
SNAPSHOT_STEPS: Final = 5
RECOVERY_S_MAX: Final = 120.0
POLL_S: Final = 0.01
SEED: Final = 7
NODE_LOSSES: Final = ("node-loss-spare", "node-loss-shrink")


class HungError(RuntimeError):
    """A job trained no step within `RECOVERY_S_MAX`."""


@dataclass(frozen=True)
class Step:
    """A line of one rank's record: Unix seconds, and the number of the step."""

    time: float
    number: int


class Job(ABC):
    """A training job whose ranks can be killed. `records` is the folder of its step records."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.records = folder, folder / "records"
        self.records.mkdir()

    @property
    def settings(self) -> dict[str, Any]:
        """The program's settings."""
        poison = str(self.folder / "poison")
        return {"records": str(self.records), "poison": poison, "steps": 10**7, "step_s": STEP_S}

    @abstractmethod
    def root_process(self) -> int:
        """Return the process above all processes of the job."""

    def stages(self, since: float) -> dict[str, float]:
        """Return the known stages of a recovery that began at `since`, in seconds after it."""
        return {}

    def steps(self) -> list[Step]:
        """Return the steps of the rank that is killed, in order of time."""
        found = []
        for path in self.records.glob(f"*.rank{VICTIM}.jsonl"):
            # The last line may be incomplete, for example if its writer was killed.
            for line in path.read_text().split("\n")[:-1]:
                with contextlib.suppress(ValueError):
                    line_data = json.loads(line)
                    found.append(Step(line_data["time"], line_data["step"]))
        return sorted(found, key=lambda step: step.time)

    def wait_for_step(self, since: float) -> Step:
        """Return the first step that ended after `since`. Raises `HungError`."""
        give_up = time.monotonic() + RECOVERY_S_MAX
        while time.monotonic() < give_up:
            for step in self.steps():
                if step.time > since:
                    return step
            time.sleep(POLL_S)
        raise HungError(f"{self.folder.name}: no step within {RECOVERY_S_MAX:.0f} s")

    def kill_rank(self) -> dict[str, float]:
        """Kill the rank during training and return the cost of its recovery."""
        below = descendants(psutil.Process(self.root_process()))
        for process in below:
            with contextlib.suppress(psutil.Error):
                # A rank of a warm standby has the same number, but has no record open.
                opened = [f.path for f in process.open_files()]
                if any(name.endswith(f".rank{VICTIM}.jsonl") for name in opened):
                    at = time.time()
                    process.kill()
                    break
        else:
            raise SystemExit(f"{self.folder.name}: the process of rank {VICTIM} was not found")
        before = [step for step in self.steps() if step.time <= at]
        first = self.wait_for_step(at)
        return {
            "first_step": first.time - at,
            "steps_lost": before[-1].number - first.number + 1,
            **self.stages(at),
        }

    @abstractmethod
    def end(self) -> None:
        """End all processes of the job."""


class Held(Job):
    """A job under an agent, with or without a warm standby."""

    def __init__(self, folder: Path, standby_after_s: float | str) -> None:
        super().__init__(folder)
        spec = RunSpec.model_validate(
            {
                "name": "restart",
                "command": PROGRAM,
                "config": self.settings,
                "environment": {"OMP_NUM_THREADS": "1"},
                "launch": {"working_directory": str(folder)},
                "resources": {"gpus_per_node": RANKS},
                "checkpoint": {"interval": INTERVAL_STEPS, "snapshots": SNAPSHOT_STEPS},
                "supervision": {"restarts_in_place": 1000, "standby_after_s": standby_after_s},
            }
        )
        self.paths: RunPaths = create_run(spec, folder / "runs", created_by="benchmark")
        submit_next(self.paths, gpus=RANKS, reason="a benchmark", exclude=())

    def root_process(self) -> int:
        for event in load_history(self.paths).events:
            if event.kind is EventKind.CLAIMED:
                return int(event.data["pid"])
        raise SystemExit(f"{self.folder.name}: no agent has claimed the attempt")

    def stages(self, since: float) -> dict[str, float]:
        wanted: dict[str, str] = {EventKind.LAUNCH_ENDED: "ended", EventKind.RESUMED: "resumed"}
        found = [e for e in load_history(self.paths).events if e.time > since and e.kind in wanted]
        return {wanted[event.kind]: event.time - since for event in reversed(found)}

    def end(self) -> None:
        for view in load_history(self.paths).attempts:
            if view.request is not None:
                executor = executor_for(view.request.executor)
                with contextlib.suppress(HoldfastError):
                    found = executor.find(view.request)
                    if found is not None:
                        executor.cancel(view.request, found)


class Bare(Job):
    """A job under torchrun alone, which restarts all ranks when one dies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
        command += ["--standalone", "--max-restarts=1000", f"--log-dir={folder / 'logs'}", *PROGRAM]
        settings = {**self.settings, "directory": str(folder / "run")}
        variables = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")},
            "OMP_NUM_THREADS": "1",
            environment.CONFIG: json.dumps(settings),
            environment.CHECKPOINT_INTERVAL: str(INTERVAL_STEPS),
            environment.CHECKPOINT_SNAPSHOTS: "off",
        }
        with open(folder / "torchrun.log", "wb") as log:
            self._process = subprocess.Popen(
                command, env=variables, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )

    def root_process(self) -> int:
        return self._process.pid

    def end(self) -> None:
        root = psutil.Process(self._process.pid)
        for process in [*descendants(root), root]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self._process.wait()


WAYS: Final[dict[str, Callable[[Path], Job]]] = {
    "standby": lambda folder: Held(folder, 0.0),
    "no_standby": lambda folder: Held(folder, "off"),
    "torchrun": Bare,
}


class Jobs:
    """One job of each way. A job that hangs is ended and replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Job] = {}
        self.hung = dict.fromkeys(WAYS, 0)

    def start(self) -> None:
        """Start all jobs and wait until each has trained a step."""
        for name, make in WAYS.items():
            self._made[name] = make(self._folder / name)
        for job in self._made.values():
            job.wait_for_step(0.0)

    def kill_rank(self, name: str) -> dict[str, float] | None:
        """Return the recovery from one killed rank, None if the job never trained again."""
        try:
            return self._made[name].kill_rank()
        except HungError as error:
            report(str(error))
        self.hung[name] += 1
        self._made[name].end()
        self._made[name] = WAYS[name](self._folder / f"{name}-{self.hung[name]}")
        self._made[name].wait_for_step(0.0)
        return None

    def end(self) -> None:
        """End all jobs."""
        for job in self._made.values():
            job.end()


def summary(recoveries: list[dict[str, float]], hung: int) -> dict[str, Any]:
    """Return medians, the longest time to the first new step, and the number of hung jobs."""
    names = sorted({name for one in recoveries for name in one})
    middle = {n: round(median(o[n] for o in recoveries if n in o), 2) for n in names}
    longest = round(max((one["first_step"] for one in recoveries), default=math.inf), 2)
    return {**middle, "longest": longest, "kills": len(recoveries) + hung, "hung": hung}


def lose_nodes(count: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recoveries from `count` losses of a node in each way to continue."""
    folder.mkdir()
    kinds = select_kinds(NODE_LOSSES, is_live=False, missing=())
    result = DrillResult(seed=SEED)
    plan = Plan(kinds=kinds, count=count * len(kinds), seed=SEED)
    kept = Path(tempfile.gettempdir(), f"{folder.parent.name}-broken")
    drill_throw_away(plan, result, folder, report, kept=kept)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NODE_LOSSES}
    wrong = dict.fromkeys(NODE_LOSSES, 0)
    for one in result.faults:
        if not one.ok or one.first_step_s is None:
            wrong[one.kind] += 1
            continue
        times = {"first_step": one.first_step_s, "steps_lost": float(one.steps_lost or 0)}
        if one.noticed_s is not None:
            times["noticed"] = one.noticed_s
        found[one.kind].append(times)
    return {name: summary(found[name], wrong[name]) for name in NODE_LOSSES}


def lose_in_queue(count: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recoveries of runs on a full cluster, by the value of `resources.standby`."""
    found = {}
    for way, recoveries in lose_allocations(count, folder, report).items():
        whole = [one for one in recoveries if one is not None]
        found[f"queue_{way}"] = summary(whole, len(recoveries) - len(whole))
    return found


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--train-s", type=float, default=20.0)
    parser.add_argument("--node-losses", type=int, default=0)
    parser.add_argument("--queue", type=int, default=0)
    parser.add_argument(
        "--real-time", action="store_true", help="take priority over other processes (root)"
    )
    given = parser.parse_args()
    if given.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    # On SIGTERM, end the jobs too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chance = random.Random(SEED)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as folder:
        jobs = Jobs(Path(folder))
        try:
            if given.kills:
                jobs.start()
            for _ in range(given.kills):
                for name in WAYS:
                    time.sleep(given.train_s / len(WAYS) + chance.uniform(0.0, 1.0))
                    if recovery := jobs.kill_rank(name):
                        found[name].append(recovery)
                        report(f"{name} {recovery}")
        finally:
            jobs.end()
        ways = {name: summary(found[name], jobs.hung[name]) for name in WAYS if given.kills}
        if given.node_losses:
            ways |= lose_nodes(given.node_losses, Path(folder) / "nodes")
        if given.queue:
            ways |= lose_in_queue(given.queue, Path(folder) / "queue")
    print(json.dumps(ways))
    return 0


if __name__ == "__main__":
    sys.exit(main())
