"""What people see of a run in Prefect: the name of its flow run's state, and its artifacts.

This module does not use Prefect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.environment import PAGE_URL, problem_with_address
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.steps_total import steps_total
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.progress import describe_progress
from holdfast.flows.supervisor.summary import HEADINGS, cells
from holdfast.lineage.queries.formats import mermaid
from holdfast.workers.nodes.heartbeats import newest_step, read_heartbeats

_QUEUED: Final = frozenset({AttemptState.CREATED, AttemptState.SUBMITTED, AttemptState.PENDING})


@dataclass(frozen=True)
class Artifact:
    """An artifact of the flow run: its kind in Prefect, and its content."""

    kind: str
    data: Any
    description: str = ""


def state_name(history: RunHistory) -> str:
    """Return what the run does now: Running, AwaitingCapacity, Flushing, Preempted or Paused.

    `Waiting` is the time until the policy's next decision after another ending.
    """
    last = history.last_attempt
    if last is None or last.state.is_terminal:
        if history.state is RunState.PAUSED:
            return "Paused"
        if last is None:
            return "AwaitingCapacity"
        return "Preempted" if last.cause is Cause.PREEMPTION else "Waiting"
    if last.state in _QUEUED:
        return "AwaitingCapacity"
    return "Flushing" if last.state is AttemptState.STOPPING or _is_stopping(history) else "Running"


def _is_stopping(history: RunHistory) -> bool:
    """Return whether the running launch was told to end, and has not ended."""
    last, told = history.last_attempt, False
    for event in history.events:
        if last is not None and event.data.get("attempt") == last.number:
            if event.kind is EventKind.SIGNAL:
                told = True
            elif event.kind is EventKind.LAUNCH_STARTED:
                told = False
    return told


def artifacts(history: RunHistory) -> Iterator[tuple[str, Artifact]]:
    """Yield the artifacts of a run, by the ends of their keys."""
    step, total, text = _progress(history)
    if total:
        yield "progress", Artifact("progress", 100.0 * min(step / total, 1.0), text)
    rows = [dict(zip(HEADINGS, cells(one), strict=True)) for one in history.attempts]
    yield "attempts", Artifact("table", json.dumps(rows), "The attempts of the run")
    yield "run", Artifact("markdown", _markdown(history, text), "Progress, links and lineage")


def _progress(history: RunHistory) -> tuple[int, int, str]:
    """Return the newest step, the number of steps (0: unknown), and both in words."""
    last = history.last_attempt
    # A new attempt has no step until its ranks train.
    known = (view.last_step for view in reversed(history.attempts))
    step = next((one for one in known if one is not None), 0)
    pace_s = 0.0
    if last is not None and not last.state.is_terminal:
        beats = read_heartbeats(history.paths.attempt(last.number))
        step = newest_step(beats) or step
        paces = [rank.step_time_s for beat in beats for rank in beat.ranks]
        pace_s = max((one for one in paces if one), default=0.0)
    total = steps_total(history.spec.config) or 0
    text = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    if pace_s and total > step:
        hours, minutes = divmod(round((total - step) * pace_s / 60), 60)
        text += f", about {hours} h {minutes:02d} min left at the present pace"
    return step, total, text


def _markdown(history: RunHistory, progress: str) -> str:
    paths = history.paths
    problem = problem_with_address(PAGE_URL, os.environ)
    page = "" if problem else os.environ.get(PAGE_URL, "").rstrip("/")
    name = f"[{paths.name}]({page}/runs/{quote(paths.name)})" if page else f"`{paths.name}`"
    lines = [f"# Run {name}", "", f"{history.state.value}: {progress}", ""]
    lines += [describe_progress(history).text, "", f"Folder: `{paths.directory}`", ""]
    lines += [f"No links to the page: {problem}", ""] if problem else []
    if history.attempts:
        logs = paths.attempt(history.attempts[-1].number).directory
        lines += [f"Logs of the newest attempt: `holdfast logs {paths.name}`, in `{logs}`", ""]
    return "\n".join([*lines, "## Lineage", "", "```mermaid", mermaid(_graph(history)) + "```", ""])


def _graph(history: RunHistory) -> Mapping[str, Any]:
    """Return attempts and the newest checkpoints as a graph, as `lineage_graph` does from SQL."""
    kept = history.tally.recent
    names = {one.checkpoint for one in kept}
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    for view in history.attempts:
        own = [one for one in kept if one.attempt == view.number]
        came_from = (view.resumed_from or "").rpartition(":")[2]
        if not own and came_from not in names and view is not history.attempts[-1]:
            continue
        attempt = f"attempt {view.number}"
        facts = {"state": view.state.value, "cause": view.cause.value if view.cause else None}
        nodes.append({"id": attempt, "kind": "attempt", "world_size": view.world_size, **facts})
        if came_from in names:
            edges.append({"from": attempt, "to": came_from, "kind": "resumed_from"})
        for one in own:
            nodes.append({"id": one.checkpoint, "kind": "checkpoint"})
            edges.append({"from": one.checkpoint, "to": attempt, "kind": "written_by"})
    return {"nodes": nodes, "edges": edges}
