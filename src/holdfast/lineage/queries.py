"""Questions to the index. Every answer is a plain dictionary or a list of them; see `views`."""

from __future__ import annotations

import difflib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, Select, and_, func, or_, select

from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.goodput import Span, account, prices_of
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.spec import Keep
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.contracts.timeline import KINDS, Mark, launches_of
from holdfast.lineage import views
from holdfast.lineage.database import Database
from holdfast.lineage.ingest import ATTEMPTS, CHECKPOINTS, EDGES, EVENTS, INCARNATIONS, RUNS
from holdfast.lineage.models import EdgeKind
from holdfast.lineage.reasons import explain

NAMES_SUGGESTED_MAX: Final = 3
NAMES_SEARCHED_MAX: Final = 1000
EVENTS_MAX: Final = 1000

Row = dict[str, Any]


class RunRef(BaseModel):
    """Which run is meant."""

    model_config = ConfigDict(frozen=True)

    uid: str
    run: str
    name: str
    root: str
    directory: str
    state: RunState

    @property
    def paths(self) -> RunPaths:
        """The run's folder."""
        return RunPaths(Path(self.directory))


def find_run(database: Database, name: str, root: Path | None = None) -> RunRef:
    """The run that `name` means: its uid, its folder's path or name, or the newest of the name.

    Names can repeat from root to root: one under `root` is preferred, then the newest. Raises
    `NotFoundError`, which names what is near.
    """
    with database.reading() as connection:
        return _ref(_find(connection, name, root))


def find_checkpoint(
    database: Database, identity: str, root: Path | None = None
) -> tuple[RunRef, str]:
    """(run, directory's name) of a checkpoint given as `run:directory` or as a path.

    Raises `NotFoundError` when the index has no such checkpoint.
    """
    with database.reading() as connection:
        run, row = _find_checkpoint(connection, identity, root)
        return _ref(run), row["name"]


def list_runs(
    database: Database, *, root: Path | None = None, limit: int | None = None
) -> list[views.RunSummary]:
    """All runs, newest first; of one root, or so many at most, when those are given."""
    query = select(RUNS).order_by(RUNS.c.created_at.desc(), RUNS.c.uid).limit(limit)
    if root is not None:
        query = query.where(RUNS.c.root == _plain(root))
    with database.reading() as connection:
        runs = _rows(connection, query)
        chosen = query.with_only_columns(RUNS.c.uid)
        counts = (
            select(
                ATTEMPTS.c.run_uid,
                func.max(ATTEMPTS.c.number).label("newest"),
                func.count().label("count"),
            )
            .where(ATTEMPTS.c.run_uid.in_(chosen))
            .group_by(ATTEMPTS.c.run_uid)
            .subquery()
        )
        newest = select(ATTEMPTS, counts.c.count).join(
            counts,
            and_(ATTEMPTS.c.run_uid == counts.c.run_uid, ATTEMPTS.c.number == counts.c.newest),
        )
        last = {row["run_uid"]: row for row in _rows(connection, newest)}
    summaries = []
    for run in runs:
        attempt = last.get(run["uid"])
        summaries.append(views.run_summary(run, attempt, attempt["count"] if attempt else 0))
    return summaries


def show_run(
    database: Database, run: str, *, root: Path | None = None, now: float | None = None
) -> views.RunView:
    """All about one run; `now` (Unix seconds) ends the account of one that is still live."""
    with database.reading() as connection:
        row = _find(connection, run, root)
        attempts = _rows(connection, _of_run(ATTEMPTS, row, ATTEMPTS.c.number))
        launches = _launches(connection, row)
        spans = _spans(connection, row, attempts, launches)
    is_live = RunState(row["state"]).is_live
    ended_at = None if is_live else row["ended_at"]
    goodput = account(
        spans,
        created_at=row["created_at"],
        until=ended_at or now or time.time(),
        prices=prices_of(row["spec"]),
    )
    shown = [
        views.attempt_view(a, [views.incarnation_view(i) for i in launches[a["number"]]])
        for a in attempts
    ]
    return views.run_view(row, shown, goodput)


def list_checkpoints(
    database: Database, run: str, *, root: Path | None = None
) -> list[views.CheckpointView]:
    """All checkpoints that were ever committed in a run, oldest first, the deleted ones too."""
    with database.reading() as connection:
        row = _find(connection, run, root)
        checkpoints = _checkpoints(connection, row)
        uses = _uses(connection, row)
    keep = Keep.model_validate((row["spec"].get("checkpoint") or {}).get("keep") or {})
    reasons = explain(checkpoints, uses, keep)
    return [
        views.checkpoint_view(row["run"], checkpoint, reason)
        for checkpoint, reason in zip(checkpoints, reasons, strict=True)
    ]


def lineage_graph(database: Database, run: str, *, root: Path | None = None) -> views.Graph:
    """What a run came from and what came of it.

    Nodes are the run, its attempts and its checkpoints, and whatever an edge of theirs reaches:
    the checkpoint it was forked from with that one's ancestors, its forks, its exports.
    """
    with database.reading() as connection:
        row = _find(connection, run, root)
        checkpoints = _checkpoints(connection, row)
        attempts = _rows(connection, _of_run(ATTEMPTS, row, ATTEMPTS.c.number))
        edges = _edges_about(connection, row)
        parents = {
            (edge["target_uid"], edge["target"])
            for edge in edges
            if edge["target_uid"] not in {None, row["uid"]}
        }
        foreign = [one for key in sorted(parents) for one in _ancestors(connection, *key)]
    nodes = [
        views.run_node(row),
        *(views.attempt_node_of(row["run"], attempt) for attempt in attempts),
        *(views.checkpoint_node(row["run"], checkpoint) for checkpoint in checkpoints),
        *(views.checkpoint_node(one["run"], one) for one in foreign),
    ]
    shown = [_edge(edge) for edge in edges]
    shown += [
        {"from": f"{one['run']}:{one['name']}", "to": one["parent"], "kind": EdgeKind.PARENT.value}
        for one in foreign
        if one["parent"]
    ]
    by_id = {node["id"]: node for node in reversed(nodes)}
    for edge in shown:
        for end, is_export in ((edge["from"], False), (edge["to"], edge["kind"] == "exported_to")):
            by_id.setdefault(end, _other_node(end, is_export=is_export))
    known = list({node["id"]: None for node in nodes} | dict.fromkeys(by_id))
    unique = {tuple(edge.values()): edge for edge in shown}
    return views.Graph(nodes=[by_id[one] for one in known], edges=list(unique.values()))


def ancestry(
    database: Database, checkpoint_id: str, *, root: Path | None = None
) -> list[views.CheckpointView]:
    """A checkpoint, its parent, that one's parent and so on, through forks, to the first.

    Raises `NotFoundError` when the index has no such checkpoint.
    """
    with database.reading() as connection:
        _, row = _find_checkpoint(connection, checkpoint_id, root)
        chain = _ancestors(connection, row["run_uid"], row["name"])
    return [
        views.checkpoint_view(one["run"], one, one["deleted_reason"] or one["state"])
        for one in chain
    ]


def list_events(
    database: Database, run: str, *, root: Path | None = None, limit: int = EVENTS_MAX
) -> list[views.EventView]:
    """The newest `limit` journal lines of a run, oldest first."""
    with database.reading() as connection:
        row = _find(connection, run, root)
        order = (EVENTS.c.time, EVENTS.c.journal, EVENTS.c.incarnation, EVENTS.c.sequence)
        query = select(EVENTS).where(EVENTS.c.run_uid == row["uid"])
        query = query.order_by(*(column.desc() for column in order)).limit(limit)
        found = _rows(connection, query)
    return [views.event_view(row["run"], event) for event in reversed(found)]


def _plain(root: Path) -> str:
    return str(root.expanduser().resolve())


def _rows(connection: Connection, query: Select[Any]) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _ref(run: Row) -> RunRef:
    return RunRef.model_validate({field: run[field] for field in RunRef.model_fields})


def _of_run(table: Any, run: Row, *order: Any) -> Select[Any]:
    return select(table).where(table.c.run_uid == run["uid"]).order_by(*order)


def _find(connection: Connection, name: str, root: Path | None) -> Row:
    """The run that `name` means, folders' names before spec names, newer before older."""
    matches = [RUNS.c.uid == name, RUNS.c.run == name, RUNS.c.name == name]
    if "/" in name:
        matches = [RUNS.c.directory == _plain(Path(name))]
    newest = RUNS.c.created_at.desc(), RUNS.c.uid
    found = _rows(connection, select(RUNS).where(or_(*matches)).order_by(*newest))
    wanted = _plain(root) if root else None
    # Sorting is stable: within each group the newest stays first.
    found.sort(key=lambda run: (run["root"] != wanted, name not in {run["uid"], run["run"]}))
    if found:
        return found[0]
    names = connection.scalars(select(RUNS.c.run).order_by(*newest).limit(NAMES_SEARCHED_MAX))
    near = difflib.get_close_matches(name, set(names), NAMES_SUGGESTED_MAX)
    hint = f"did you mean {' or '.join(near)}?" if near else "`holdfast runs` lists those there are"
    raise NotFoundError(f"{name}: no such run; {hint}")


def _find_checkpoint(connection: Connection, identity: str, root: Path | None) -> tuple[Row, Row]:
    run_name, _, name = identity.rpartition(":")
    if "/" in identity and not CheckpointName.parse(name):
        directory = Path(identity).expanduser().resolve()
        run_name, name = str(directory.parent.parent), directory.name
    if not run_name or not CheckpointName.parse(name):
        raise NotFoundError(
            f"{identity}: not a checkpoint's id; expected <run>:step-NNNNNNNN.aNNNN.iNN, as "
            "`holdfast checkpoints RUN` lists them, or a checkpoint's directory"
        )
    run = _find(connection, run_name, root)
    query = select(CHECKPOINTS).where(
        CHECKPOINTS.c.run_uid == run["uid"], CHECKPOINTS.c.name == name
    )
    found = _rows(connection, query)
    if not found:
        raise NotFoundError(
            f"{identity}: run {run['run']} has no such committed checkpoint; "
            f"`holdfast checkpoints {run['run']}` lists those there are"
        )
    return run, found[0]


def _checkpoints(connection: Connection, run: Row) -> list[Row]:
    columns = CHECKPOINTS.c
    query = _of_run(CHECKPOINTS, run, columns.step, columns.attempt, columns.incarnation)
    return _rows(connection, query)


def _launches(connection: Connection, run: Row) -> defaultdict[int, list[Row]]:
    """The incarnations of a run by attempt, each attempt's in order."""
    launches: defaultdict[int, list[Row]] = defaultdict(list)
    query = _of_run(INCARNATIONS, run, INCARNATIONS.c.attempt, INCARNATIONS.c.number)
    for row in _rows(connection, query):
        launches[row["attempt"]].append(row)
    return launches


def _spans(
    connection: Connection, run: Row, attempts: Sequence[Row], launches: Mapping[int, Sequence[Row]]
) -> list[Span]:
    """The attempts as the account of the run's time needs them."""
    columns = EVENTS.c
    query = _of_run(EVENTS, run, columns.time, columns.journal, columns.incarnation)
    query = query.order_by(columns.sequence).where(
        columns.kind.in_(KINDS), columns.attempt.is_not(None)
    )
    marks = [Mark(e["attempt"], e["kind"], e["time"], e["data"]) for e in _rows(connection, query)]
    records = [(one["attempt"], one["number"], one) for own in launches.values() for one in own]
    told = launches_of(marks, records)
    times = ("submitted_at", "started_at", "stop_requested_at", "ended_at")
    fields = ("world_size", *times, "resumed_step", "last_step")
    return [
        Span(
            **{field: attempt[field] for field in fields},
            is_preempted=attempt["cause"] == Cause.PREEMPTION,
            launches=told.get(attempt["number"], ()),
        )
        for attempt in attempts
    ]


def _edges_about(connection: Connection, run: Row) -> list[Row]:
    """Edges that begin or end at this run or at anything in it, whichever folder told them."""
    uid = run["uid"]
    about = or_(EDGES.c.source_uid == uid, EDGES.c.target_uid == uid)
    order = (EDGES.c.kind, EDGES.c.source_run, EDGES.c.source, EDGES.c.target, EDGES.c.id)
    return _rows(connection, select(EDGES).where(about).order_by(*order))


def _edge(row: Row) -> views.Edge:
    source = f"{row['source_run']}:{row['source']}" if row["source"] else row["source_run"]
    target = f"{row['target_run']}:{row['target']}" if row["target_run"] else row["target"]
    return {"from": source, "to": target, "kind": row["kind"]}


def _other_node(identity: str, *, is_export: bool) -> views.Node:
    """A node that an edge names and that this index holds no row of."""
    if is_export:
        return views.Node(id=identity, kind="export", path=identity)
    run, _, name = identity.rpartition(":")
    if CheckpointName.parse(name):
        return views.Node(id=identity, kind="checkpoint", run=run)
    if name.startswith("attempt-"):
        return views.Node(id=identity, kind="attempt", run=run)
    return views.Node(id=identity, kind="run", run=identity)


def _uses(connection: Connection, run: Row) -> dict[str, list[str]]:
    """By directory's name, what else needs a checkpoint of this run."""
    live = [str(state) for state in RunState if state.is_live]
    source = RUNS.alias("source")
    query = (
        select(EDGES, source.c.state)
        .outerjoin(source, source.c.uid == EDGES.c.source_uid)
        .where(or_(EDGES.c.target_uid == run["uid"], EDGES.c.run_uid == run["uid"]))
        .order_by(EDGES.c.id)
    )
    uses: dict[str, dict[str, None]] = defaultdict(dict)
    ended = [str(state) for state in AttemptState if state.is_terminal]
    resumed = select(ATTEMPTS.c.number, ATTEMPTS.c.resumed_from).where(
        ATTEMPTS.c.run_uid == run["uid"],
        ATTEMPTS.c.state.not_in(ended),
        ATTEMPTS.c.resumed_from.is_not(None),
    )
    for number, identity in connection.execute(resumed):
        uses[identity.rpartition(":")[2]][f"in use: attempt {number} resumed from it"] = None
    for edge in _rows(connection, query):
        # A fork whose folder this index has not seen may be live for all it knows.
        is_live = edge["state"] in (None, *live)
        if edge["kind"] == EdgeKind.EXPORTED_TO and edge["source_uid"] == run["uid"]:
            uses[edge["source"]][f"exported to {edge['target']}"] = None
        elif edge["kind"] == EdgeKind.FORKED_FROM and edge["target_uid"] == run["uid"] and is_live:
            uses[edge["target"]][f"in use as the parent of run {edge['source_run']}"] = None
    return {name: list(said) for name, said in uses.items()}


def _ancestors(connection: Connection, uid: str, name: str) -> list[Row]:
    """A checkpoint and its ancestors, each with its run's folder name, from young to old."""
    start = select(CHECKPOINTS.c.run_uid, CHECKPOINTS.c.name).where(
        CHECKPOINTS.c.run_uid == uid, CHECKPOINTS.c.name == name
    )
    chain = start.cte("chain", recursive=True)
    child = CHECKPOINTS.alias("child")
    # UNION, not UNION ALL: an id that was met before is not followed again, so that even a
    # circle in damaged manifests comes to an end.
    chain = chain.union(
        select(child.c.parent_uid, child.c.parent_name)
        .join(chain, and_(child.c.run_uid == chain.c.run_uid, child.c.name == chain.c.name))
        .where(child.c.parent_uid.is_not(None))
    )
    query = (
        select(CHECKPOINTS, RUNS.c.run)
        .join(
            chain,
            and_(CHECKPOINTS.c.run_uid == chain.c.run_uid, CHECKPOINTS.c.name == chain.c.name),
        )
        .join(RUNS, RUNS.c.uid == CHECKPOINTS.c.run_uid)
    )
    found = {(row["run_uid"], row["name"]): row for row in _rows(connection, query)}
    line: list[Row] = []
    key = (uid, name)
    while key in found:
        line.append(found.pop(key))
        key = (line[-1]["parent_uid"], line[-1]["parent_name"])
    return line
