"""The nodes of a run whose agents run on this machine, their loss, and what should follow."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from typing import Final

import psutil

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Request, read_document
from holdfast.contracts.records.history import load_history
from holdfast.workers.decisions.drained_nodes import NodePlan, plan_nodes
from holdfast.workers.nodes.processes import descendants
from holdfast.workers.runs.feasibility import Feasibility
from holdfast_bench.live_drills.process_list import marked_processes
from holdfast_bench.live_drills.target_run import TargetRun

# What Slurm, or a drill that plays it, calls the node of a process.
NODE_NAME: Final = "SLURMD_NODENAME"


def processes_on(paths: RunPaths, host: str) -> list[psutil.Process]:
    """Return the run's processes on node `host`, as far as this machine has them."""
    found: dict[int, psutil.Process] = {}
    for one in marked_processes(paths):
        with contextlib.suppress(psutil.Error):
            if one.process.environ().get(NODE_NAME) == host:
                found |= {p.pid: p for p in (one.process, *descendants(one.process))}
    return list(found.values())


def freeze(processes: Iterable[psutil.Process]) -> None:
    """Suspend processes."""
    _send(processes, signal.SIGSTOP)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes. First suspend them all, so that none notices the end of the others."""
    found = list(processes)
    freeze(found)
    _send(found, signal.SIGKILL)


def plan_without(target: TargetRun, host: str) -> NodePlan:
    """Return how the newest attempt should continue without node `host`."""
    request = read_document(Request, target.attempt.request)
    if request is None or request.nodes == 1 or request.program.is_watched:
        return NodePlan(reason=f"the attempt has no other node than {host}")
    number = target.attempt.number
    started = [e for e in target.events_of(EventKind.LAUNCH_STARTED) if e.data["attempt"] == number]
    gone = {
        event.data.get("node")
        for event in target.events_of(EventKind.NODE_LOST)
        if event.data.get("attempt") == number
    }
    nodes = int(started[-1].data.get("nodes") or request.nodes) if started else request.nodes
    history = load_history(target.paths)
    return plan_nodes(
        history.spec,
        nodes=nodes,
        lost=[host],
        spares=request.nodes + request.spare_nodes - len(gone) - nodes,
        restarts_max=request.supervision.restarts_in_place,
        fits=Feasibility.of(history).allows,
    )


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
