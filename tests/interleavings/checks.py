"""What must be true of a run when a schedule has been played to its end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tests.interleavings.world import World

from holdfast.contracts.disk.journal import AUTOMATIC
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.states import AttemptState, RunState

HOLDS: Final = frozenset({"pause", "stop", "cancel"})
ENDS: Final = {"complete": RunState.COMPLETED, "user_error": RunState.FAILED}
_RESERVED: Final = re.compile(r"name /r/attempts/\d{4}$")


@dataclass(frozen=True)
class Order:
    """An order that a person gave and Holdfast accepted, in the order of acceptance."""

    action: str
    gpus: int | None
    after_attempt: int


def accepted_orders(world: World) -> list[Order]:
    """Return the orders of persons, line by line of the file: no clock orders them."""
    lines: list[dict[str, Any]] = []
    for name in ("orders.jsonl", "cli.jsonl"):
        path = world.paths.journal / name
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            lines = [line for line in lines if line["kind"] == "operator_request"]
            if lines:
                break
    asked = [line["data"] for line in lines if line["data"].get("by") not in AUTOMATIC]
    return [Order(a["action"], a.get("gpus"), a.get("after_attempt", 0)) for a in asked]


def problems(world: World) -> list[str]:
    """Return what is not as it must be once the run is calm."""
    orders, history = accepted_orders(world), world.history()
    last = orders[-1] if orders else None
    found = list(world.broken)
    state, live = history.state, world.live_jobs
    ended_by_program = {
        ENDS[agent.ended_as] for agent, _ in world.agents.values() if agent.ended_as in ENDS
    }
    if last is not None and last.action in HOLDS:
        wanted = RunState.PAUSED if last.action == "pause" else RunState.CANCELLED
        if state is not wanted and state not in ended_by_program:
            found.append(f"{last.action} was accepted, and the run is {state}")
        if live:
            found.append(f"{last.action} was accepted, and job {live[0].id} is {live[0].state}")
    elif last is not None:
        found += _continues(world, last, ended_by_program)
    elif state is not RunState.RUNNING and state not in ended_by_program | _before(world):
        found.append(f"the run could continue, and it is {state}")
    if not state.is_live and live:
        found.append(f"the run is {state}, and job {live[0].id} is {live[0].state}")
    found += _of_successors(world)
    if state.is_live and not world.has_supervisor:
        found.append(f"the run is {state}, and nobody supervises it")
    return found + _of_pins(world) + _of_processes(world)


def _of_successors(world: World) -> list[str]:
    """One successor waits while an attempt runs, and none otherwise.

    A job that Slurm restarted either runs an attempt or is gone.
    """
    if world.history().spec.resources.standby == "expedite":
        trains = {agent.job.id for agent in world.trainers}
        restarted = [job for job in world.live_jobs if job.restarts and job.id not in trains]
        return [f"job {job.id} was restarted and is {job.state}" for job in restarted]
    waiting = [job for job in world.live_jobs if job.is_successor and not world.is_adopted(job)]
    history = world.history()
    last = history.last_attempt
    runs = last is not None and last.state is AttemptState.RUNNING
    if history.spec.resources.standby == "none" or not runs:
        return [f"job {job.id} waits, and no attempt runs" for job in waiting]
    return [] if len(waiting) == 1 else [f"{len(waiting)} successors wait"]


def _before(world: World) -> set[RunState]:
    """Return how the run had ended when the schedule began."""
    return {RunState.FAILED} if world.started_as in {"failing", "failed"} else set()


def _continues(world: World, order: Order, ended: set[RunState]) -> list[str]:
    """Check an order to continue: an attempt after it trains, or has ended as programs end."""
    history, found = world.history(), []
    later = [one for one in history.attempts if one.number > order.after_attempt]
    later = [one for one in later if one.started_at is not None]
    if not later:
        if history.state not in ended:
            found.append(f"{order.action} was accepted, and no attempt followed ({history.state})")
    elif history.state is not RunState.RUNNING and history.state not in ended:
        found.append(f"{order.action} was accepted, and the run is {history.state}")
    elif order.gpus and order.gpus not in {one.gpus for one in later}:
        found.append(f"{order.action} at {order.gpus} GPUs, and it runs at {later[0].gpus}")
    return found


def _of_pins(world: World) -> list[str]:
    found = []
    for name, actor in world.pins:
        if not actor.has_ended or actor.error is not None:
            continue
        if read_manifest(world.paths.checkpoint(name)) is None:
            found.append(f"{name} was pinned, and it is deleted")
    return found


def _of_processes(world: World) -> list[str]:
    """A command may be refused by one of Holdfast's errors; nothing else may end by an error."""
    found = []
    for actor in world.stage.actors:
        if actor.error is None:
            continue
        is_refusal = isinstance(actor.error, HoldfastError) and actor not in world.supervisors
        if not is_refusal:
            found.append(f"{actor.name} ended by {type(actor.error).__name__}: {actor.error}")
    for action, actor in world.orders:
        if not actor.has_ended:
            found.append(f"the command {action} has not ended")
    return found


def late_attempts(world: World) -> list[str]:
    """Return the attempts that were reserved after an order to hold was the last."""
    orders = accepted_orders(world)
    if not orders or orders[-1].action not in HOLDS:
        return []
    names = {actor.name for _, actor in world.orders}
    written = [
        place
        for place, line in enumerate(world.stage.trace)
        if line.split()[1] in names and re.search(r"write /r/journal/(cli|orders)\.jsonl$", line)
    ]
    if not written:
        return []
    late = [line for line in world.stage.trace[written[-1] :] if _RESERVED.search(line)]
    return [f"an attempt was reserved after {orders[-1].action} was accepted" for _ in late[:1]]
