"""Queries to the index. They return plain dictionaries or lists of them; see `views`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, func, or_, select

from holdfast.contracts.account.goodput import account, prices_of, segments, stretches_of
from holdfast.contracts.account.timeline import KINDS, TimelineMark, launches_of
from holdfast.contracts.disk.journal import EventKind, problem_with_facts
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.records.tally import Span
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import Cause, RunState
from holdfast.lineage.database import documents, permissions, tables
from holdfast.lineage.database.states import EdgeKind
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import reports, views
from holdfast.lineage.queries.ancestry import ancestry, descent
from holdfast.lineage.queries.consumers import consumer_nodes, newest_consumers
from holdfast.lineage.queries.find import (
    RUN_UID,
    Row,
    RunRef,
    find_checkpoint,
    find_run,
    rows_of,
    run_row,
    spec_of,
)

# The number of runs whose spans are cached. The spans of ten thousand saves take a megabyte.
SPANS_MAX: Final = 32
# A blocked time shorter than 1/TIMELINE_PARTS of the run is narrower than a pixel of the timeline.
TIMELINE_PARTS: Final = 2000
# A cache by engine, then by the run's uid and fingerprint, newest last.
_SPANS: Final[WeakKeyDictionary[Engine, dict[tuple[str, str], Sequence[Span]]]] = (
    WeakKeyDictionary()
)
_KEEPING_SPANS: Final = threading.Lock()
# The kind of node that an edge to a path leads to.
_OUTSIDE: Final = {EdgeKind.EXPORTED_TO.value: "export", EdgeKind.IMPORTED_FROM.value: "source"}
# The checkpoint columns that the lineage graph needs.
_DRAWN_COLUMNS: Final = (
    *("name", "step", "state", "world_size", "pinned", "rolled_back"),
    *("parent", "parent_uid", "parent_name"),
)
_DRAWN: Final = (
    select(*(tables.CHECKPOINTS.c[name] for name in _DRAWN_COLUMNS))
    .where(tables.CHECKPOINTS.c.run_uid == RUN_UID)
    .order_by(tables.CHECKPOINTS.c.step, tables.CHECKPOINTS.c.attempt, tables.CHECKPOINTS.c.launch)
)
_ATTEMPTS: Final = (
    select(tables.ATTEMPTS)
    .where(tables.ATTEMPTS.c.run_uid == RUN_UID)
    .order_by(tables.ATTEMPTS.c.number)
)
_LAUNCHES: Final = (
    select(tables.LAUNCHES)
    .where(tables.LAUNCHES.c.run_uid == RUN_UID)
    .order_by(tables.LAUNCHES.c.attempt, tables.LAUNCHES.c.number)
)

# The uid of a run and the name of a checkpoint or of another part of it.
_Key = tuple[str, str]

__all__ = (
    "RunRef",
    "ancestry",
    "checkpoint_sections",
    "count_runs",
    "find_checkpoint",
    "find_run",
    "lineage_graph",
    "read_spec",
    "show_run",
    "timeline",
)


def count_runs(database: Database) -> dict[str, int]:
    query = select(tables.RUNS.c.state, func.count()).group_by(tables.RUNS.c.state)
    with database.reading() as connection:
        query = permissions.readable(connection, query)
        return {str(state): int(count) for state, count in connection.execute(query)}


def read_spec(database: Database, run: str) -> Mapping[str, Any]:
    with database.reading() as connection:
        spec: Mapping[str, Any] = run_row(connection, run)["spec"]
    return spec


def checkpoint_sections(database: Database, uids: Sequence[str]) -> dict[str, Any]:
    """Return the `checkpoint` section of the runs' specs by uid; None where a spec has none."""
    query = select(tables.RUNS.c.uid, documents.valid_json(tables.RUNS.c.spec)["checkpoint"]).where(
        tables.RUNS.c.uid.in_(uids)
    )
    with database.reading() as connection:
        return dict(connection.execute(query).tuples().all())


def show_run(database: Database, run: str, *, now: float | None = None) -> views.RunView:
    """Return one run; the goodput of a live run covers the time until `now` (Unix seconds)."""
    with database.reading() as connection:
        row = run_row(connection, run)
        attempts = rows_of(connection, _ATTEMPTS, run_uid=row["uid"])
        launches = _launches(connection, row)
        is_live = RunState(row["state"]).is_live
        # A live run's account grows with the clock, so the stored one is too old.
        goodput = None if is_live else row["goodput"]
        spec = spec_of(row["spec"])
        has_places = spec is not None and bool(spec.resources.fallbacks)
        is_counted = goodput and not has_places
        spans = [] if is_counted else _known_spans(connection, row, attempts, launches)
        consumers = newest_consumers(connection, row)
    times = {
        "created_at": row["created_at"],
        "until": (None if is_live else row["ended_at"]) or now or time.time(),
        "prices": prices_of(row["spec"]),
        "safe_step": _safe_step(attempts),
    }
    goodput = goodput or asdict(account(spans, **times))
    stretches = stretches_of(spans, spec.resources, **times) if spec and has_places else []
    shown = [
        views.attempt_view(one, launches[one["number"]], _size(spec, one["world_size"]))
        for one in attempts
    ]
    places = [cast(views.StretchView, one.as_json()) for one in stretches]
    return views.run_view(row, shown, goodput, places, consumers)


def timeline(database: Database, run: str, *, now: float) -> list[reports.Segment]:
    """Return what each attempt of a run did and when, with the parts of the run's goodput.

    `now` is Unix seconds.
    """
    with database.reading() as connection:
        row = run_row(connection, run)
        attempts = rows_of(connection, _ATTEMPTS, run_uid=row["uid"])
        spans = _known_spans(connection, row, attempts, _launches(connection, row))
    until = (None if RunState(row["state"]).is_live else row["ended_at"]) or now
    seen_min_s = max(0.0, until - row["created_at"]) / TIMELINE_PARTS
    found = segments(
        spans,
        created_at=row["created_at"],
        until=until,
        blocked_s_min=seen_min_s,
        safe_step=_safe_step(attempts),
    )
    return [
        reports.Segment(
            attempt=attempts[one.span]["number"],
            part=one.part,
            began_at=views.iso_time(one.began_at),
            ended_at=views.iso_time(one.ended_at),
        )
        for one in found
    ]


def lineage_graph(database: Database, run: str) -> views.Graph:
    """Return the lineage graph of a run.

    The nodes are the run, its attempts and its checkpoints, and all that their edges reach: the
    checkpoint from which the run was forked and its ancestors, the run's forks, its exports, the
    consumers of its checkpoints, and the weights that it was imported from.
    """
    with database.reading() as connection:
        row = run_row(connection, run)
        saved, parents, origins = _own_checkpoints(connection, row)
        attempts = rows_of(connection, _ATTEMPTS, run_uid=row["uid"])
        edges = _edges_about(connection, row)
        children = _children(connection, row)
        origins |= {(one["target_uid"], one["target"]) for one in edges}
        foreign = _ancestors_elsewhere(connection, row, origins)
        consumers, consumed = consumer_nodes(connection, row)
    nodes = [
        views.run_node(row),
        *(views.attempt_node_of(row["run"], attempt) for attempt in attempts),
        *saved,
        *(views.checkpoint_node(one["run"], one) for one in foreign),
        *consumers,
    ]
    parents += [
        {"from": f"{one['run']}:{one['name']}", "to": one["parent"], "kind": EdgeKind.PARENT.value}
        for one in (*children, *foreign)
        if one["parent"]
    ]
    shown = [*map(_edge, edges), *parents, *consumed]
    by_id: dict[str, views.Node] = {}
    for node in nodes:
        by_id.setdefault(node["id"], node)
    for edge in shown:
        if edge["from"] not in by_id:
            by_id[edge["from"]] = _other_node(edge["from"], None)
        if edge["to"] not in by_id:
            by_id[edge["to"]] = _other_node(edge["to"], _OUTSIDE.get(edge["kind"]))
    unique = {tuple(edge.values()): edge for edge in shown}
    return views.Graph(nodes=list(by_id.values()), edges=list(unique.values()))


def _own_checkpoints(
    connection: Connection, run: Row
) -> tuple[list[views.Node], list[views.Edge], set[_Key]]:
    """Return a run's checkpoints, the edges to their parents, and their parents in other runs."""
    uid, kind = run["uid"], EdgeKind.PARENT.value
    own, folder = run["run"], f"{RunPaths(Path(run['directory'])).checkpoints}/"
    nodes: list[views.Node] = []
    edges: list[views.Edge] = []
    origins: set[_Key] = set()
    # There may be ten thousand, so keep this one plain pass over tuples.
    for row in connection.execute(_DRAWN, {"run_uid": uid}).all():
        name, step, state, world_size, pinned, rolled_back, parent, parent_uid, parent_name = row
        identity = f"{own}:{name}"
        nodes.append(
            {
                "id": identity,
                "kind": "checkpoint",
                "run": own,
                "step": step,
                "state": state,
                "world_size": world_size,
                "pinned": pinned,
                "rolled_back": rolled_back,
                "path": folder + name,
            }
        )
        if parent:
            edges.append({"from": identity, "to": parent, "kind": kind})
        if parent_uid != uid:
            origins.add((parent_uid, parent_name))
    return nodes, edges, origins


def _ancestors_elsewhere(connection: Connection, run: Row, origins: set[_Key]) -> list[Row]:
    """Return those of `origins` that are checkpoints of other runs, and their ancestors."""
    return [
        one
        for uid, name in sorted(key for key in origins if key[0] not in {None, run["uid"]})
        for stretch in descent(connection, uid, name)
        for one in stretch.mappings()
    ]


def _launches(connection: Connection, run: Row) -> defaultdict[int, list[Row]]:
    launches: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows_of(connection, _LAUNCHES, run_uid=run["uid"]):
        launches[row["attempt"]].append(row)
    return launches


def _safe_step(attempts: Sequence[Row]) -> int:
    return max((attempt["committed_step"] or 0 for attempt in attempts), default=0)


def _known_spans(
    connection: Connection, run: Row, attempts: Sequence[Row], launches: Mapping[int, Sequence[Row]]
) -> Sequence[Span]:
    """Return `_spans`, from the cache if the run's fingerprint has not changed.

    A long run has a journal line for every save, and many pages may show the same live run.
    """
    # Rows with the same fingerprint were built from the same content of the folder.
    key = run["uid"], run["fingerprint"]
    with _KEEPING_SPANS:
        kept = _SPANS.setdefault(connection.engine, {})
        spans = kept.get(key)
    # Rows under construction have no fingerprint, so nothing must be cached by it.
    if spans is None or not run["fingerprint"]:
        spans = tuple(_spans(connection, run, attempts, launches))
        with _KEEPING_SPANS:
            while len(kept) >= SPANS_MAX:
                del kept[next(iter(kept))]
            kept[key] = spans
    return spans


def _spans(
    connection: Connection, run: Row, attempts: Sequence[Row], launches: Mapping[int, Sequence[Row]]
) -> list[Span]:
    """Return the attempts in the form that the goodput account needs."""
    columns = tables.EVENTS.c
    query = (
        select(columns.attempt, columns.kind, columns.time, columns.data)
        .where(columns.run_uid == run["uid"])
        .where(columns.kind.in_(KINDS), columns.attempt.is_not(None))
        .order_by(columns.time, columns.journal, columns.opening, columns.sequence)
    )
    marks = [TimelineMark(*row) for row in connection.execute(query)]
    records = [(one["attempt"], one["number"], one) for own in launches.values() for one in own]
    launch_spans = launches_of(marks, records)
    times = ("submitted_at", "started_at", "stop_requested_at", "ended_at")
    fields = (*times, "resumed_step", "last_step")
    spec = spec_of(run["spec"])
    places = _places(connection, run) if spec and spec.resources.fallbacks else {}
    return [
        Span(
            gpus=spec.gpus_held(attempt["world_size"] or 0) if spec else attempt["world_size"],
            **{field: attempt[field] for field in fields},
            place=(place := places.get(attempt["number"], 0)),
            gpu_hour=spec.resources.gpu_hour_at(place) if spec else None,
            is_preempted=attempt["cause"] == Cause.PREEMPTION,
            launches=launch_spans.get(attempt["number"], ()),
        )
        for attempt in attempts
    ]


def _places(connection: Connection, run: Row) -> dict[int, int]:
    query = (
        select(tables.EVENTS.c.attempt, tables.EVENTS.c.data)
        .where(tables.EVENTS.c.run_uid == run["uid"])
        .where(
            tables.EVENTS.c.kind == EventKind.ATTEMPT_RESERVED, tables.EVENTS.c.attempt.is_not(None)
        )
    )
    return {
        number: facts.get("place") or 0
        for number, facts in connection.execute(query)
        if problem_with_facts(EventKind.ATTEMPT_RESERVED, facts) is None
    }


def _size(spec: RunSpec | None, world_size: int) -> int:
    """Return the GPUs of an attempt of `world_size` ranks; one per rank if that is unknown."""
    size = spec.size_of(world_size) if spec and world_size else None
    return world_size if size is None else size


def _edges_about(connection: Connection, run: Row) -> list[Row]:
    """Return the edges that begin or end at this run or its parts, from all readable folders."""
    uid = run["uid"]
    about = or_(tables.EDGES.c.source_uid == uid, tables.EDGES.c.target_uid == uid)
    order = (
        tables.EDGES.c.kind,
        tables.EDGES.c.source_run,
        tables.EDGES.c.source,
        tables.EDGES.c.target,
        tables.EDGES.c.id,
    )
    # By the run that recorded the edge. Its other end may be a run that this account may not read.
    query = permissions.readable(
        connection, select(tables.EDGES).where(about), tables.EDGES.c.run_uid
    )
    return rows_of(connection, query.order_by(*order))


def _children(connection: Connection, run: Row) -> list[Row]:
    """Return the checkpoints of other runs whose parent is a checkpoint of this run."""
    columns = tables.CHECKPOINTS.c
    query = (
        select(columns.name, columns.parent, tables.RUNS.c.run)
        .join(tables.RUNS, tables.RUNS.c.uid == columns.run_uid)
        .where(columns.parent_uid == run["uid"], columns.run_uid != run["uid"])
        .order_by(tables.RUNS.c.run, columns.name)
    )
    return rows_of(connection, permissions.readable(connection, query))


def _edge(row: Row) -> views.Edge:
    source = f"{row['source_run']}:{row['source']}" if row["source"] else row["source_run"]
    target = f"{row['target_run']}:{row['target']}" if row["target_run"] else row["target"]
    return {"from": source, "to": target, "kind": row["kind"]}


def _other_node(identity: str, kind: str | None) -> views.Node:
    """Return a node for the end of an edge that has no row in the index.

    `kind` is that of a path outside of all runs, else None.
    """
    if kind is not None:
        return views.Node(id=identity, kind=kind, path=identity)
    run, _, name = identity.rpartition(":")
    if CheckpointName.parse(name):
        return views.Node(id=identity, kind="checkpoint", run=run)
    if name.startswith("attempt-"):
        return views.Node(id=identity, kind="attempt", run=run)
    return views.Node(id=identity, kind="run", run=identity)
