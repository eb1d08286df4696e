"""What the lead knows of an attempt that has lost nodes, and on which others it continues."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import HoldfastError, reading_run
from holdfast.contracts.records import documents
from holdfast.contracts.records.history import RunHistory, load_identity, read_events
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import Cause
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.stops.sources import StopRequest
from holdfast.workers.decisions import drained_nodes
from holdfast.workers.runs.feasibility import Feasibility

_OF_OTHER_NODES: Final = re.compile(r"(?:node-(?!0000\.)|mirror-)\d+\.jsonl")


def plan_without(
    context: AgentContext,
    *,
    nodes: int,
    lost: Sequence[str],
    spares: int,
    left: Sequence[str] = (),
) -> drained_nodes.NodePlan:
    """Return how the attempt continues, which trained on `nodes` nodes, without the lost ones.

    It leaves the nodes `left` too. The sizes are those that a relaunch may have: by the spec, and
    by the newest checkpoint. What the run's journals say of checkpoints is read only for a smaller
    size.
    """
    try:
        spec, fits = _sizes(context.run)
        return drained_nodes.plan_nodes(
            spec,
            nodes=nodes,
            lost=lost,
            left=left,
            spares=spares,
            restarts_max=context.request.supervision.restarts_in_place,
            fits=fits,
        )
    except (HoldfastError, OSError) as error:
        # The supervisor reports why the run's records cannot be read.
        names = drained_nodes.name_gone(lost, left)
        return drained_nodes.NodePlan(reason=f"{names}; {error}")


def may_continue_without(context: AgentContext, nodes: int, lead: str) -> bool:
    """Return True if the attempt can continue without its lead on host `lead`.

    `nodes` nodes train. Files of a program without a session are found by node 0 alone.
    """
    if context.request.program.is_watched:
        return False
    spares = context.nodes_of_job - nodes
    return bool(plan_without(context, nodes=nodes, lost=[lead], spares=spares).way)


def plan_without_drained(
    context: AgentContext,
    *,
    drained: Mapping[str, str],
    training: Sequence[str],
    spares: Sequence[str],
    what: str = "drained",
) -> drained_nodes.DrainPlan:
    """Return how the attempt leaves its drained hosts; the sizes are those of `plan_without`.

    `what` is said of these hosts: `drained` or `slow`.
    """
    try:
        spec, fits = _sizes(context.run)
        if not drained_nodes.may_leave(spec, context.request):
            return drained_nodes.DrainPlan(reason=f"the run needs its nodes: {', '.join(drained)}")
        return drained_nodes.plan_departure(
            spec,
            drained=drained,
            training=training,
            spares=spares,
            restarts_max=context.request.supervision.restarts_in_place,
            fits=fits,
            what=what,
        )
    except (HoldfastError, OSError) as error:
        return drained_nodes.DrainPlan(reason=f"{what} nodes: {', '.join(drained)}; {error}")


def _sizes(run: RunPaths) -> tuple[RunSpec, Callable[[int], bool]]:
    """Return the spec, and whether the newest checkpoint allows a number of GPUs.

    The journals are read when a size is first asked for, without those of single nodes: only those
    of the run, of rank 0 and of node 0 say which checkpoints count.
    """
    record, spec = load_identity(run)

    @functools.cache
    def feasibility() -> Feasibility:
        with reading_run(run.directory):
            found = [one for one in run.list_journals() if not _OF_OTHER_NODES.fullmatch(one.name)]
            events = read_events(found)
            history = RunHistory(paths=run, record=record, spec=spec, attempts=(), events=events)
            return Feasibility.of(history)

    return spec, lambda gpus: feasibility().allows(gpus)


def events_of_leads(attempt: AttemptPaths) -> list[Event]:
    """Return the events in the journals of all nodes that have led, in the order of their times.

    Only leads record launches and lost nodes that others must know of.
    """
    newest = documents.newest_term(attempt)
    terms = [
        documents.read_document(documents.Term, attempt.term(number))
        for number in range(2, newest.number + 1 if newest is not None else 0)
    ]
    leads = {0, *(term.node for term in terms if term is not None)}
    found = [event for node in leads for event in read_journal(attempt.node_journal(node))[0]]
    return sorted(found, key=lambda event: event.time)


def launches_before(
    events: Iterable[Event], launch: int
) -> tuple[list[documents.LaunchRecord], float]:
    """Return the records of the launches before `launch`, and when that one started.

    `events` are those of the leads.
    """
    begun: dict[int, Event] = {}
    found: list[documents.LaunchRecord] = []
    for event in events:
        number = int(event.data.get("launch") or 0)
        if event.kind is EventKind.LAUNCH_STARTED:
            begun[number] = event
        elif event.kind is EventKind.LAUNCH_ENDED and number < launch:
            found.append(_record(event, begun.get(number, event).time))
    started_at = begun[launch].time if launch in begun else 0.0
    return sorted(found, key=lambda one: one.number), started_at


def stop_of(events: Iterable[Event]) -> StopRequest | None:
    """Return the stop request that leads have journaled, with the earliest deadline."""
    found: StopRequest | None = None
    for event in events:
        if event.kind is not EventKind.SIGNAL:
            continue
        data = event.data
        stop_request = StopRequest(
            source=str(data["source"]),
            name=str(data["name"]),
            cause=Cause(data["cause"]),
            requested_at=event.time,
            deadline=data.get("deadline"),
            detail=str(data.get("detail", "")),
        )
        found = stop_request if found is None else found.with_deadline_of(stop_request)
    return found


def lost_of_launch(
    missing: int, *, lead: str, unjoined: Iterable[str], events: Iterable[Event]
) -> list[str]:
    """Return the hosts of the `missing` nodes of a launch whose lead, on host `lead`, is lost.

    Among `unjoined` may be spare nodes, whose numbers come last. Nodes that an earlier lead had
    lost before it could begin a launch are only in the journals, of which `events` are the lines.
    """
    reported = [
        str(event.data.get("host") or "")
        for event in events
        if event.kind is EventKind.NODE_LOST and not event.data.get("is_spare")
    ]
    return list(dict.fromkeys([lead, *unjoined, *reversed(reported)]))[:missing]


def left_of_launch(launch: int, events: Iterable[Event]) -> list[str]:
    """Return the hosts that leads have left at the end of a launch. `events` are the leads'."""
    left = [e for e in events if e.data.get("released") and e.data.get("launch") == launch]
    return [str(event.data["host"]) for event in left]


def gone_numbers(events: Iterable[Event]) -> set[int]:
    """Return the numbers of the nodes that leads have reported lost, or have released."""
    lost = {int(e.data.get("node") or 0) for e in events if e.kind is EventKind.NODE_LOST}
    return lost | {int(e.data["released"]) for e in events if e.data.get("released")}


def _record(event: Event, started_at: float) -> documents.LaunchRecord:
    data = event.data
    return documents.LaunchRecord(
        number=int(data["launch"]),
        started_at=started_at,
        ended_at=event.time,
        exit_code=data.get("exit_code"),
        last_step=data.get("last_step"),
        ending=str(data.get("ending", "")),
    )
