"""The durability status of checkpoints: staged in memory, durable, verified, mirrored.

A checkpoint in the index is durable, because it has a manifest. The other states come from the
journals: a save that was staged but not committed yet, a resume or a `verify` that read every
byte, and a complete copy on the mirror.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, Text, bindparam, cast, func, select
from typing_extensions import TypedDict

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import CheckpointName, checkpoint_id
from holdfast.contracts.states import RunState
from holdfast.lineage.database import documents, permissions, tables
from holdfast.lineage.database.states import EdgeKind
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT, RowPage
from holdfast.lineage.queries.find import RUN_UID, Row, rows_of, run_row
from holdfast.lineage.queries.pages import CheckpointFilter, best_of, checkpoints_of

# A resume that loads a checkpoint compares every byte with the manifest.
RESUME: Final = "resume"
STAGED: Final = "staged"
DURABILITY_EVENTS: Final = (EventKind.RESUMED, EventKind.VERIFIED, EventKind.MIRRORED)
# Each rank has two slots. Saves older than these few are committed or failed.
STAGED_MAX: Final = 8

_DATA: Final = documents.valid_json(tables.EVENTS.c.data)
_CHECKPOINT: Final = _DATA["checkpoint"].as_string()
# SQLite extracts `true` as 1. A cast to a boolean would fail in PostgreSQL for any other text.
_IS_OK: Final = cast(_DATA["ok"].as_string(), Text).in_(("true", "1"))
# Only the keys that are needed: the data of a `resumed` event is long.
_DURABILITY: Final = (
    select(tables.EVENTS.c.kind, tables.EVENTS.c.time, _CHECKPOINT, _IS_OK, _DATA["by"].as_string())
    .where(
        tables.EVENTS.c.run_uid == RUN_UID,
        tables.EVENTS.c.kind.in_([str(kind) for kind in DURABILITY_EVENTS]),
    )
    .order_by(*tables.IN_ORDER)
)
_DURABILITY_OF: Final = _DURABILITY.where(_CHECKPOINT.in_(bindparam("names", expanding=True)))


class DurabilityStatus(TypedDict):
    """When a checkpoint was last verified, with the result, and when it was mirrored.

    `verified_by` is the user who ran the verification, or `resume`.
    """

    verified_ok: bool | None
    verified_at: str | None
    verified_by: str | None
    mirrored_at: str | None


class CheckpointRow(views.CheckpointView, DurabilityStatus):
    """One row of `holdfast checkpoints RUN`, with the checkpoint's durability status.

    `is_best` is true for the one that `RUN:best` names, by the spec's `checkpoint.keep.best`.
    """

    is_best: bool


NOT_DURABLE: Final = DurabilityStatus(
    verified_ok=None, verified_at=None, verified_by=None, mirrored_at=None
)


def list_with_status(
    database: Database,
    run: str,
    where: CheckpointFilter | None = None,
    *,
    newest_first: bool = True,
    after: str | None = None,
    limit: int = PAGE_DEFAULT,
) -> RowPage[CheckpointRow]:
    """Return one page of a run's checkpoints with their durability status.

    Raises what `pages.list_checkpoints` raises.
    """
    with database.reading() as connection:
        row = run_row(connection, run)
        page = checkpoints_of(
            connection, row, where, newest_first=newest_first, after=after, limit=limit
        )
        names = [one["id"].rpartition(":")[2] for one in page.items]
        known = _read_durability(connection, row, names)
        best = best_of(connection, row)
    rows = [
        CheckpointRow(**one, **known.get(name, NOT_DURABLE), is_best=name == best)
        for name, one in zip(names, page.items, strict=True)
    ]
    return RowPage(rows, page.next)


def add_durability(database: Database, run: str, graph: views.Graph) -> views.Graph:
    """Return `graph` with the checkpoints' durability status and with saves still in memory."""
    with database.reading() as connection:
        row = run_row(connection, run)
        durability = _read_durability(connection, row, None)
        staged = _staged(connection, row) if RunState(row["state"]).is_live else []
        others = _durability_of_others(connection, row, graph["nodes"])
    statuses = {checkpoint_id(row["run"], name): own for name, own in durability.items()} | others
    nodes = [_with_status(node, statuses.get(node["id"])) for node in graph["nodes"]]
    edges = list(graph["edges"])
    newest = _newest(nodes, row["run"]) if staged else None
    for node in staged:
        nodes.append(node)
        if newest is not None:
            edges.append({"from": node["id"], "to": newest, "kind": EdgeKind.PARENT.value})
        newest = node["id"]
    return views.Graph(nodes=nodes, edges=edges)


def durability_of(
    lines: Iterable[tuple[str, float, Mapping[str, Any]]], run: str
) -> dict[str, DurabilityStatus]:
    """Return durability by directory name. `lines` are (kind, Unix seconds, data), oldest first."""
    found: dict[str, DurabilityStatus] = {}
    for kind, time, data in lines:
        folder, _, name = str(data.get("checkpoint") or "").rpartition(":")
        # A line may name a checkpoint of another run, such as the origin of a fork.
        if not name or folder not in {"", run}:
            continue
        status = found.setdefault(name, {**NOT_DURABLE})
        if kind == EventKind.MIRRORED:
            status["mirrored_at"] = views.iso(time)
            continue
        is_resume = kind == EventKind.RESUMED
        # A resume that loads a checkpoint has compared every byte of it.
        status["verified_ok"] = is_resume or data.get("ok") is True
        status["verified_at"] = views.iso(time)
        status["verified_by"] = RESUME if is_resume else str(data.get("by") or "") or None
    return found


def _read_durability(
    connection: Connection, run: Row, names: Collection[str] | None
) -> dict[str, DurabilityStatus]:
    wanted: dict[str, Any] = {"run_uid": run["uid"]}
    if names is not None:
        wanted["names"] = [*names, *(checkpoint_id(run["run"], one) for one in names)]
    query = _DURABILITY if names is None else _DURABILITY_OF
    lines = (
        (kind, time, {"checkpoint": checkpoint, "ok": ok, "by": by})
        for kind, time, checkpoint, ok, by in connection.execute(query, wanted)
    )
    return durability_of(lines, run["run"])


def _staged(connection: Connection, run: Row) -> list[views.Node]:
    """Return nodes for the newest launch's saves that are staged but not committed or failed."""
    launch = _newest_launch(connection, run)
    parsed = [CheckpointName.parse(name) for name in _uncommitted(connection, run)]
    saves = [one for one in parsed if one is not None and (one.attempt, one.launch) == launch]
    return [
        views.Node(
            id=checkpoint_id(run["run"], str(one)),
            kind="checkpoint",
            run=run["run"],
            step=one.step,
            state=STAGED,
            pinned=False,
            rolled_back=False,
        )
        for one in sorted(saves, key=lambda one: one.step)
    ]


def _uncommitted(connection: Connection, run: Row) -> list[str]:
    """Return the directory names of the newest saves that were neither committed nor failed."""
    columns = tables.EVENTS.c
    query = (
        select(columns.kind, columns.data)
        .where(columns.run_uid == run["uid"])
        .where(columns.kind.in_([str(EventKind.STAGED), str(EventKind.SAVE_FAILED)]))
        .order_by(columns.time.desc(), columns.sequence.desc())
        .limit(STAGED_MAX)
    )
    lines = [(kind, str(data.get("checkpoint"))) for kind, data in connection.execute(query)]
    staged = dict.fromkeys(name for kind, name in lines if kind == EventKind.STAGED)
    failed = {name for kind, name in lines if kind != EventKind.STAGED}
    names = tables.CHECKPOINTS.c.name
    there = select(names).where(tables.CHECKPOINTS.c.run_uid == run["uid"], names.in_(staged))
    gone = failed | set(connection.scalars(there))
    return [name for name in staged if name not in gone]


def _newest_launch(connection: Connection, run: Row) -> tuple[int, int] | None:
    """Return (attempt, launch) of the newest attempt's newest launch, or None without one."""
    columns = tables.LAUNCHES.c
    query = select(columns.attempt, columns.number).where(columns.run_uid == run["uid"])
    newest = query.order_by(columns.attempt.desc(), columns.number.desc()).limit(1)
    launch = connection.execute(newest).first()
    attempts = select(func.max(tables.ATTEMPTS.c.number)).where(
        tables.ATTEMPTS.c.run_uid == run["uid"]
    )
    # A launch of an earlier attempt has nothing in memory any more.
    if launch is None or launch.attempt != connection.scalar(attempts):
        return None
    return launch.attempt, launch.number


def _durability_of_others(
    connection: Connection, run: Row, nodes: Iterable[views.Node]
) -> dict[str, DurabilityStatus]:
    """Return the durability status, by id, of the checkpoints in a graph from other runs."""
    names: defaultdict[str, dict[str, str]] = defaultdict(dict)
    runs = set()
    for node in nodes:
        if node["kind"] != "checkpoint" or node.get("run") == run["run"]:
            continue
        # Runs in several roots can have the same name, so compare their folders.
        folder, _, name = node.get("path", "").rpartition("/checkpoints/")
        if name:
            names[folder][name] = node["id"]
            runs.add(node["run"])
    query = permissions.readable(
        connection, select(tables.RUNS).where(tables.RUNS.c.run.in_(sorted(runs)))
    )
    return {
        names[other["directory"]][name]: status
        for other in rows_of(connection, query)
        if other["directory"] in names
        for name, status in _read_durability(connection, other, names[other["directory"]]).items()
    }


def _with_status(node: views.Node, status: DurabilityStatus | None) -> views.Node:
    if status is None or node["kind"] != "checkpoint":
        return node
    is_mirrored = status["mirrored_at"] is not None
    return {**node, "verified": status["verified_ok"], "mirrored": is_mirrored}


def _newest(nodes: Iterable[views.Node], run: str) -> str | None:
    """Return the id of the newest checkpoint on the run's branch, or None."""
    own = [
        node
        for node in nodes
        if node["kind"] == "checkpoint" and node.get("run") == run and "step" in node
    ]
    on_branch = [node for node in own if not node.get("rolled_back")]
    return max(on_branch, key=lambda node: node["step"])["id"] if on_branch else None
