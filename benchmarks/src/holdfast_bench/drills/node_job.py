"""A job of several nodes on this machine: an agent for each node, started as Slurm starts it.

The agents, flushers, torchruns and ranks are real. There is no controller and no supervisor: the
commands of Slurm fail, as while its controller is away. So the job has one attempt, which must
continue in place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.records.attempt import newest_term, write_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.run_folders import create_run, read_record
from holdfast_bench.live_drills.lost_nodes import kill_all, processes_on

AGENT: Final = "holdfast.workers.agent.main"
COMMANDS: Final = ("scontrol", "squeue", "sacct", "scancel", "sinfo")
JOB_ID: Final = "1"
KILL_WAIT_S: Final = 30.0
END_S: Final = 120.0


class NodeJob:
    """The only attempt of a new run under `root`, on nodes n0, n1, …, with the spec's spare ones.

    All its processes are killed when the `with` block is left.
    """

    def __init__(
        self, spec: RunSpec, root: Path, folder: Path, environment: Mapping[str, str]
    ) -> None:
        """`folder` is for the commands and the agents' output."""
        self.spec = spec
        self.paths = create_run(spec, root, created_by="drill")
        self.attempt = self._reserve()
        self.folder, self._environment = folder, environment
        self._commands = _failing_commands(Path(tempfile.mkdtemp(prefix="bin-", dir=folder)))
        self._agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        count = self.spec.resources.nodes + self.spec.resources.spare_nodes
        self._agents = [self._start(node) for node in range(count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node, agent in enumerate(self._agents):
            if agent.poll() is None:
                self.kill(node)

    @property
    def lead(self) -> int:
        """The number of the node whose agent leads the attempt."""
        term = newest_term(self.attempt)
        return 0 if term is None else term.node

    @property
    def owners(self) -> list[psutil.Process]:
        """The agents that still run."""
        return [psutil.Process(one.pid) for one in self._agents if one.poll() is None]

    def processes_on(self, node: int) -> list[psutil.Process]:
        """Return all processes of a node, its agent first."""
        agent = self._agents[node]
        below = processes_on(self.paths, _name(node))
        above = [psutil.Process(agent.pid)] if agent.poll() is None else []
        return [*above, *(one for one in below if one.pid != agent.pid)]

    def kill(self, *nodes: int) -> int:
        """Kill everything on some nodes at the same time; return the number of processes."""
        found = [process for node in nodes for process in self.processes_on(node)]
        kill_all(found)
        for node in nodes:
            self._agents[node].wait(KILL_WAIT_S)
        return len(found)

    def stop(self) -> None:
        """Stop the attempt as Slurm does at a preemption. Raises `ServiceError` if it stays."""
        self._agents[self.lead].send_signal(signal.SIGTERM)
        for node, agent in enumerate(self._agents):
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                text = f"{self.paths.name}: the agent of node {node} had not ended within "
                raise ServiceError(f"{text}{END_S:.0f} s") from None

    def _reserve(self) -> AttemptPaths:
        attempt, resources = reserve(self.paths, 1), self.spec.resources
        assert attempt is not None, "the run is new"
        gpus = resources.nodes * resources.size_per_node
        record = read_record(self.paths)
        request = build_request(record, self.spec, attempt=1, gpus=gpus, reason="a drill")
        write_document(attempt.request, request)
        return attempt

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        variables = {
            "SLURM_PROCID": str(node),
            "SLURM_JOB_ID": JOB_ID,
            "SLURMD_NODENAME": _name(node),
            "PATH": f"{self._commands}:{os.environ['PATH']}",
        }
        with open(self.folder / f"agent-{node}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", AGENT, str(self.attempt.request)],
                env={**self._environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _name(node: int) -> str:
    return f"n{node}"


def _failing_commands(folder: Path) -> Path:
    for name in COMMANDS:
        path = folder / name
        path.write_text("#!/bin/sh\necho 'no controller' >&2\nexit 1\n")
        with contextlib.suppress(OSError):
            path.chmod(0o755)
    return folder
