"""The faults: each acts from outside, on processes, and says what it did.

A fault returns when it has been done; how the run recovers is watched by `conduct`. Those of what
a run stands on are in `outages`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from holdfast.contracts.errors import ServiceError
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.spec import Numerics
from holdfast.flows.drills import outages
from holdfast.flows.drills.fault_context import FaultContext
from holdfast.flows.drills.kinds import FREE_S, HELD_S, Recovery
from holdfast.flows.drills.steps import place_of
from holdfast.flows.drills.target_run import TargetRun
from holdfast.workers.heartbeats import read_heartbeats
from holdfast.workers.processes import descendants

FLOW_GAP_STEPS: Final = 10
FLOW_GAP_S_MAX: Final = 2.5
# Of a live run a hang may be waited for until its phase's default limit, and then be proven.
HANG_S_MAX: Final = 1200.0
HANG_STAND_S_MAX: Final = 180.0
HANG_TRIES_MAX: Final = 30
# Longer than a heartbeat takes to tell the phases of ranks that wait.
HANG_LOOK_S: Final = 1.0
# A rank is named once it was slow for three windows of ten seconds; then some for the machine.
STRAGGLER_S_MAX: Final = 150.0
STRAGGLER_AGAIN_S: Final = 5.0
LOOKS_EVERY: Final = 10
# Above what a process has: room for small things, not for what a step asks for.
MEMORY_LEFT_BYTES: Final = 8 << 20
MEMORY_S_MAX: Final = 120.0
POISON_S_MAX: Final = 120.0
# A stand's runs have it but for what comes of such a loss.
POLICY: Final = Numerics()
AFTER_NAN: Final[Mapping[str, Recovery]] = {
    "stop": Recovery.NEW_ATTEMPT,
    "rollback": Recovery.IN_PLACE,
    "skip": Recovery.UNDISTURBED,
}
MEMORY_PAUSE_S: Final = 0.1


def signal_agent(number: signal.Signals) -> Callable[[FaultContext], str]:
    """A fault that sends the agent one signal."""

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
    agent.kill()
    return f"SIGKILL to the agent, process {agent.pid}"


def kill_flusher(context: FaultContext) -> str:
    flusher = context.target.flusher()
    flusher.kill()
    return f"SIGKILL to the flusher, process {flusher.pid}"


def lose_node(context: FaultContext) -> str:
    """Stop every process first, so that none of them notices the others' end."""
    agent, controller = context.target.agent(), context.target.controller()
    above = [controller] if controller else []
    tree = {p.pid: p for p in [*above, agent, *descendants(agent)]}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in tree.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    return f"SIGKILL to all {len(tree)} processes of the attempt"


def kill_flow(context: FaultContext) -> str:
    """Half of the times the agent is asked to stop before, so that a relaunch is cut short."""
    target = context.target
    flow = target.flow()
    if flow is None:
        raise ServiceError(f"{target.paths.name}: no flow that supervises it lives here")
    step = target.newest.step if target.newest else 0
    if context.chance.random() < 0.5:
        context.recovery = Recovery.NEW_ATTEMPT
        target.agent().send_signal(signal.SIGTERM)
        attempt = target.attempt
        target.wait_for("the attempt's end", lambda: attempt.outcome.exists() or None)
        time.sleep(context.chance.uniform(0.0, FLOW_GAP_S_MAX))
        words = f"SIGTERM to the agent, then SIGKILL to the flow, process {flow.pid}"
        _kill_flow(context, flow)
    else:
        _kill_flow(context, flow)
        words = f"SIGKILL to the flow, process {flow.pid}; {FLOW_GAP_STEPS} steps without one"
        target.wait_for(
            "training without a flow",
            lambda: target.newest and target.newest.step >= step + FLOW_GAP_STEPS,
        )
    since = time.time()
    context.start_flow()
    target.wait_for("another flow", lambda: target.events_of(EventKind.SUPERVISED, since))
    return words


def _kill_flow(context: FaultContext, flow: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        flow.kill()
    if context.testbed is not None:
        context.testbed.kill_flow()


def hang_rank(context: FaultContext) -> str:
    """Stop one rank, so that its peers wait for it, until the agent is sure of it."""
    target, since = context.target, time.time()
    rank = context.chance.choice(list(target.ranks().values()))
    with contextlib.ExitStack() as failed:
        failed.callback(_continue, rank)
        _stop_in_training(context, rank)
        confirmed = target.wait_for(
            "the end of a hang",
            lambda: target.events_of(EventKind.HANG_CONFIRMED, since),
            HANG_S_MAX if context.testbed is None else HANG_STAND_S_MAX,
        )
        # The agent kills it: what is stopped must not train on until then.
        failed.pop_all()
    return f"SIGSTOP to a rank, process {rank.pid}; {confirmed[0].data.get('finding')}"


def _stop_in_training(context: FaultContext, rank: psutil.Process) -> None:
    """Stop a rank while all of them train: a save may be silent for far longer than a step."""
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
    """Stop and continue one rank again and again: it is slow, and not hung, and is named.

    A rank is named once in a launch: one that was is held up for a short while only.
    """
    target, since = context.target, time.time()
    before = {line.data.get("rank") for line in _stragglers(context, 0.0)}
    number, rank = context.chance.choice(sorted(target.ranks().items()))
    wait_s = STRAGGLER_AGAIN_S if number in before else STRAGGLER_S_MAX
    give_up, rounds = time.monotonic() + wait_s, 0
    told: list[Event] = []
    try:
        while time.monotonic() < give_up and not told:
            rank.suspend()
            time.sleep(HELD_S)
            rank.resume()
            time.sleep(FREE_S)
            rounds += 1
            if rounds % LOOKS_EVERY == 0:
                target.look()
                told = _stragglers(context, since)
    finally:
        _continue(rank)
    words = f"process {rank.pid} held up {rounds} times"
    if number in before:
        return f"{words}; rank {number} is known as slow since before"
    if [line.data.get("rank") for line in told] != [number]:
        raise ServiceError(f"{words}: expected rank {number} to be named, got {told or 'nobody'}")
    return f"{words}; rank {number} was named"


def _stragglers(context: FaultContext, since: float) -> list[Event]:
    """What the newest launch's agent said of slow ranks."""
    place = context.target.started_place()
    told = context.target.events_of(EventKind.STRAGGLER, since)
    return [line for line in told if place_of(line) == place]


def poison_step(context: FaultContext) -> str:
    """Spoil one step: its loss is no number, and so are the weights after it.

    Of a run that is to skip, the loss that is told alone: it trains on as it is. A rank is quiet
    about another one for a while, and one right after a rollback is not the data's fault.
    """
    target, testbed, records = context.target, context.need_testbed(), context.target.records
    if records is None:
        raise ServiceError("only a throw-away run's program lets its steps be spoiled")
    before = _numerics(target, 0.0)
    reached = max((int(line.data["step"]) for line in before), default=-POLICY.window)
    target.wait_for(
        "a step far beyond the last spoiled one",
        lambda: target.newest and target.newest.step > reached + POLICY.window,
    )
    since = context.acted_at = time.time()
    what = "loss" if testbed.on_nan == "skip" else "weights"
    context.is_poisoned = what == "weights"
    records.spoil_step(what)
    told = target.wait_for(
        "the ranks' word on a spoiled step", lambda: _numerics(target, since), POISON_S_MAX
    )
    action = str(told[0].data.get("action"))
    expected = testbed.on_nan if len(before) < POLICY.changes_max else "stop"
    if action != expected:
        raise ServiceError(f"expected {expected} of a spoiled step, got {action}: {told[0].data}")
    context.recovery = AFTER_NAN[action]
    return f"one step's {what} were no numbers: {action}"


def _numerics(target: TargetRun, since: float) -> list[Event]:
    """What the ranks said of losses that were no numbers; a spike is something else."""
    told = target.events_of(EventKind.NUMERICS, since)
    return [line for line in told if line.data.get("problem") == "nan"]


def _continue(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def refuse_memory(context: FaultContext) -> str:
    """Lower one rank's limit of address space to what it has, and a little more, until it fails.

    Lowered again and again: what it had at one moment may have been what a step asks for. The
    fault is when it was last seen alive.
    """
    rank = context.chance.choice(list(context.target.ranks().values()))
    former = rank.rlimit(psutil.RLIMIT_AS)
    limit, give_up = rank.memory_info().vms + MEMORY_LEFT_BYTES, time.monotonic() + MEMORY_S_MAX
    while time.monotonic() < give_up:
        try:
            looked_at = time.time()
            # A zombie has no memory any more.
            vms_bytes = rank.memory_info().vms
            is_gone = vms_bytes == 0
            if not is_gone:
                context.acted_at = looked_at
                limit = min(limit, vms_bytes + MEMORY_LEFT_BYTES)
                rank.rlimit(psutil.RLIMIT_AS, (limit, former[1]))
        except psutil.NoSuchProcess:
            is_gone = True
        if is_gone:
            return f"process {rank.pid} had {limit >> 20} MiB of address space, and asked for more"
        time.sleep(MEMORY_PAUSE_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.rlimit(psutil.RLIMIT_AS, former)
    raise ServiceError(f"process {rank.pid} asked for no memory within {MEMORY_S_MAX:.0f} s")


FAULTS: Final[Mapping[str, Callable[[FaultContext], str]]] = {
    "sigterm": signal_agent(signal.SIGTERM),
    "sigusr2": signal_agent(signal.SIGUSR2),
    "spot-notice": outages.announce_preemption,
    "kill-rank": kill_rank,
    "kill-torchrun": kill_torchrun,
    "kill-agent": kill_agent,
    "kill-flow": kill_flow,
    "kill-flusher": kill_flusher,
    "hang": hang_rank,
    "straggler": hold_up,
    "node-loss": lose_node,
    "disk-full": outages.fill_disk,
    "database-down": outages.take_database,
    "prefect-down": outages.take_prefect,
    "corrupt-checkpoint": outages.corrupt_checkpoint,
    "nan": poison_step,
    "oom": refuse_memory,
}
