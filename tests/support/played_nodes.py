"""Jobs of several nodes on this machine: an agent for each, started as Slurm starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from tests.process.local_runs import LocalRun, processes_of
from tests.support.agent_ranks import flusher_of
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.documents import write_document
from holdfast.workers.runs import run_folders
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.request import build_request

FIRST_JOB = 77
# The commands of Slurm, which fail, because no controller answers.
COMMANDS = ("scontrol", "squeue", "sacct", "scancel", "sinfo")


class PlayedJob:
    """An attempt of a run on nodes n0, n1, …; ends all its processes when it is left.

    Each node's processes are started by `enter(node)`, a command before theirs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        spares: int = 0,
        enter: Callable[[int], list[str]] = lambda node: [],
        **settings: Any,
    ) -> None:
        resources = {"executor": "slurm", "nodes": nodes, "gpus_per_node": 1, "gres": "none"}
        if spares:
            resources["spare_nodes"] = spares
        self.run = LocalRun(folder / "root", resources=resources, **settings)
        self._nodes, self._enter = (nodes, spares), enter
        self._commands = folder / "bin"
        self._commands.mkdir()
        for name in COMMANDS:
            (self._commands / name).write_text("#!/bin/sh\necho 'no controller' >&2\nexit 1\n")
            (self._commands / name).chmod(0o755)
        self.attempt, self.agents = self._submit(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(30)
        for process in processes_of(self.run.paths):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes_on(self, node: int) -> list[psutil.Process]:
        """The processes of a node, its agent first."""
        found = []
        for process in processes_of(self.run.paths):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == f"n{node}":
                    found.append(process)
        agent = self.agents[node].pid
        return sorted(found, key=lambda process: process.pid != agent)

    def start_attempt(self, number: int) -> None:
        """Start the next attempt on the same nodes. All agents of the one before have ended."""
        self.attempt, self.agents = self._submit(number)

    def freeze(self, node: int) -> None:
        """Stop everything on a node. Its kernel still takes what others send."""
        for process in self.processes_on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def flusher_on(self, node: int) -> psutil.Process:
        """The flusher of a node."""
        return psutil.Process(flusher_of(self.agents[node].pid))

    def kill_node(self, node: int) -> None:
        """Kill everything on a node, as the loss of its power does."""
        for process in self.processes_on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.agents[node].wait(30)

    def wait(self, node: int, wait_s: float = 120.0) -> int:
        """Wait for a node's agent; return its exit status."""
        return self.agents[node].wait(wait_s)

    def _submit(self, number: int) -> tuple[AttemptPaths, list[subprocess.Popen[bytes]]]:
        """Reserve an attempt, and start its agents."""
        attempt, (nodes, spares) = reserve(self.run.paths, number), self._nodes
        assert attempt is not None
        record = run_folders.read_record(self.run.paths)
        request = build_request(record, self.run.spec, attempt=number, gpus=nodes, reason="a test")
        write_document(attempt.request, request)
        return attempt, [self._start(attempt, node) for node in range(nodes + spares)]

    def _start(self, attempt: AttemptPaths, node: int) -> subprocess.Popen[bytes]:
        variables = {
            "SLURM_PROCID": str(node),
            "SLURM_JOB_ID": str(FIRST_JOB + attempt.number - 1),
            "SLURMD_NODENAME": f"n{node}",
            "PATH": f"{self._commands}:{os.environ['PATH']}",
        }
        agent = [sys.executable, "-m", "holdfast.workers.agent.main", str(attempt.request)]
        with open(attempt.directory / f"agent-{node}.log", "wb") as log:
            return subprocess.Popen(
                [*self._enter(node), *agent],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def manifest_at(run: LocalRun, step: int) -> Manifest:
    """Return the manifest of the run's only checkpoint of a step."""
    manifests = [read_manifest(folder) for folder in sorted(run.paths.checkpoints.glob("step-*"))]
    (found,) = [one for one in manifests if one is not None and one.step == step]
    return found


def tensors_at(run: LocalRun, step: int) -> dict[str, torch.Tensor]:
    """Return every tensor of the run's checkpoint of a step, by name."""
    folder = run.paths.checkpoint(manifest_at(run, step).name)
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=folder, no_dist=True)
    return state
