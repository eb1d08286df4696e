"""Operations on the runs of a sweep: what operators do, and what fails around them.

Every operation waits until its effect is seen, so the operations of a soak do not overlap.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from examples.demo_service import POOL, PrefectService
from safetensors.numpy import load_file
from slurm_cluster import SlurmCluster
from tests.support.flow_runs import FlowRuns, state_of, step_of, supervisions, wait_for

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_history

GPUS_PER_RUN: Final = 2
WORKERS: Final = ("worker-a", "worker-b")
JOB_S: Final = 12
EFFECT_S: Final = 180.0
SAMPLE_S: Final = 1.0


class Surroundings:
    """The Prefect server and two workers of the type `holdfast`, each of which can be killed."""

    def __init__(self, service: PrefectService) -> None:
        self._service = service
        self._parts: dict[str, ExitStack] = {}

    def start(self) -> None:
        self._start("server")
        self._service.command("holdfast", "deploy", "--type", "holdfast")
        for name in WORKERS:
            self._start(name)

    def replace(self, name: str, after_s: float) -> None:
        """Kill one of them, and start it again after `after_s` seconds."""
        self._parts.pop(name).close()
        time.sleep(after_s)
        self._start(name)

    def close(self) -> None:
        for name in reversed(list(self._parts)):
            self._parts.pop(name).close()

    def _start(self, name: str) -> None:
        self._parts[name] = ExitStack()
        if name == "server":
            self._parts[name].enter_context(self._service.serving())
            return
        start = ("prefect", "worker", "start", "--pool", POOL, "--type", "holdfast", "--name", name)
        self._parts[name].enter_context(self._service.background(name, start))


class Quota:
    """A thread that counts the GPUs of the sweep's jobs that run at the same time."""

    def __init__(self, slurm: SlurmCluster, prefix: str) -> None:
        self._slurm, self._prefix = slurm, prefix
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Return the largest number of GPUs that was seen."""
        self._ended.set()
        self._thread.join(EFFECT_S)
        return self.most

    def _count(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            names = self._slurm.run("squeue", "-h", "--states=RUNNING", "-o", "%j").split()
            jobs = [name for name in names if name.startswith(self._prefix)]
            self.most = max(self.most, GPUS_PER_RUN * len(jobs))


class Operations:
    """Chooses operations by a seed and carries them out. `done` has one line for each."""

    def __init__(
        self,
        slurm: SlurmCluster,
        runs: FlowRuns,
        surroundings: Surroundings,
        members: list[RunPaths],
        seed: int,
    ) -> None:
        self._slurm, self._runs, self._surroundings = slurm, runs, surroundings
        self.members = members
        self._random = random.Random(seed)
        self.done: list[str] = []
        # Seconds until Slurm, Holdfast and Prefect agreed, and until a run was supervised again.
        self.agreed_s: list[float] = []
        self.supervised_s: list[float] = []

    def next(self) -> None:
        """Carry out one operation on a run that trains."""
        training = [one for one in self.members if state_of(one) == "running" and self._steps(one)]
        if not training:
            time.sleep(1.0)
            return
        paths = self._random.choice(training)
        operations: tuple[Callable[[RunPaths], None], ...] = (
            *(self._preempt, self._pause, self._pause_in_prefect, self._cancel, self._end_outside),
            *(self._kill_supervisor, self._kill_worker, self._kill_server),
        )
        operation = self._random.choice(operations)
        began = time.monotonic()
        operation(paths)
        spent_s = time.monotonic() - began
        self.done.append(f"{operation.__name__.strip('_')} {paths.name}: {spent_s:.1f} s")

    def continue_ended(self) -> bool:
        """Retry one run that was cancelled, if the quota has room; return whether all have ended.

        The sweep does not start a run in the place of one that somebody continues.
        """
        states = {one: state_of(one) for one in self.members}
        if not all(states.values()):
            return False
        live = [one for one in self.members if load_history(one).state.is_live]
        cancelled = [one for one, state in states.items() if state == "cancelled"]
        if cancelled and len(live) <= 1:
            paths = cancelled[0]
            attempts = len(paths.list_attempts())
            self._runs.service.command("prefect", "flow-run", "retry", self.flow_run(paths))
            wait_for("the retried run", lambda: len(paths.list_attempts()) > attempts, EFFECT_S)
            self.done.append(f"retry {paths.name}")
        return not live and not cancelled

    def report(self) -> str:
        """The operations and the figures, for a person."""
        figures = [
            f"{name}: median {statistics.median(found):.1f} s, most {max(found):.1f} s"
            for name, found in (
                ("Slurm, Holdfast and Prefect agreed after", self.agreed_s),
                ("supervised again after", self.supervised_s),
            )
            if found
        ]
        return "\n".join([*self.done, *figures])

    @staticmethod
    def flow_run(paths: RunPaths) -> str:
        """The flow run that supervises the run."""
        return str(supervisions(paths)[-1]["flow_run"])

    @staticmethod
    def _steps(paths: RunPaths) -> int:
        return step_of(paths, len(paths.list_attempts()))

    def _wait_for_steps(self, paths: RunPaths) -> None:
        attempts = len(paths.list_attempts())
        wait_for("the next attempt's steps", lambda: step_of(paths, attempts) > 0, EFFECT_S)

    def _shown(self, paths: RunPaths) -> Any:
        return self._runs.ask(f"flow_runs/{self.flow_run(paths)}")["state"]

    def _wait_until_shown(self, paths: RunPaths, *types: str) -> None:
        wait_for(f"Prefect's state {types}", lambda: self._shown(paths)["type"] in types, EFFECT_S)

    def _jobs(self, paths: RunPaths) -> list[str]:
        """The jobs of the run that Slurm still has, by id."""
        lines = self._slurm.run("squeue", "-h", "-o", "%i %j").splitlines()
        found = [line.split() for line in lines]
        return [job for job, name in found if name.startswith(f"holdfast-{paths.name}-")]

    # --- operations -----------------------------------------------------------------------

    def _preempt(self, paths: RunPaths) -> None:
        """A job of higher priority takes the run's node for some seconds."""
        attempts = len(paths.list_attempts())
        (job, *_) = self._jobs(paths)
        node = self._slurm.run("squeue", "-h", "-j", job, "-o", "%N").strip()
        self._slurm.run(
            *("sbatch", "--partition=prod", f"--nodelist={node}", "--gres=gpu:4"),
            *("--output=/dev/null", "--wrap", f"sleep {JOB_S}"),
        )
        wait_for("another attempt", lambda: len(paths.list_attempts()) > attempts, EFFECT_S)
        self._wait_for_steps(paths)

    def _pause(self, paths: RunPaths) -> None:
        self._runs.holdfast("pause", paths.name)
        self._wait_until_shown(paths, "PAUSED")
        assert state_of(paths) == "paused"
        attempts = len(paths.list_attempts())
        self._runs.holdfast("resume", paths.name)
        wait_for("another attempt", lambda: len(paths.list_attempts()) > attempts, EFFECT_S)
        self._wait_for_steps(paths)

    def _pause_in_prefect(self, paths: RunPaths) -> None:
        flow_run = self.flow_run(paths)
        state = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
        self._runs.ask(f"flow_runs/{flow_run}/set_state", state=state)
        wait_for("the pause", lambda: state_of(paths) == "paused", EFFECT_S)
        attempts = len(paths.list_attempts())
        self._runs.ask(f"flow_runs/{flow_run}/resume", run_input={})
        wait_for("another attempt", lambda: len(paths.list_attempts()) > attempts, EFFECT_S)
        self._wait_for_steps(paths)

    def _cancel(self, paths: RunPaths) -> None:
        self._runs.service.command("prefect", "flow-run", "cancel", self.flow_run(paths))
        wait_for("the end of the run", lambda: state_of(paths) == "cancelled", EFFECT_S)
        self._wait_until_shown(paths, "CANCELLED")

    def _end_outside(self, paths: RunPaths) -> None:
        """`scancel`, of which Holdfast and Prefect are not told."""
        self._slurm.run("scancel", *self._jobs(paths))
        wait_for("the end of the job", lambda: not self._jobs(paths), EFFECT_S)
        ended = time.monotonic()
        wait_for("the end of the run", lambda: state_of(paths) == "cancelled", EFFECT_S)
        self._wait_until_shown(paths, "CANCELLED", "FAILED")
        self.agreed_s.append(time.monotonic() - ended)

    def _kill_supervisor(self, paths: RunPaths) -> None:
        before, began = supervisions(paths), time.monotonic()
        os.kill(before[-1]["pid"], signal.SIGKILL)
        wait_for("another supervisor", lambda: len(supervisions(paths)) > len(before), EFFECT_S)
        self.supervised_s.append(time.monotonic() - began)

    def _kill_worker(self, _: RunPaths) -> None:
        self._surroundings.replace(self._random.choice(WORKERS), after_s=3.0)

    def _kill_server(self, paths: RunPaths) -> None:
        before = self._steps(paths)
        self._surroundings.replace("server", after_s=5.0)
        wait_for("training without a server", lambda: self._steps(paths) > before, EFFECT_S)


def exported_weights(runs: FlowRuns, checkpoint: str, output: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint's model by name, exported to the file `output`."""
    runs.holdfast("export", checkpoint, "--to", "safetensors", "--output", str(output))
    return {name: array.tobytes() for name, array in load_file(output).items()}
