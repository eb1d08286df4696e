"""Where a Prefect worker runs a flow: a process of this host, or a small Slurm job.

Both outlive the worker. A record on disk lets the next worker of this host find them again.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from holdfast.contracts.disk.bounds import JobId, Name, Number, Seconds
from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.workers.nodes.processes import ProcessName, is_alive, name_process
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm_client import translate

JOB_NAME: Final = "holdfast-flow"
# A job needs a moment until `squeue` lists it.
SUBMIT_S: Final = 60.0
_JOB_ID: Final = re.compile(r"([0-9]+)(;.*)?")


class FlowPlace(BaseModel):
    """The process or job of one flow run. `host` is that of the process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    flow_run: Name
    kind: Literal["process", "slurm"]
    host: Name
    pid: Number = 0
    start_s: Seconds = 0.0
    boot_id: Name = ""
    job_id: JobId = ""

    def __str__(self) -> str:
        """Return the place as Prefect's identifier of infrastructure."""
        return f"slurm:{self.job_id}" if self.kind == "slurm" else f"{self.host}:{self.pid}"

    @property
    def process(self) -> ProcessName:
        return ProcessName(self.pid, self.start_s, self.boot_id)


class FlowPlaces:
    """The records of the flows that workers of this host started, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[FlowPlace]:
        """Return the records of this host. Damaged ones are left out."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                place = FlowPlace.model_validate_json(path.read_bytes())
            except (OSError, ValueError):
                continue
            if place.host == socket.gethostname():
                found.append(place)
        return found

    def write(self, place: FlowPlace) -> None:
        """Record a place, or replace the flow run's record."""
        make_directory(self.folder)
        write_bytes(self._path(place.flow_run), to_json(place.model_dump()))

    def forget(self, flow_run: str, keep_log: bool = False) -> None:
        """Delete a record, with the flow's output unless `keep_log`. The caller holds its lock."""
        self._path(flow_run).unlink(missing_ok=True)
        if not keep_log:
            self.log_path(flow_run).unlink(missing_ok=True)
        self.lock_path(flow_run).unlink(missing_ok=True)

    def lock_path(self, flow_run: str) -> Path:
        """Return the lock of the worker that attends to a flow run."""
        make_directory(self.folder)
        return self.folder / f"{flow_run}.lock"

    def log_path(self, flow_run: str) -> Path:
        """Return the file with the output of a flow run."""
        make_directory(self.folder)
        return self.folder / f"{flow_run}.log"

    def _path(self, flow_run: str) -> Path:
        return self.folder / f"{flow_run}.json"


def start_process(
    flow_run: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    cwd: str | None,
) -> tuple[FlowPlace, subprocess.Popen[bytes]]:
    """Start a flow in a separate session, so that it outlives this process and its terminal."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    name = name_process(process.pid)
    found: dict[str, Any] = (
        {} if name is None else {"start_s": name.start_s, "boot_id": name.boot_id}
    )
    host = socket.gethostname()
    return FlowPlace(
        flow_run=flow_run, kind="process", host=host, pid=process.pid, **found
    ), process


def submit_job(
    flow_run: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    options: Sequence[str],
) -> FlowPlace:
    """Submit a Slurm job that runs a flow. Its environment is `environment`.

    Raises `SchedulerError`.
    """
    script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
    words = ["sbatch", "--parsable", f"--job-name={JOB_NAME}", "--no-requeue", "--nodes=1"]
    words += ["--ntasks=1", "--export=ALL", f"--output={log}", "--open-mode=append", *options]
    # sbatch prefers its own variables to these options.
    clean = {k: v for k, v in environment.items() if not k.startswith(("SBATCH_", "SLURM_JOB"))}
    try:
        done = subprocess.run(
            words,
            input=script,
            env=clean,
            capture_output=True,
            text=True,
            timeout=SUBMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SchedulerUnavailableError(f"sbatch cannot be used: {error}") from error
    match = _JOB_ID.fullmatch(done.stdout.strip())
    if done.returncode or match is None:
        message = " ".join((done.stderr or done.stdout).split())[:500]
        raise SchedulerError(f"Slurm did not accept the job of a flow: {message}")
    return FlowPlace(flow_run=flow_run, kind="slurm", host=socket.gethostname(), job_id=match[1])


def is_running(place: FlowPlace) -> bool:
    """Return whether the flow's process or job may still run.

    Raises `SchedulerUnavailableError` if Slurm does not say.
    """
    if place.kind == "process":
        return is_alive(place.process)
    line = slurm_client.listed_jobs().get(place.job_id) or slurm_client.show_job(place.job_id)
    state = translate(line.state) if line is not None and line.name == JOB_NAME else None
    return state is not None and not state.is_terminal


def end(place: FlowPlace) -> None:
    """Ask the flow to end: SIGTERM to its process, or `scancel`. Raises `SchedulerError`."""
    if place.kind == "slurm":
        # With `--full`, also the flow itself gets the signal, not only the script's shell.
        chosen = (f"--name={JOB_NAME}", slurm_client.checked_id(place.job_id))
        slurm_client.call(["scancel", "--full", "--signal=TERM", *chosen])
    elif is_alive(place.process):
        os.kill(place.pid, signal.SIGTERM)
