"""The faults that act on processes. Each one returns a description of what it did.

A fault returns when it has been injected; `runner` watches the recovery. Faults of the disk, the
index, servers and files are in `outages`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import psutil

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import ServiceError
from holdfast.flows.start import start_here
from holdfast.workers.nodes.heartbeats import read_heartbeats
from holdfast.workers.nodes.processes import descendants
from holdfast_bench.live_drills.kinds import FREE_S, HELD_S, SUSPENDED_S, Recovery
from holdfast_bench.live_drills.lost_nodes import kill_all, plan_without, processes_on
from holdfast_bench.live_drills.process_list import place_of
from holdfast_bench.live_drills.target_run import TargetRun

FLOW_GAP_STEPS: Final = 10
FLOW_GAP_S_MAX: Final = 2.5
HANG_TRIES_MAX: Final = 30
# Longer than the time until a heartbeat has the phases of waiting ranks.
HANG_LOOK_S: Final = 1.0
# A rank is reported after three slow windows of ten seconds. The rest is for a busy machine.
STRAGGLER_S_MAX: Final = 150.0
STRAGGLER_AGAIN_S: Final = 5.0
LOOKS_EVERY: Final = 10
# Free address space: enough for small allocations, too little for those of a step.
MEMORY_LEFT_BYTES: Final = 8 << 20
MEMORY_S_MAX: Final = 120.0
MEMORY_PAUSE_S: Final = 0.1


@dataclass
class FaultContext:
    """The run and the source of random numbers.

    A fault sets `recovery` if the expected recovery differs from that of its kind, and `acted_at`
    (Unix seconds) if it acts after a wait.
    """

    # The default limit of silence of a phase, and the time to confirm a hang.
    hang_s_max: ClassVar[float] = 1200.0

    target: TargetRun
    chance: random.Random
    recovery: Recovery | None = None
    acted_at: float = 0.0

    def start_flow(self) -> None:
        """Start another supervisor for the run on this machine."""
        start_here(self.target.paths)

    def reap_flow(self) -> None:
        """Forget the supervisor, which was killed. A live run has it from another process."""


def signal_agent(number: signal.Signals) -> Callable[[FaultContext], str]:
    """Return a fault that sends the agent one signal."""

    def act(context: FaultContext) -> str:
        agent = context.target.agent()
        agent.send_signal(number)
        return f"{number.name} to the agent, process {agent.pid}"

    return act


def kill_rank(context: FaultContext) -> str:
    rank = context.chance.choice(list(context.target.ranks().values()))
    rank.kill()
    return f"SIGKILL to a rank, process {rank.pid}"


def kill_torchrun(context: FaultContext) -> str:
    torchrun = context.target.torchrun()
    torchrun.kill()
    return f"SIGKILL to torchrun, process {torchrun.pid}"


def kill_agent(context: FaultContext) -> str:
    agent = context.target.agent()
    _expect_loss_of_lead(context)
    agent.kill()
    return f"SIGKILL to the agent, process {agent.pid}"


def _expect_loss_of_lead(context: FaultContext) -> None:
    """An attempt of several nodes may continue in place without the node that leads it."""
    if plan_without(context.target, context.target.lead_host()).way:
        context.recovery = Recovery.IN_PLACE


def kill_flusher(context: FaultContext) -> str:
    flusher = context.target.flusher()
    flusher.kill()
    return f"SIGKILL to the flusher, process {flusher.pid}"


def lose_node(context: FaultContext) -> str:
    """Suspend every process first, so that none of them notices the end of the others."""
    agent, controller = context.target.agent(), context.target.controller()
    above = [controller] if controller else []
    tree = {p.pid: p for p in [*above, agent, *descendants(agent)]}
    _expect_loss_of_lead(context)
    kill_all(tree.values())
    return f"SIGKILL to all {len(tree)} processes of the attempt"


def lose_one_of_several(way: str) -> Callable[[FaultContext], str]:
    """Return a fault that ends a node of a Slurm run, which then continues in this `way`."""

    def act(context: FaultContext) -> str:
        target = context.target
        beats = read_heartbeats(target.attempt)
        host = context.chance.choice(sorted({beat.host for beat in beats}))
        plan = plan_without(target, host)
        if plan.way != way:
            raise ServiceError(
                f"{target.paths.name} would not continue by {way}: {plan.way or plan.reason}"
            )
        found = processes_on(target.paths, host)
        if not found:
            raise ServiceError(f"{target.paths.name}: {host} has no process on this machine")
        context.acted_at = time.time()
        kill_all(found)
        return f"SIGKILL to all {len(found)} processes of the run on {host}; {plan.reason}"

    return act


def suspend_all(context: FaultContext) -> str:
    """Suspend the attempt and its supervisor. Nothing is lost and nothing starts a second time."""
    target = context.target
    agent, controller, flow = target.agent(), target.controller(), target.flow()
    above = [p for p in (flow, controller) if p is not None]
    tree = {p.pid: p for p in [*above, agent, *descendants(agent)]}
    with contextlib.ExitStack() as suspended:
        for process in tree.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                suspended.enter_context(_suspended(process))
        time.sleep(SUSPENDED_S)
    return f"SIGSTOP to all {len(tree)} processes of the run, SIGCONT after {SUSPENDED_S:.0f} s"


def kill_flow(context: FaultContext) -> str:
    """Kill the supervisor. In half of the cases, stop the agent first, to interrupt a relaunch."""
    target = context.target
    flow = target.flow()
    if flow is None:
        raise ServiceError(f"{target.paths.name}: its supervisor is not a process of this machine")
    step = target.newest.step if target.newest else 0
    if context.chance.random() < 0.5:
        context.recovery = Recovery.NEW_ATTEMPT
        target.agent().send_signal(signal.SIGTERM)
        attempt = target.attempt
        target.wait_for("the attempt's end", lambda: attempt.outcome.exists() or None)
        time.sleep(context.chance.uniform(0.0, FLOW_GAP_S_MAX))
        text = f"SIGTERM to the agent, then SIGKILL to the supervisor, process {flow.pid}"
        _kill_flow(context, flow)
    else:
        _kill_flow(context, flow)
        text = f"SIGKILL to the supervisor, process {flow.pid}; {FLOW_GAP_STEPS} steps without one"
        target.wait_for(
            "training without a supervisor",
            lambda: target.newest and target.newest.step >= step + FLOW_GAP_STEPS,
        )
    since = time.time()
    context.start_flow()
    target.wait_for("a new supervisor", lambda: target.events_of(EventKind.SUPERVISED, since))
    return text


def _kill_flow(context: FaultContext, flow: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        flow.kill()
    context.reap_flow()


def hang_rank(context: FaultContext) -> str:
    """Suspend one rank, so that its peers wait for it, until the agent confirms a hang."""
    target, since = context.target, time.time()
    rank = context.chance.choice(list(target.ranks().values()))
    with contextlib.ExitStack() as failed:
        failed.callback(_continue, rank)
        _stop_in_training(context, rank)
        confirmed = target.wait_for(
            "the confirmation of a hang",
            lambda: target.events_of(EventKind.HANG_CONFIRMED, since),
            context.hang_s_max,
        )
        # The agent kills the rank. It must stay suspended until then.
        failed.pop_all()
    return f"SIGSTOP to a rank, process {rank.pid}; {confirmed[0].data.get('finding')}"


def _stop_in_training(context: FaultContext, rank: psutil.Process) -> None:
    """Suspend a rank while all ranks train: the limit of silence of a save is much longer."""
    for _ in range(HANG_TRIES_MAX):
        context.acted_at = time.time()
        rank.suspend()
        time.sleep(HANG_LOOK_S)
        beats = read_heartbeats(context.target.attempt)
        if {one.phase for beat in beats for one in beat.ranks} == {"train"}:
            return
        rank.resume()
        time.sleep(context.chance.uniform(0.0, HANG_LOOK_S))
    raise ServiceError(f"{context.target.paths.name}: its ranks were never all training")


def hold_up(context: FaultContext) -> str:
    """Suspend and resume one rank repeatedly, until the agent reports it as a straggler.

    A rank is reported once per launch. One that was reported before is held up only briefly.
    """
    target, since = context.target, time.time()
    before = {line.data.get("rank") for line in _stragglers(context, 0.0)}
    number, rank = context.chance.choice(sorted(target.ranks().items()))
    wait_s = STRAGGLER_AGAIN_S if number in before else STRAGGLER_S_MAX
    give_up, rounds = time.monotonic() + wait_s, 0
    reports: list[Event] = []
    try:
        while time.monotonic() < give_up and not reports:
            rank.suspend()
            time.sleep(HELD_S)
            rank.resume()
            time.sleep(FREE_S)
            rounds += 1
            if rounds % LOOKS_EVERY == 0:
                target.look()
                reports = _stragglers(context, since)
    finally:
        _continue(rank)
    text = f"process {rank.pid} held up {rounds} times"
    if number in before:
        return f"{text}; rank {number} was already reported as slow"
    if [line.data.get("rank") for line in reports] != [number]:
        raise ServiceError(f"{text}: expected a report of rank {number}, got {reports or 'none'}")
    return f"{text}; rank {number} was reported as slow"


def _stragglers(context: FaultContext, since: float) -> list[Event]:
    """Return the reports of slow ranks in the newest launch."""
    place = context.target.started_place()
    lines = context.target.events_of(EventKind.STRAGGLER, since)
    return [line for line in lines if place_of(line) == place]


def _continue(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def refuse_memory(context: FaultContext) -> str:
    """Lower one rank's limit of address space to little more than its current use, until it fails.

    The limit is lowered repeatedly, because one measurement may include the memory of a step. The
    time of the fault is when the rank was last seen alive.
    """
    rank = context.chance.choice(list(context.target.ranks().values()))
    former = rank.rlimit(psutil.RLIMIT_AS)
    limit, give_up = rank.memory_info().vms + MEMORY_LEFT_BYTES, time.monotonic() + MEMORY_S_MAX
    while time.monotonic() < give_up:
        try:
            looked_at = time.time()
            # A zombie has no memory.
            vms_bytes = rank.memory_info().vms
            is_gone = vms_bytes == 0
            if not is_gone:
                context.acted_at = looked_at
                limit = min(limit, vms_bytes + MEMORY_LEFT_BYTES)
                rank.rlimit(psutil.RLIMIT_AS, (limit, former[1]))
        except psutil.NoSuchProcess:
            is_gone = True
        if is_gone:
            return f"process {rank.pid} exceeded its limit of {limit >> 20} MiB of address space"
        time.sleep(MEMORY_PAUSE_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.rlimit(psutil.RLIMIT_AS, former)
    raise ServiceError(
        f"process {rank.pid} did not exceed its memory limit within {MEMORY_S_MAX:.0f} s"
    )


def corrupt_checkpoint(context: FaultContext) -> str:
    """Flip a byte of the newest checkpoint between two attempts; restore it after the resume."""
    target = context.target
    flow, attempt = target.flow(), target.attempt
    if flow is None:
        raise ServiceError(f"{target.paths.name}: its supervisor is not a process of this machine")
    with _suspended(flow):
        target.agent().send_signal(signal.SIGTERM)
        target.wait_for("the attempt's end", lambda: attempt.outcome.exists() or None)
        name, path = _newest_file(target)
        at = context.chance.randrange(path.stat().st_size)
        _flip(path, at)
    try:
        since = time.time()
        resumed = target.wait_for("a resume", lambda: target.events_of(EventKind.RESUMED, since))
    finally:
        _flip(path, at)
    if not any(str(line).startswith(name) for line in resumed[0].data.get("skipped", ())):
        raise ServiceError(f"{name} was damaged but not skipped: {resumed[0].data}")
    return f"byte {at} of {name}/{path.name} flipped; the resume skipped the checkpoint"


@contextlib.contextmanager
def _suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        _continue(process)


def _newest_file(target: TargetRun) -> tuple[str, Path]:
    """Return the newest committed checkpoint's name and its largest file."""
    for directory in reversed(target.paths.list_checkpoints()):
        manifest = read_manifest(directory)
        if manifest is not None and CheckpointName.parse(directory.name):
            largest = max(manifest.files, key=lambda entry: entry.bytes)
            return directory.name, directory / largest.path
    raise ServiceError(f"{target.paths.name} has no committed checkpoint")


def _flip(path: Path, at: int) -> None:
    """Invert every bit of one byte. A second call restores it."""
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 0xFF]))
        stream.flush()
        os.fsync(stream.fileno())


FAULTS: Final[Mapping[str, Callable[[FaultContext], str]]] = {
    "sigterm": signal_agent(signal.SIGTERM),
    "sigusr2": signal_agent(signal.SIGUSR2),
    "kill-rank": kill_rank,
    "kill-torchrun": kill_torchrun,
    "kill-agent": kill_agent,
    "kill-flow": kill_flow,
    "kill-flusher": kill_flusher,
    "hang": hang_rank,
    "straggler": hold_up,
    "suspended": suspend_all,
    "node-loss": lose_node,
    "node-loss-spare": lose_one_of_several("spare"),
    "node-loss-shrink": lose_one_of_several("shrink"),
    "corrupt-checkpoint": corrupt_checkpoint,
    "oom": refuse_memory,
}
