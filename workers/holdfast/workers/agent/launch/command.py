"""The command and the environment of one launch on one node, as pure functions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.contracts import environment
from holdfast.contracts.records.documents import Request
from holdfast.contracts.spec.written import OF_PROGRAM, keys_of
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.interface import interface_environment
from holdfast.workers.agent.launch.loaded_torchrun import TORCHRUN
from holdfast.workers.nodes.setup_lines import after_setup

RANK_START: Final = "holdfast.trainer.rank_start"
STARTER: Final = "holdfast.workers.agent.program_start"
# Where the output of a command without torchrun is, as torchrun would have it for its first rank.
COMMAND_LOGS: Final = "command/attempt_0/0"
MONITOR_INTERVAL_S: Final = 0.1


class Handles:
    """The addresses of the node's status table and flusher, for the ranks."""

    def __init__(self, status_table: int, flusher: str) -> None:
        self.status_table = f"/proc/{os.getpid()}/fd/{status_table}"
        self.flusher = flusher


def log_directory(context: AgentContext, launch: int) -> Path:
    """Return the folder of one launch's logs on this node."""
    return context.attempt.rank_log(context.node, launch, 0).parent


def build_command(
    request: Request,
    *,
    node: int,
    launch: int,
    address: str,
    port: int,
    logs: Path,
) -> list[str]:
    """Return torchrun's command line for one node, without side effects.

    The rendezvous is static, with a port that node 0's agent picks for each launch, so that no
    process of an earlier launch can answer there.
    """
    starter = [sys.executable, "-m", STARTER, request.program.signal]
    if request.program.launcher == "none":
        setup = after_setup("launch.node_setup", request.launch.node_setup)
        return [*setup, *starter, str(logs / COMMAND_LOGS), *request.command]
    words = ["--module", RANK_START, *request.command]
    if request.program.is_watched:
        python = [sys.executable, "-u", "-m", RANK_START]
        words = ["--no-python", *starter, "", *python, *request.command]
    return [
        *after_setup("launch.node_setup", request.launch.node_setup),
        sys.executable,
        "-m",
        TORCHRUN,
        f"--nnodes={request.nodes}",
        f"--nproc-per-node={request.ranks_per_node}",
        f"--node-rank={node}",
        "--rdzv-backend=static",
        f"--rdzv-id={request.run_uid[:8]}.{request.attempt}.{launch}",
        f"--master-addr={address}",
        f"--master-port={port}",
        "--max-restarts=0",
        f"--monitor-interval={MONITOR_INTERVAL_S}",
        "--signals-to-handle=SIGQUIT",
        f"--log-dir={logs}",
        "--redirects=3",
        *request.launch.torchrun,
        *words,
    ]


def build_environment(
    context: AgentContext,
    launch: int,
    handles: Handles,
    inherited: Mapping[str, str],
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of torchrun and its ranks; `given` is the spec's part, resolved."""
    request = context.request
    own = {
        environment.ROOT: str(context.run.directory.parent),
        environment.RUN_DIRECTORY: str(context.run.directory),
        environment.ATTEMPT: str(request.attempt),
        environment.LAUNCH: str(launch),
        environment.NODE: str(context.node),
        environment.NODES: str(context.nodes),
        environment.RANK_STATUS: handles.status_table,
        environment.FLUSHER: handles.flusher,
        environment.CONFIG: json.dumps(request.config),
        **_written(request),
        **request.tiers.to_environment(),
        environment.NUMERICS: request.supervision.numerics.model_dump_json(),
        environment.FLUSH_TIMEOUT: str(request.supervision.flush_timeout_s),
        **_write_limit(request),
        **_doubling_steps(request),
    }
    network = interface_environment(request.launch.network_interface)
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(("TORCHELASTIC_", "HOLDFAST_")) or name == environment.S3_ENDPOINT
    }
    return {"OMP_NUM_THREADS": "1", **kept, **_threads(request), **network, **given, **own}


def _write_limit(request: Request) -> dict[str, str]:
    """Return the limit for the flusher, which the ranks lift while training waits."""
    limit = request.checkpoint.write_limit_bytes
    return {} if limit is None else {environment.CHECKPOINT_WRITE_LIMIT: str(limit)}


def _doubling_steps(request: Request) -> dict[str, str]:
    """Return the first of the steps at which the ranks also save."""
    first = request.checkpoint.doubling_steps
    return {} if first is None else {environment.CHECKPOINT_DOUBLING_STEPS: str(first)}


def place_environment(context: AgentContext, address: str, port: int) -> dict[str, str]:
    """Return what the ranks of a node need to know if its torchrun runs without the others."""
    request = context.request
    size = str(request.nodes * request.ranks_per_node)
    return {
        "first_rank": str(context.node * request.ranks_per_node),
        "WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": str(context.node),
        "GROUP_WORLD_SIZE": str(request.nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        environment.NODE: str(context.node),
        environment.NODES: str(context.nodes),
    }


def _threads(request: Request) -> dict[str, str]:
    """Return the threads of each rank, if the spec says how many CPU cores it has."""
    cores = request.resources.cpus_per_gpu
    if cores is None:
        return {}
    per_node = cores * (request.gpus_per_node or request.ranks_per_node)
    return {"OMP_NUM_THREADS": str(max(1, per_node // max(1, request.ranks_per_node)))}


def _written(request: Request) -> dict[str, str]:
    """Return the variables of the written keys that the program can give too, and the sources."""
    sources = request.sources_of_checkpoint
    values = dict(keys_of(request.checkpoint, written=False, where="checkpoint."))
    directory, neighbour = request.checkpoint.staging_directory, request.checkpoint.neighbour
    return {
        environment.SOURCES: json.dumps(sources),
        **{name: str(values[key]) for key, name in OF_PROGRAM.items() if key in sources},
        **({environment.STAGING_DIRECTORY: directory} if directory else {}),
        **({environment.CHECKPOINT_NEIGHBOUR: str(neighbour)} if neighbour else {}),
    }


def meeting_environment(context: AgentContext, address: str, port: int) -> dict[str, str]:
    """Return the variables by which a command without torchrun finds the other nodes.

    Its output goes to a file. Python writes each line there immediately, as torchrun's ranks do.
    """
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "NNODES": str(context.nodes),
        "NODE_RANK": str(context.node),
    }
