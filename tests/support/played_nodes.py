"""Jobs of several nodes on this machine: an agent for each, started as Slurm starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from tests.process.local_runs import LocalRun, processes_of
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.attempt import write_document
from holdfast.workers.runs import run_folders
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.request import build_request

# The commands of Slurm, which fail, because no controller answers.
COMMANDS = ("scontrol", "squeue", "sacct", "scancel", "sinfo")


class PlayedJob:
    """The first attempt of a run on nodes n0, n1, …; ends all its processes when it is left."""

    def __init__(self, folder: Path, *, nodes: int, spares: int = 0, **settings: Any) -> None:
        resources = {"executor": "slurm", "nodes": nodes, "gpus_per_node": 1, "gres": "none"}
        if spares:
            resources["spare_nodes"] = spares
        self.run = LocalRun(folder / "root", resources=resources, **settings)
        found = reserve(self.run.paths, 1)
        assert found is not None
        self.attempt: AttemptPaths = found
        record = run_folders.read_record(self.run.paths)
        request = build_request(record, self.run.spec, attempt=1, gpus=nodes, reason="a test")
        write_document(self.attempt.request, request)
        self._commands = folder / "bin"
        self._commands.mkdir()
        for name in COMMANDS:
            (self._commands / name).write_text("#!/bin/sh\necho 'no controller' >&2\nexit 1\n")
            (self._commands / name).chmod(0o755)
        self.agents = [self._start(node) for node in range(nodes + spares)]

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

    def kill_node(self, node: int) -> None:
        """Kill everything on a node, as the loss of its power does."""
        for process in self.processes_on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.agents[node].wait(30)

    def wait(self, node: int, wait_s: float = 120.0) -> int:
        """Wait for a node's agent; return its exit status."""
        return self.agents[node].wait(wait_s)

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        variables = {
            "SLURM_PROCID": str(node),
            "SLURM_JOB_ID": "77",
            "SLURMD_NODENAME": f"n{node}",
            "PATH": f"{self._commands}:{os.environ['PATH']}",
        }
        with open(self.attempt.directory / f"agent-{node}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast.workers.agent.main", str(self.attempt.request)],
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
