"""Runs peers on a real Slurm cluster of this machine, where a job of higher priority preempts them.

The preempting job takes the job's node. Another node is always free. In one cluster, a preemption
sends SIGTERM to the job's steps. In the other, it sends the signal that the job requested.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .launchers import GRACE_S, PROGRAMS, RANKS, Launcher, Unfinished

# Appended at the end, so that none of these modules hides an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "slurm"))

from slurm_cluster import SlurmCluster, check_prerequisites
from slurm_config import ClusterSpec
from slurm_errors import ClusterError

# Whether a preemption sends the signal that the job requested.
PLACES: Final = {"Slurm, SIGTERM": False, "Slurm, the job's own signal": True}
# A requeued job starts after 121 s, even if nodes are free.
COMEBACK_S_MAX: Final = 200.0
# Seconds between two queries of the queue, and how long it is empty before the job has ended.
LOOK_S: Final = 1.0
ENDED_S: Final = 6.0
CANCEL_S_MAX: Final = 60.0
LIGHTNING: Final = """\
#!/bin/bash
#SBATCH --partition=spot --nodes=1 --ntasks-per-node={ranks} --gres=gpu:4 --requeue --time=60
#SBATCH --signal=SIGUSR1@{grace_s} --open-mode=append --output={folder}/output.log
# The nodes of this cluster have no addresses of their own.
export MASTER_ADDR=127.0.0.1
srun {python} {program}
"""


class UnusableError(Exception):
    """No Slurm cluster can run here. The message names what is missing."""


@contextlib.contextmanager
def cluster(folder: Path, place: str) -> Iterator[SlurmCluster]:
    """Yield a cluster of two nodes for one of `PLACES`. Raises `UnusableError` if impossible."""
    spec = ClusterSpec(
        nodes=2, grace_time_s=GRACE_S, kill_wait_s=10, send_user_signal=PLACES[place]
    )
    started = SlurmCluster(folder / "slurm", spec)
    try:
        check_prerequisites()
        started.start()
    except ClusterError as error:
        raise UnusableError(str(error)) from error
    try:
        yield started
    finally:
        started.stop()


@dataclass
class SlurmLauncher(Launcher):
    """One peer's job on a node of the cluster, with the lower priority."""

    slurm: SlurmCluster | None = None
    comeback_s_max: float = COMEBACK_S_MAX
    _looked_at: float = 0.0
    _seen_at: float = 0.0

    def command(self) -> list[str]:
        """Return the command that submits the job. Only Holdfast's supervisor keeps running."""
        self._seen_at = time.monotonic()
        match self.peer:
            case "submitit":
                program = str(PROGRAMS / "submit_with_submitit.py")
                return [str(self.python), program, str(self.folder), str(GRACE_S)]
            case "lightning":
                script = self.folder / "lightning.sh"
                script.write_text(
                    LIGHTNING.format(
                        ranks=RANKS,
                        grace_s=GRACE_S,
                        folder=self.folder,
                        python=self.python,
                        program=PROGRAMS / "with_lightning.py",
                    )
                )
                return ["sbatch", str(script)]
            case _:
                return super().command()

    def resources(self) -> dict[str, Any]:
        """Request a whole node of the partition whose jobs are preempted."""
        place = {"executor": "slurm", "partition": "spot", "nodes": 1, "gres": "gpu:4"}
        return {**super().resources(), **place}

    @property
    def environment(self) -> dict[str, str]:
        """The cluster's environment, and for submitit the path of what it has pickled."""
        more = {"PYTHONPATH": str(PROGRAMS)} if self.peer == "submitit" else {}
        return {**super().environment, **self._cluster.env, **more}

    def has_ended(self) -> bool:
        """Return True if the queue has no job and no supervisor is left to submit one."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        if not super().has_ended() or self._jobs():
            self._seen_at = now
        return now - self._seen_at > ENDED_S

    def terminate_job(self) -> None:
        """Submit a job of higher priority for the node."""
        nodes = ",".join(self._jobs("--states=RUNNING", "--format=%N"))
        prod = ("--partition=prod", f"--nodelist={nodes}", "--gres=gpu:4", "--output=/dev/null")
        self._run("sbatch", *prod, "--wrap", "sleep 3600")

    def end(self) -> None:
        """Cancel the job and kill its remaining processes. The preempting job keeps its node."""
        ends_at = time.monotonic() + CANCEL_S_MAX
        with contextlib.suppress(Unfinished):
            while self._jobs() and time.monotonic() < ends_at:
                self._run("scancel", "--partition=spot", "--user=root")
                time.sleep(LOOK_S)
        super().end()

    @property
    def _cluster(self) -> SlurmCluster:
        assert self.slurm is not None, "create a Slurm launcher with its cluster"
        return self.slurm

    def _jobs(self, *which: str) -> list[str]:
        fields = which or ("--format=%i",)
        return self._run("squeue", "--noheader", "--partition=spot", *fields).split()

    def _run(self, *command: str) -> str:
        try:
            return self._cluster.run(*command)
        except ClusterError as error:
            raise Unfinished(str(error)) from error


def release(started: SlurmCluster) -> None:
    """Cancel the preempting job, so that the next peer finds both nodes free."""
    with contextlib.suppress(ClusterError):
        started.run("scancel", "--partition=prod", "--user=root")
        time.sleep(ENDED_S)
