"""Builds the rows of one run from the content of its folder. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from holdfast.contracts.attempt import Provenance
from holdfast.contracts.bounds import TIME_MAX
from holdfast.contracts.digests import document_digest
from holdfast.contracts.history import AttemptView, RunHistory
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.roots import ensure_root_id
from holdfast.contracts.states import RunState
from holdfast.contracts.timeline import goodput_of
from holdfast.lineage.checkpoint_rows import checkpoint_rows
from holdfast.lineage.disk import FoundCheckpoint, Row
from holdfast.lineage.node_rows import node_rows
from holdfast.lineage.origins import Origins, bare
from holdfast.lineage.states import INTEGER_MAX, CheckpointState, EdgeKind

# The columns of a run that count its checkpoints in each state.
STORAGE: Final = {
    "kept": CheckpointState.COMMITTED,
    "damaged": CheckpointState.DAMAGED,
    "deleted": CheckpointState.DELETED,
}


# An edge's kind, source (uid, folder name, node) and target (the same).
_Edge = tuple[EdgeKind, str, str, str, str | None, str | None, str | None]


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """All rows of one run except its journal lines; see `models` for the columns."""

    run: Row
    attempts: list[Row]
    nodes: list[Row]
    launches: list[Row]
    checkpoints: list[Row]
    edges: list[Row]


def build_rows(
    history: RunHistory,
    found: Sequence[FoundCheckpoint],
    deleted: Mapping[str, Row],
    fingerprint: str,
) -> RunRows:
    """Return all rows of the run except its journal lines.

    `deleted` has the deletions of checkpoints, by name.
    """
    origins = Origins(history.record, {str(one.name): one.name for one in found})
    checkpoints = checkpoint_rows(history, found, deleted, origins)
    launches = _launch_rows(history, origins)
    launches_of, checkpoints_of = _by_attempt(launches), _by_attempt(checkpoints)
    attempts = [
        _attempt_row(
            history,
            view,
            checkpoints_of.get(view.number, []),
            launches_of.get(view.number, []),
            origins,
        )
        for view in history.attempts
    ]
    return RunRows(
        run=_run_row(history, attempts, checkpoints, fingerprint),
        attempts=attempts,
        nodes=node_rows(history),
        launches=launches,
        checkpoints=checkpoints,
        edges=_edge_rows(history, attempts, launches, origins),
    )


def _by_attempt(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["attempt"]].append(row)
    return found


def attempt_of(event: Event, own: int | None) -> int | None:
    """Return the attempt in the event's data, or else `own`, the attempt of its journal."""
    named = whole(event.data.get("attempt"))
    return own if named is None else named


def whole(value: object) -> int | None:
    """Return `value` if it is an integer that fits in a column, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) <= INTEGER_MAX else None


def _run_row(
    history: RunHistory, attempts: Sequence[Row], checkpoints: Sequence[Row], fingerprint: str
) -> Row:
    record, state = history.record, history.state
    supervised = _last(history.events, EventKind.SUPERVISED)
    ended = _last(history.events, EventKind.RUN_ENDED)
    digests = [a["command_digest"] for a in attempts if a["command_digest"]]
    ended_at = attempts[-1]["ended_at"] if attempts else None
    ended_at = None if state.is_live else ended_at or (ended.time if ended else None)
    updated_at = newest_time(history, attempts, checkpoints)
    verified = [c["step"] for c in checkpoints if c["checksum"]]
    goodput = goodput_of(history, until=ended_at or updated_at, safe_step=max(verified, default=0))
    return {
        "uid": record.uid,
        "run": history.paths.name,
        "name": record.name,
        "root": str(history.paths.directory.parent),
        "directory": str(history.paths.directory),
        "state": str(state),
        "reason": _reason(history, state),
        "spec": record.spec,
        "spec_digest": record.spec_digest,
        "command_digest": digests[-1] if digests else None,
        "created_at": record.created_at,
        "created_by": record.created_by,
        "ended_at": ended_at,
        "forked_from": record.forked_from,
        "forked_uid": record.forked_uid,
        "forked_path": record.forked_path,
        "step": _step(state, attempts, checkpoints),
        "flow_run": str(supervised.data.get("flow_run") or "") or None if supervised else None,
        "updated_at": updated_at,
        "committed_at": max(
            (c["committed_at"] for c in on_branch(checkpoints) if c["committed_at"]), default=None
        ),
        "goodput": asdict(goodput),
        "fingerprint": fingerprint,
        "root_id": ensure_root_id(history.paths.directory.parent),
        "unknown_kinds": sorted(history.tally.unknown_kinds),
        "attempts": len(attempts),
        "world_size": attempts[-1]["world_size"] if attempts else None,
        **_storage(checkpoints),
    }


def _storage(checkpoints: Sequence[Row]) -> Row:
    """Return the number and the bytes of checkpoints in each state."""
    totals: Row = {}
    for name, state in STORAGE.items():
        mine = [one["bytes"] or 0 for one in checkpoints if one["state"] == state]
        totals |= {name: len(mine), f"{name}_bytes": min(sum(mine), INTEGER_MAX)}
    return totals


def _reason(history: RunHistory, state: RunState) -> str | None:
    """Return why the run is in its state, from the newest record that explains it."""
    request, decision = history.pending_request, history.last_decision
    ended = _last(history.events, EventKind.RUN_ENDED)
    if not state.is_live and ended and ended.data.get("state") == state:
        return str(ended.data.get("reason") or "") or None
    last = history.last_attempt
    if state in {RunState.WAITING, RunState.QUEUED} and last and last.waits_for:
        return last.waits_for
    if request and state in {RunState.PAUSED, RunState.CANCELLED, RunState.WAITING}:
        return f"{request['action']} by {request.get('by') or 'unknown'}"
    if decision and state is not RunState.RUNNING:
        return str(decision.get("reason") or "") or None
    return None


def _step(state: RunState, attempts: Sequence[Row], checkpoints: Sequence[Row]) -> int | None:
    """Return the newest committed step on the run's branch; a completed run has its last step."""
    committed = [c["step"] for c in on_branch(checkpoints)]
    finished = attempts[-1]["last_step"] if state is RunState.COMPLETED and attempts else None
    return max([*committed, *([finished] if finished is not None else [])], default=None)


def on_branch(checkpoints: Iterable[Row]) -> list[Row]:
    """Return the checkpoints that the run can resume from."""
    return [
        c for c in checkpoints if c["state"] == CheckpointState.COMMITTED and not c["rolled_back"]
    ]


def newest_time(history: RunHistory, attempts: Iterable[Row], checkpoints: Iterable[Row]) -> float:
    """Return the newest time in the folder, in Unix seconds. Implausible times are ignored."""
    times = [history.tally.newest_at or None]
    times += [row[key] for row in attempts for key in ("submitted_at", "started_at", "ended_at")]
    times += [row[key] for row in checkpoints for key in ("committed_at", "deleted_at")]
    plausible = (time for time in times if time is not None and 0 <= time <= TIME_MAX)
    return max(plausible, default=history.record.created_at)


def _attempt_row(
    history: RunHistory,
    view: AttemptView,
    checkpoints: Sequence[Row],
    launches: Sequence[Row],
    origins: Origins,
) -> Row:
    """Return the row of an attempt. `checkpoints` and `launches` are its own."""
    request, outcome = view.request, view.outcome
    resumed = next((i for i in launches if i["resumed_step"] is not None), None)
    committed = [c["step"] for c in checkpoints if c["checksum"]]
    recorded_step = outcome.committed_step if outcome else None
    digest = view.command_digest or (outcome.command_digest if outcome else None)
    return {
        "run_uid": history.record.uid,
        "number": view.number,
        "state": str(view.state),
        "cause": str(view.cause) if view.cause else None,
        "evidence": [str(line) for line in view.evidence],
        "reason": request.reason if request else None,
        "executor": request.executor if request else None,
        "job_id": view.job_id,
        "job_name": request.job_name if request else None,
        "hosts": list(view.hosts),
        "nodes": request.nodes if request else None,
        "world_size": view.world_size or (outcome.world_size if outcome else 0),
        # Until rank 0 has recorded the digest, use the one of the request.
        "command_digest": digest or (request.command_digest if request else None),
        "resumed_from": origins.name(view.resumed_from),
        "resumed_step": resumed["resumed_step"] if resumed else None,
        "first_step": view.first_step,
        "last_step": view.last_step,
        "committed_step": max(committed, default=recorded_step),
        "created_at": request.created_at if request else None,
        "submitted_at": view.submitted_at,
        "started_at": view.started_at,
        "stop_requested_at": outcome.stop_requested_at if outcome else None,
        "stop_committed_at": outcome.stop_committed_at if outcome else None,
        "ended_at": view.ended_at,
        "traceback": view.traceback,
        "failed_rank": outcome.failed_rank if outcome else None,
        **(request.provenance if request else Provenance()).model_dump(),
    }


def _launch_rows(history: RunHistory, origins: Origins) -> list[Row]:
    rows: dict[tuple[int, int], Row] = {}

    def row(attempt: int, number: int) -> Row:
        blank = {
            **dict.fromkeys(("world_size", "command_digest", "resumed_from", "resumed_step")),
            **dict.fromkeys(("first_step", "last_step", "started_at", "trained_from")),
            **dict.fromkeys(("ended_at", "ending", "exit_code")),
        }
        key = {"run_uid": history.record.uid, "attempt": attempt, "number": number}
        return rows.setdefault((attempt, number), {**key, **blank})

    known = {view.number for view in history.attempts}
    for event in history.events:
        attempt, number = whole(event.data.get("attempt")), whole(event.data.get("launch"))
        facts = _launch_facts(event, origins)
        if attempt in known and number is not None and facts:
            target = row(attempt or 0, number)
            target.update({key: fact for key, fact in facts.items() if target[key] is None})
    for view in history.attempts:
        for record in view.outcome.launches if view.outcome else ():
            facts = record.model_dump(mode="json", exclude={"number"})
            facts["resumed_from"] = origins.name(record.resumed_from)
            target = row(view.number, record.number)
            target.update({key: fact for key, fact in facts.items() if fact not in (None, "")})
    return [rows[key] for key in sorted(rows)]


def _launch_facts(event: Event, origins: Origins) -> Row:
    """Return the columns of a launch that an event records; an earlier event has precedence."""
    data = event.data
    if event.kind is EventKind.LAUNCH_STARTED:
        return {"started_at": event.time, "world_size": whole(data.get("world_size"))}
    if event.kind is EventKind.LAUNCH_ENDED:
        return {
            "ended_at": event.time,
            "ending": str(data.get("ending") or "") or None,
            "exit_code": whole(data.get("exit_code")),
            "last_step": whole(data.get("last_step")),
        }
    if event.kind is not EventKind.RESUMED:
        return {}
    step = whole(data.get("step"))
    return {
        "trained_from": event.time,
        "resumed_from": origins.name(data.get("checkpoint")),
        "resumed_step": step,
        "first_step": None if step is None else step + 1,
        "command_digest": data.get("command_digest"),
        "world_size": whole(data.get("world_size")),
    }


def _edge_rows(
    history: RunHistory,
    attempts: Sequence[Row],
    launches: Sequence[Row],
    origins: Origins,
) -> list[Row]:
    columns = ("kind", "source_uid", "source_run", "source", "target_uid", "target_run", "target")
    run_uid, rows = history.record.uid, {}
    resumed = [
        *((attempt_node(one["number"]), one["resumed_from"]) for one in attempts),
        *((attempt_node(one["attempt"]), one["resumed_from"]) for one in launches),
    ]
    for edge in (*_edges_to_origins(history, resumed, origins), *_journaled_edges(history)):
        row = dict(zip(columns, (str(edge[0]), *edge[1:]), strict=True))
        identity = document_digest([run_uid, *row.values()])
        rows[identity] = {"id": identity, "run_uid": run_uid, **row}
    return [rows[key] for key in sorted(rows)]


def _edges_to_origins(
    history: RunHistory, resumed: Sequence[tuple[str, str | None]], origins: Origins
) -> Iterator[_Edge]:
    """Yield the edges to the checkpoints that attempts resumed from and the run was forked from."""
    own = history.record.uid, history.paths.name
    forked = (EdgeKind.FORKED_FROM, "", history.record.forked_from)
    for kind, source, identity in (*((EdgeKind.RESUMED_FROM, *one) for one in resumed), forked):
        if identity:
            yield kind, *own, source, *origins.find(identity)


def _journaled_edges(history: RunHistory) -> Iterator[_Edge]:
    """Yield the edges of rollbacks, exports, imports and forks, which the journals record."""
    own = history.record.uid, history.paths.name
    for event in history.events:
        data, checkpoint = event.data, bare(event.data.get("checkpoint"))
        if event.kind is EventKind.ROLLED_BACK and data.get("to"):
            yield EdgeKind.ROLLED_BACK, *own, "", *own, bare(data["to"])
        elif event.kind is EventKind.EXPORTED:
            path = str(data.get("path") or "")
            yield EdgeKind.EXPORTED_TO, *own, checkpoint, None, None, path
        elif event.kind is EventKind.IMPORTED:
            path = str(data.get("path") or "")
            yield EdgeKind.IMPORTED_FROM, *own, checkpoint, None, None, path
        elif event.kind is EventKind.FORKED:
            into = str(data.get("into_uid")), str(data.get("into_run"))
            yield EdgeKind.FORKED_FROM, *into, "", *own, checkpoint


def attempt_node(number: int) -> str:
    """Return the name of an attempt in the lineage graph."""
    return f"attempt-{number:04d}"


def _last(events: Sequence[Event], kind: EventKind) -> Event | None:
    return next((event for event in reversed(events) if event.kind is kind), None)
