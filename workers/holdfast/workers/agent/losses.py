"""What the lead knows of an attempt that has lost nodes, and on which others it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.attempt import LaunchRecord
from holdfast.contracts.records.history import load_history
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.decisions.drained_nodes import DrainPlan, may_leave, plan_departure
from holdfast.workers.decisions.lost_nodes import NodePlan, plan_nodes
from holdfast.workers.runs.feasibility import Feasibility


def plan_without(
    context: AgentContext, *, nodes: int, lost: Sequence[str], spares: int
) -> NodePlan:
    """Return how the attempt continues, which trained on `nodes` nodes, without the lost ones.

    The sizes are those that a relaunch may have: by the spec, and by the newest checkpoint.
    """
    try:
        history = load_history(context.run)
        fits = Feasibility.of(history).allows
        return plan_nodes(
            history.spec,
            nodes=nodes,
            lost=lost,
            spares=spares,
            restarts_max=context.request.supervision.restarts_in_place,
            fits=fits,
        )
    except (HoldfastError, OSError) as error:
        # The supervisor reports why the run's records cannot be read.
        return NodePlan(reason=f"lost nodes: {', '.join(lost)}; {error}")


def plan_without_drained(
    context: AgentContext,
    *,
    drained: Mapping[str, str],
    training: Sequence[str],
    spares: Sequence[str],
) -> DrainPlan:
    """Return how the attempt leaves its drained hosts; the sizes are those of `plan_without`."""
    try:
        history = load_history(context.run)
        if not may_leave(history.spec, context.request):
            return DrainPlan(reason=f"the run needs its nodes: {', '.join(drained)}")
        return plan_departure(
            history.spec,
            drained=drained,
            training=training,
            spares=spares,
            restarts_max=context.request.supervision.restarts_in_place,
            fits=Feasibility.of(history).allows,
        )
    except (HoldfastError, OSError) as error:
        return DrainPlan(reason=f"drained nodes: {', '.join(drained)}; {error}")


def launches_before(attempt: AttemptPaths, launch: int) -> tuple[list[LaunchRecord], float]:
    """Return the records of the launches before `launch`, and when that one started."""
    begun: dict[int, Event] = {}
    found: list[LaunchRecord] = []
    for event in _events(attempt):
        number = int(event.data.get("launch") or 0)
        if event.kind is EventKind.LAUNCH_STARTED:
            begun[number] = event
        elif event.kind is EventKind.LAUNCH_ENDED and number < launch:
            found.append(_record(event, begun.get(number, event).time))
    started_at = begun[launch].time if launch in begun else 0.0
    return sorted(found, key=lambda one: one.number), started_at


def lost_numbers(attempt: AttemptPaths) -> set[int]:
    """Return the numbers of the nodes that leads have reported lost."""
    lost = [event for event in _events(attempt) if event.kind is EventKind.NODE_LOST]
    return {int(event.data.get("node") or 0) for event in lost}


def _record(event: Event, started_at: float) -> LaunchRecord:
    data = event.data
    return LaunchRecord(
        number=int(data["launch"]),
        started_at=started_at,
        ended_at=event.time,
        exit_code=data.get("exit_code"),
        last_step=data.get("last_step"),
        ending=str(data.get("ending", "")),
    )


def _events(attempt: AttemptPaths) -> list[Event]:
    """Return the events in the journals of all nodes, in the order of their times."""
    paths = sorted(attempt.journal.glob("node-*.jsonl"))
    found = [event for path in paths for event in read_journal(path)[0]]
    return sorted(found, key=lambda event: event.time)
