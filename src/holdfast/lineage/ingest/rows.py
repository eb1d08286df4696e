"""Builds the rows of one run from the content of its folder. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from holdfast.contracts.account.timeline import KnownAccount, goodput_of
from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.contracts.disk.digests import document_digest
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName, checkpoint_id
from holdfast.contracts.disk.roots import ensure_root_id
from holdfast.contracts.records import known_damage, reported
from holdfast.contracts.records.annotations import NONE, Annotation, fold_annotations
from holdfast.contracts.records.documents import Provenance, RunRecord
from holdfast.contracts.records.history import (
    AttemptView,
    Lines,
    RunHistory,
    excluded_checkpoints,
    pinned_checkpoints,
)
from holdfast.contracts.states import Cause, RunState
from holdfast.lineage.database.permissions import permissions_of
from holdfast.lineage.database.states import INTEGER_MAX, CheckpointState, EdgeKind
from holdfast.lineage.ingest.checkpoint_totals import CheckpointTotals
from holdfast.lineage.ingest.disk import FoundCheckpoint, Row, empty_facts

# The rows of the nodes that attempts ran on, with the faults attributed to them. Pure.

# Causes that are attributed to the only node of an attempt if no record names a node.
_ALONE = frozenset({Cause.NODE_FAILURE, Cause.HOST_OOM, Cause.GPU_OOM, Cause.INFRASTRUCTURE})
# Causes that are attributed to the node that failed first. An error of the program, bad losses, a
# preemption and an operator's request are not faults of the machine.
_OF_MACHINES = _ALONE | {Cause.HANG, Cause.UNKNOWN}


class Origins:
    """Resolves checkpoint ids to runs. An id contains a folder name, which may not be unique."""

    def __init__(self, record: RunRecord, own: Container[str]) -> None:
        """`own` has the directory names of the checkpoints in the run's folder."""
        self._record = record
        self._own = own

    def name(self, identity: object) -> str | None:
        """Return `identity` as `run:directory`; a bare directory name belongs to this run."""
        if not isinstance(identity, str) or not identity:
            return None
        return identity if ":" in identity else checkpoint_id(self._record.run, identity)

    def find(self, identity: str | None) -> tuple[str | None, str | None, str | None]:
        """Return (uid, run, directory name) of an id; the uid is None if the run is unknown."""
        if not identity:
            return None, None, None
        run, _, name = identity.rpartition(":")
        is_origin = identity == self._record.forked_from
        if run in {"", self._record.run} and not (is_origin and name not in self._own):
            return self._record.uid, self._record.run, name
        # Only the fork knows the uid of its origin. A run of that name may be another one.
        return (self._record.forked_uid if is_origin else None), run, name

    def parent(self, child: CheckpointName, identity: object) -> tuple[str, CheckpointName] | None:
        """Return (uid, name) of a manifest's parent, or None if it cannot be one of `child`.

        A parent must have a smaller step, or the same step in an earlier attempt or launch or in
        another run. Any other parent could form a cycle.
        """
        uid, _, name = self.find(self.name(identity))
        parent = CheckpointName.parse(name or "")
        # Any user can write any parent into a manifest.
        if uid is None or parent is None or parent.step > child.step:
            return None
        is_own = uid == self._record.uid
        if parent.step == child.step and is_own:
            older, newer = str(parent), str(child)
            if (len(older), older) >= (len(newer), newer):
                return None
        return uid, parent


def bare(identity: object) -> str:
    """Return the directory name of a checkpoint id or of a bare directory name."""
    return str(identity or "").rpartition(":")[2]


def node_rows(history: RunHistory, view: AttemptView) -> list[Row]:
    """Return a row for each host of an attempt."""
    lost = {
        str(event.data["host"])
        for event in history.lines.by_attempt.get(view.number, ())
        if event.kind is EventKind.NODE_LOST
        and event.data.get("host")
        and isinstance(event.data.get("attempt"), int)
    }
    failed = view.outcome.failed_host if view.outcome else None
    hosts = dict.fromkeys([*view.hosts, *sorted(lost), *([failed] if failed else [])])
    blamed = set(lost) or ({failed} if failed else set())
    # With several hosts, nothing shows which of them failed, so none is blamed.
    if not blamed and len(hosts) == 1 and view.cause in _ALONE:
        blamed = set(hosts)
    return [
        {
            "run_uid": history.record.uid,
            "attempt": view.number,
            "host": host,
            "fault": _fault(view, host in lost) if host in blamed else None,
            "started_at": view.started_at,
            "ended_at": view.ended_at,
        }
        for host in hosts
    ]


def _fault(view: AttemptView, is_lost: bool) -> str | None:
    """Return the fault of a node; a lost node has a node failure, whatever the attempt's cause."""
    if is_lost:
        return Cause.NODE_FAILURE.value
    # An error of the program is no fault of the machine on which it appeared first.
    return view.cause.value if view.cause in _OF_MACHINES else None


# Builds the rows of a run's checkpoints from their manifests and the journals. Pure.

_DELETED: Final = ("deleted_reason", "deleted_by", "deleted_at")


@dataclass(frozen=True)
class Journaled:
    """What the journals record of checkpoints, by directory name, except deletions."""

    pins: Mapping[str, Event]
    excluded: frozenset[str]
    damage: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, float]]
    annotations: Mapping[str, Annotation]

    @classmethod
    def of(cls, lines: Lines) -> Journaled:
        pinned = {
            bare(name)
            for name in pinned_checkpoints(lines.of_kinds(EventKind.PINNED, EventKind.UNPINNED))
        }
        pins = {bare(e.data.get("checkpoint")): e for e in lines.of_kinds(EventKind.PINNED)}
        excluded = excluded_checkpoints(lines.of_kinds(EventKind.ROLLED_BACK))
        return cls(
            pins={name: one for name, one in pins.items() if name in pinned},
            excluded=frozenset(map(bare, excluded)),
            damage=known_damage.damaged_checkpoints(lines.of_kinds(*known_damage.DAMAGE_EVENTS)),
            metrics=reported.reported_metrics(lines.of_kinds(EventKind.METRIC)),
            annotations=fold_annotations(lines.of_kinds(EventKind.ANNOTATED)),
        )


def names_in(event: Event) -> Iterator[str]:
    """Yield the directory names of the checkpoints whose rows may depend on a journal line."""
    data = event.data
    if data.get("checkpoint"):
        yield bare(data["checkpoint"])
    if event.kind is EventKind.ROLLED_BACK:
        yield from map(bare, data.get("excluded") or ())
    if event.kind is EventKind.RESUMED:
        yield from (name for name, _ in known_damage.passed_over(event))


def add_deletion(
    found: dict[str, Row], data: Mapping[str, Any], time: float, *, is_later: bool = True
) -> None:
    """Add who deleted a checkpoint, when and why, from a line; its newest one counts.

    Of two with the same time, the one that `is_later` counts.
    """
    name = bare(data.get("checkpoint"))
    former = found[name]["deleted_at"] if name in found else None
    if former is None or time > former or (is_later and time == former):
        facts = (data.get("reason"), data.get("by"), time)
        found[name] = dict(zip(_DELETED, facts, strict=True))


def deletion_in(row: Row | None) -> Row | None:
    """Return who deleted a checkpoint, when and why, from its row in the index, or None."""
    if row is None or row["deleted_at"] is None:
        return None
    return {column: row[column] for column in _DELETED}


def checkpoint_row(
    history: RunHistory,
    one: FoundCheckpoint,
    journaled: Journaled,
    deletion: Row | None,
    origins: Origins,
) -> Row:
    """Return the row of a checkpoint that was committed."""
    name = str(one.name)
    is_excluded = name in journaled.excluded
    detail = one.facts["detail"]
    # The manifest's own damage comes first. The journals add what only a full read can find, see
    # decision 91.
    if detail is None and not one.is_deleted and not is_excluded:
        detail = journaled.damage.get(name)
    state = CheckpointState.DAMAGED if detail else CheckpointState.COMMITTED
    parent = origins.parent(one.name, one.facts["parent"])
    pin = journaled.pins.get(name)
    deleted = deletion if one.is_deleted else None
    return {
        **one.facts,
        "metrics": {**(one.facts["metrics"] or {}), **journaled.metrics.get(name, {})},
        "run_uid": history.record.uid,
        "name": name,
        "step": one.name.step,
        "attempt": one.name.attempt,
        "launch": one.name.launch,
        "state": str(CheckpointState.DELETED if one.is_deleted else state),
        "detail": detail,
        "path": f"{history.paths.checkpoints}/{name}",
        "parent": origins.name(one.facts["parent"]),
        "parent_uid": parent[0] if parent else None,
        "parent_name": str(parent[1]) if parent else None,
        "parent_step": parent[1].step if parent else None,
        "pinned": pin is not None,
        "pinned_by": str(pin.data.get("by") or "") or None if pin else None,
        "pinned_at": pin.time if pin else None,
        "pin_note": str(pin.data.get("note") or "") or None if pin else None,
        "rolled_back": is_excluded,
        **(deleted or dict.fromkeys(_DELETED)),
        **(NONE if one.is_deleted else journaled.annotations.get(name, NONE)).facts,
        "stamp": one.stamp,
    }


def only_journaled(name: str) -> FoundCheckpoint | None:
    """Return a deleted checkpoint that has only a journal line, no directory and no tombstone."""
    parsed = CheckpointName.parse(name)
    if parsed is None or parsed.step > INTEGER_MAX:
        return None
    facts = empty_facts("it has no tombstone")
    return FoundCheckpoint(name=parsed, facts=facts, stamp="", is_deleted=True)


# Lines of these kinds record edges.
OF_EDGES: Final = (
    *(EventKind.ROLLED_BACK, EventKind.EXPORTED, EventKind.IMPORTED, EventKind.FORKED),
)
# An edge's kind, source (uid, folder name, node) and target (the same).
_Edge = tuple[EdgeKind, str, str, str, str | None, str | None, str | None]


@dataclass(frozen=True, kw_only=True)
class AttemptRows:
    """The rows of one attempt; see `tables` for the columns. Attempt 0 has the run's own edges."""

    attempts: list[Row] = field(default_factory=list)
    nodes: list[Row] = field(default_factory=list)
    launches: list[Row] = field(default_factory=list)
    edges: list[Row] = field(default_factory=list)


def attempt_rows(
    history: RunHistory, view: AttemptView, committed_step: int | None, origins: Origins
) -> AttemptRows:
    """Return the rows of an attempt. `committed_step` is its newest one with a valid manifest."""
    launches = _launch_rows(history, view, origins)
    row = _attempt_row(history, view, committed_step, launches, origins)
    node = attempt_node(view.number)
    resumed = [row["resumed_from"], *(one["resumed_from"] for one in launches)]
    edges = [
        (EdgeKind.RESUMED_FROM, *_own(history), node, *origins.find(identity))
        for identity in resumed
        if identity
    ]
    return AttemptRows(
        attempts=[row],
        nodes=node_rows(history, view),
        launches=launches,
        edges=_edge_rows(history, edges),
    )


def own_edges(history: RunHistory, origins: Origins) -> AttemptRows:
    """Return the edges of the run itself: its origin, and what its journals record."""
    edges = list(_journaled_edges(history))
    if forked_from := history.record.forked_from:
        edges.append((EdgeKind.FORKED_FROM, *_own(history), "", *origins.find(forked_from)))
    return AttemptRows(edges=_edge_rows(history, edges))


def attempt_of(event: Event, own: int | None) -> int | None:
    """Return the attempt in the event's data, or else `own`, the attempt of its journal."""
    named = whole(event.data.get("attempt"))
    return own if named is None else named


def whole(value: object) -> int | None:
    """Return `value` if it is an integer that fits in a column, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) <= INTEGER_MAX else None


def run_row(
    history: RunHistory,
    totals: CheckpointTotals,
    fingerprint: str,
    known: KnownAccount | None = None,
) -> Row:
    """Return the row of the run. `known` is from earlier calls for the run."""
    record, state, attempts = history.record, history.state, history.attempts
    supervised = _last(history, EventKind.SUPERVISED)
    ended = _last(history, EventKind.RUN_ENDED)
    digests = filter(None, map(_command_digest, reversed(attempts)))
    last = attempts[-1] if attempts else None
    ended_at = last.ended_at if last else None
    ended_at = None if state.is_live else ended_at or (ended.time if ended else None)
    updated_at = newest_time(history, totals)
    until, safe_step = ended_at or updated_at, totals.verified_step or 0
    goodput = goodput_of(history, until=until, safe_step=safe_step, known=known)
    annotations = fold_annotations(history.lines.of_kinds(EventKind.ANNOTATED), history.spec.tags)
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
        "command_digest": next(digests, None),
        "created_at": record.created_at,
        "created_by": record.created_by,
        "ended_at": ended_at,
        "forked_from": record.forked_from,
        "forked_uid": record.forked_uid,
        "forked_path": record.forked_path,
        "step": _step(state, last, totals),
        "flow_run": str(supervised.data.get("flow_run") or "") or None if supervised else None,
        "updated_at": updated_at,
        "committed_at": totals.branch_at,
        "goodput": asdict(goodput),
        "fingerprint": fingerprint,
        "root_id": ensure_root_id(history.paths.directory.parent),
        "unknown_kinds": sorted(history.tally.unknown_kinds),
        "attempts": len(attempts),
        "world_size": _world_size(last) if last else None,
        # Stored with the row, so that it is hidden or shown from the start, see decision 93.
        **permissions_of(history.paths),
        **annotations[""].facts,
        **totals.storage(),
    }


def _reason(history: RunHistory, state: RunState) -> str | None:
    """Return why the run is in its state, from the newest record that explains it."""
    request, decision = history.pending_request, history.last_decision
    ended = _last(history, EventKind.RUN_ENDED)
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


def _step(state: RunState, last: AttemptView | None, totals: CheckpointTotals) -> int | None:
    """Return the newest committed step on the run's branch; a completed run has its last step."""
    finished = last.last_step if state is RunState.COMPLETED and last else None
    steps = [step for step in (totals.branch_step, finished) if step is not None]
    return max(steps, default=None)


def newest_time(history: RunHistory, totals: CheckpointTotals) -> float:
    """Return the newest time in the folder, in Unix seconds. Implausible times are ignored."""
    times = [history.tally.newest_at or None, totals.newest_at]
    for view in history.attempts:
        times += (view.submitted_at, view.started_at, view.ended_at)
    # One clock that is wrong must not make the run the newest of all lists.
    plausible = (time for time in times if time is not None and 0 <= time <= TIME_MAX)
    return max(plausible, default=history.record.created_at)


def _command_digest(view: AttemptView) -> str | None:
    digest = view.command_digest or (view.outcome.command_digest if view.outcome else None)
    # Until rank 0 has recorded the digest, use the one of the request.
    return digest or (view.request.command_digest if view.request else None)


def _world_size(view: AttemptView) -> int:
    return view.world_size or (view.outcome.world_size if view.outcome else 0)


def _attempt_row(
    history: RunHistory,
    view: AttemptView,
    committed_step: int | None,
    launches: Sequence[Row],
    origins: Origins,
) -> Row:
    request, outcome = view.request, view.outcome
    resumed = next((i for i in launches if i["resumed_step"] is not None), None)
    recorded_step = outcome.committed_step if outcome else None
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
        "world_size": _world_size(view),
        "command_digest": _command_digest(view),
        "resumed_from": origins.name(view.resumed_from),
        "resumed_step": resumed["resumed_step"] if resumed else None,
        "first_step": view.first_step,
        "last_step": view.last_step,
        "committed_step": recorded_step if committed_step is None else committed_step,
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


def _launch_rows(history: RunHistory, view: AttemptView, origins: Origins) -> list[Row]:
    rows: dict[int, Row] = {}

    def row(number: int) -> Row:
        blank = {
            **dict.fromkeys(("world_size", "command_digest", "resumed_from", "resumed_step")),
            **dict.fromkeys(("first_step", "last_step", "started_at", "trained_from")),
            **dict.fromkeys(("ended_at", "ending", "exit_code")),
        }
        key = {"run_uid": history.record.uid, "attempt": view.number, "number": number}
        return rows.setdefault(number, {**key, **blank})

    for event in history.lines.by_attempt.get(view.number, ()):
        attempt, number = whole(event.data.get("attempt")), whole(event.data.get("launch"))
        facts = _launch_facts(event, origins)
        if attempt is not None and number is not None and facts:
            target = row(number)
            # The earliest line counts, and the outcome below overrides it: the agent knew more.
            target.update({key: fact for key, fact in facts.items() if target[key] is None})
    for record in view.outcome.launches if view.outcome else ():
        facts = record.model_dump(mode="json", exclude={"number"})
        facts["resumed_from"] = origins.name(record.resumed_from)
        target = row(record.number)
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


def _own(history: RunHistory) -> tuple[str, str]:
    return history.record.uid, history.paths.name


def _edge_rows(history: RunHistory, edges: Iterable[_Edge]) -> list[Row]:
    columns = ("kind", "source_uid", "source_run", "source", "target_uid", "target_run", "target")
    run_uid, rows = history.record.uid, {}
    for edge in edges:
        row = dict(zip(columns, (str(edge[0]), *edge[1:]), strict=True))
        # The id follows from the content, so that any process writes the same row.
        identity = document_digest([run_uid, *row.values()])
        rows[identity] = {"id": identity, "run_uid": run_uid, **row}
    return [rows[key] for key in sorted(rows)]


def _journaled_edges(history: RunHistory) -> Iterator[_Edge]:
    """Yield the edges of rollbacks, exports, imports and forks, which the journals record."""
    own = _own(history)
    for event in history.lines.of_kinds(*OF_EDGES):
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


def _last(history: RunHistory, kind: EventKind) -> Event | None:
    return next(iter(reversed(history.lines.of_kinds(kind))), None)
