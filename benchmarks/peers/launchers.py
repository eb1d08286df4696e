"""How each peer is started on this machine, and which process gets a signal for its job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Claim, read_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs.run_folders import create_run

from .faults import Job

PROGRAMS: Final = Path(__file__).parent / "programs"
RANKS: Final = 2
RESTARTS_MAX: Final = 10
GRACE_S: Final = 20
PORT_S_MAX: Final = 60.0
END_S_MAX: Final = 10.0
# This variable identifies all processes of a comparison, in any session.
MARK: Final = "PEERS_JOB"


class Unfinished(Exception):
    """The job makes no progress. The message has its last step."""


@dataclass
class Launcher:
    """One peer's job in `folder`, run with `python`. It may be started several times."""

    peer: str
    python: Path
    job: Job
    folder: Path
    more: Mapping[str, str] = field(default_factory=dict)
    where: str = "This machine"
    # How long a living job may take no step after a fault.
    comeback_s_max: float = 90.0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the job, as a person would who finds that it has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings.write_text(json.dumps(self.job.in_folder(str(self.folder))))
        self.process = self._start(self.command())

    @property
    def settings(self) -> Path:
        """The file that the program reads."""
        return self.folder / "job.json"

    def command(self) -> list[str]:
        """Return the launcher's command line, and start what the peer needs besides it."""
        workers = [f"--nproc-per-node={RANKS}", f"--max-restarts={RESTARTS_MAX}"]
        program = str(PROGRAMS / "with_torch.py")
        match self.peer:
            case "torchrun":
                module = [str(self.python), "-m", "torch.distributed.run"]
                return [*module, "--standalone", *workers, program]
            case "nvrx":
                launcher = [str(self.python.parent / "ft_launcher"), "--standalone"]
                return [*launcher, "--ignore-missing-fault-tol-cfg", *workers, program]
            case "dlrover":
                self._start_dlrover_master()
                module = [str(self.python), "-m", "dlrover.trainer.torch.main", "--nnodes=1"]
                return [*module, *workers, str(PROGRAMS / "with_dlrover.py")]
            case _:
                module = [str(self.python), "-m", "holdfast.flows.detached"]
                return [*module, str(self._holdfast_run().directory)]

    def resources(self) -> dict[str, Any]:
        """Return the resources that Holdfast's run requests."""
        return {"gpus_per_node": RANKS}

    def has_ended(self) -> bool:
        """Return True if no process is left that could restart the job."""
        return self.process is None or self.process.poll() is not None

    def terminate_job(self) -> None:
        """Send SIGTERM to the process that holds the job: the launcher, or Holdfast's agent."""
        pid = self.process.pid if self.process else 0
        if self.peer == "holdfast":
            paths = self._holdfast_run()
            claim = read_document(Claim, paths.list_attempts()[-1].claim)
            pid = claim.pid if claim else pid
        os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill all processes of this job. Shared memory that a peer leaves stays."""
        mine = [one for one in psutil.process_iter() if self._is_ours(one)]
        for one in mine:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(mine, timeout=END_S_MAX)
        if self.process is not None:
            self.process.wait(END_S_MAX)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all started processes."""
        own = {MARK: str(self.settings), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        own["HOLDFAST_HOME"] = str(self.folder / "home")
        return {**os.environ, **own, **self.more}

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "output.log", "ab") as log:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == str(self.settings)
        except psutil.Error:
            return False

    def _start_dlrover_master(self) -> None:
        """Start a master as `--standalone` would, because `--standalone` fails with this torch."""
        name, address = f"peers-{os.getpid()}", self.more.get("DLROVER_MASTER_ADDR", "")
        if not address or not _answers(address):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            module = [str(self.python), "-u", "-m", "dlrover.python.master.main"]
            where = ["--port", address.split(":")[1], "--node_num", "1"]
            self.more = {
                **self.more,
                "ELASTIC_JOB_NAME": name,
                "DLROVER_MASTER_ADDR": address,
            }
            self._start([*module, *where, "--job_name", name, "--platform", "local"])
            ends_at = time.monotonic() + PORT_S_MAX
            while not _answers(address) and time.monotonic() < ends_at:
                time.sleep(0.1)

    def _holdfast_run(self) -> RunPaths:
        paths = RunPaths(self.folder / "runs" / "peers")
        if not paths.spec.exists():
            spec = RunSpec.model_validate(
                holdfast_spec(self.job, self.folder, self.environment, self.resources())
            )
            paths.directory.parent.mkdir(parents=True, exist_ok=True)
            create_run(spec, paths.directory.parent, created_by="peers")
        return paths


def holdfast_spec(
    job: Job, folder: Path, environment: Mapping[str, str], resources: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the run's spec. All other keys have their defaults."""
    return {
        "name": "peers",
        "command": [str(PROGRAMS / "with_holdfast.py")],
        "environment": {name: environment[name] for name in (MARK, "OMP_NUM_THREADS")},
        "launch": {"working_directory": str(folder)},
        "resources": resources,
        "checkpoint": {"interval": job.save_steps, "snapshots": job.snapshot_steps},
        "supervision": {
            "poll_s": 1.0,
            "restarts_in_place": RESTARTS_MAX,
            "grace_s": GRACE_S,
            "notices": "off",
        },
    }


def _answers(address: str) -> bool:
    host, port = address.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False
