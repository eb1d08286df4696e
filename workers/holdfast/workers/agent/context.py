"""The agent's attempt, node and job, from the request and the environment."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import AgreementError, NotFoundError
from holdfast.contracts.node import clocks
from holdfast.contracts.records.documents import Request, read_document
from holdfast.workers.agent.launch.loaded_torchrun import LoadedTorchrun
from holdfast.workers.schedulers import slurm_client, slurm_restarts

LAUNCHES_MAX: Final = 1000


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The place of a node in a launch: number `node` of `nodes`, under a term of the lead."""

    node: int
    nodes: int
    term: int = 1


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """One agent's place in the attempt. `started_at` is Unix seconds.

    `hosts` are the names of all nodes in order, or empty if the scheduler does not say. `switch` is
    the path of switches above this node, or '' if unknown. `restarts` is how often Slurm had
    restarted the job when this process began. `torchrun` loads for the first launch.
    """

    request: Request
    run: RunPaths
    attempt: AttemptPaths
    node: int
    nodes: int
    job_id: str
    host: str
    started_at: float
    hosts: tuple[str, ...] = ()
    switch: str = ""
    restarts: int = 0
    torchrun: LoadedTorchrun | None = None

    @property
    def is_lead(self) -> bool:
        """True on node 0, whose agent leads the others."""
        return self.node == 0

    @property
    def nodes_of_job(self) -> int:
        """The number of nodes with an agent: those of the launches, and the spare ones."""
        return self.nodes + self.request.spare_nodes

    def at(self, place: NodePlace) -> AgentContext:
        """Return the context of a launch in which this node has another place."""
        request = self.request.model_copy(update={"nodes": place.nodes})
        return replace(self, node=place.node, nodes=place.nodes, request=request)


def load_context(request_path: Path, environ: Mapping[str, str] | None = None) -> AgentContext:
    """Read the request and determine the node and job of this process.

    Raises `NotFoundError` if there is no request at `request_path`.
    """
    variables = os.environ if environ is None else environ
    request = read_document(Request, request_path)
    if request is None:
        raise NotFoundError(
            f"{request_path}: no request here; check that this node can see the run's root"
        )
    on_slurm = request.executor == "slurm"
    attempt = AttemptPaths(request_path.parent)
    return AgentContext(
        request=request,
        run=RunPaths(request_path.parent.parent.parent),
        attempt=attempt,
        node=int(variables.get("SLURM_PROCID", "0")) if on_slurm else 0,
        nodes=request.nodes,
        job_id=variables.get("SLURM_JOB_ID" if on_slurm else "SUBMITIT_LOCAL_JOB_ID", "")
        or str(os.getpid()),
        host=(variables.get("SLURMD_NODENAME") if on_slurm else None) or socket.gethostname(),
        started_at=clocks.now(),
        hosts=slurm_client.expand_hosts(variables.get("SLURM_STEP_NODELIST", ""))
        if on_slurm
        else (),
        switch=switch_of(variables) if on_slurm else "",
        restarts=slurm_restarts.restart_count(variables) if on_slurm else 0,
    )


def switch_of(variables: Mapping[str, str]) -> str:
    """Return the switches, or the block, of this node from Slurm's variables; '' if unknown.

    Slurm sets them where its topology is configured: `s0.s3.n17` for a node of switch `s3`.
    """
    kinds = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    if kinds[-1] != "node" or len(kinds) < 2 or len(names) < len(kinds):
        return ""
    # The name of a node may have dots.
    return ".".join(names[: len(kinds) - 1])


def take_number(attempt: AttemptPaths) -> int:
    """Return the next free launch number, reserved by exclusive creation of its folder."""
    for number in range(1, LAUNCHES_MAX + 1):
        folder = attempt.launch(number)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return number
    raise AgreementError(
        f"{LAUNCHES_MAX} launches in one attempt, the maximum; see the attempt's logs"
    )
