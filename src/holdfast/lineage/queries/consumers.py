"""The consumers of a run's checkpoints, from the journal lines in the index."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Select, select
from sqlalchemy import Row as RowTuple

from holdfast.contracts.disk.journal import EventKind, problem_with_facts
from holdfast.contracts.disk.paths import RunPaths, checkpoint_id
from holdfast.contracts.records.consumers import Use, use_in
from holdfast.lineage.database.documents import valid_json
from holdfast.lineage.database.states import EdgeKind
from holdfast.lineage.database.tables import EVENTS, IN_ORDER
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import views
from holdfast.lineage.queries.find import Row, checkpoint_row

# Besides those that are not done yet, a run shows this many.
SHOWN_MAX: Final = 20
# A page reads the newest lines of a live run again and again.
LINES_MAX: Final = 2000

Key = tuple[str, str]


def newest_consumers(connection: Connection, run: Row) -> list[views.ConsumerView]:
    """Return the newest consumers of a run's checkpoints and those that are open, oldest first."""
    if not _wanted(run):
        return []
    lines = connection.execute(_lines(run, EventKind.CONSUMER, None, LINES_MAX)).all()
    uses = sorted(_uses(reversed(lines)), key=lambda use: use.at)
    shown = [one for one in uses[:-SHOWN_MAX] if one.state.is_open] + uses[-SHOWN_MAX:]
    return _views(connection, run, shown)


def consumers_of(database: Database, identity: str) -> list[views.ConsumerView]:
    """Return the consumers of one checkpoint. Raises `NotFoundError` for an unknown checkpoint."""
    with database.reading() as connection:
        run, row = checkpoint_row(connection, identity)
        lines = _lines(run, EventKind.CONSUMER, [row["name"]])
        return _views(connection, run, _uses(connection.execute(lines)))


def consumer_nodes(connection: Connection, run: Row) -> tuple[list[views.Node], list[views.Edge]]:
    """Return a node for each consumer of each checkpoint, and the edges that lead to them."""
    nodes: list[views.Node] = []
    edges: list[views.Edge] = []
    for use in _uses(connection.execute(_lines(run, EventKind.CONSUMER))):
        node = views.consumer_node(run["run"], use)
        nodes.append(node)
        source = checkpoint_id(run["run"], use.checkpoint)
        edges.append({"from": source, "to": node["id"], "kind": EdgeKind.CONSUMED_BY.value})
    return nodes, edges


def _wanted(run: Row) -> Mapping[str, Mapping[str, Any]]:
    """Return the consumers in a run's spec, by their names."""
    found = run["spec"].get("on")
    tables = found if isinstance(found, list) else []
    return {str(one.get("name")): one for one in tables if isinstance(one, dict)}


def _lines(
    run: Row,
    kind: EventKind,
    checkpoints: Collection[str] | None = None,
    newest: int | None = None,
) -> Select[Any]:
    columns = EVENTS.c
    query = select(columns.time, columns.data).where(
        columns.run_uid == run["uid"], columns.kind == str(kind)
    )
    if checkpoints is not None:
        # A metric that a person reported may name its checkpoint with the run.
        names = [*checkpoints, *(checkpoint_id(run["run"], one) for one in checkpoints)]
        query = query.where(valid_json(columns.data)["checkpoint"].as_string().in_(names))
    if newest is not None:
        return query.order_by(*(column.desc() for column in IN_ORDER)).limit(newest)
    return query.order_by(*IN_ORDER)


def _uses(lines: Iterable[RowTuple[Any]]) -> list[Use]:
    """Return the newest state of each consumer of each checkpoint. `lines` are oldest first."""
    kind = EventKind.CONSUMER
    sound = ((time, data) for time, data in lines if problem_with_facts(kind, data) is None)
    found = (use_in(data, time) for time, data in sound)
    uses = {(use.consumer, use.checkpoint): use for use in found if use is not None}
    return list(uses.values())


def _views(connection: Connection, run: Row, uses: Sequence[Use]) -> list[views.ConsumerView]:
    wanted, paths = _wanted(run), RunPaths(Path(run["directory"]))
    metrics = _metrics(connection, run, uses)
    return [
        views.ConsumerView(
            name=use.consumer,
            event=str(wanted.get(use.consumer, {}).get("event") or "commit"),
            checkpoint=checkpoint_id(run["run"], use.checkpoint),
            step=use.step,
            state=str(use.state),
            tries=use.tries,
            start=use.start,
            log=str(paths.consumer(use.start).log) if use.start else None,
            reason=use.reason,
            changed_at=views.iso_time(use.at),
            metrics=metrics.get((use.consumer, use.checkpoint), {}),
        )
        for use in uses
    ]


def _metrics(
    connection: Connection, run: Row, uses: Iterable[Use]
) -> dict[Key, dict[str, float | str]]:
    """Return what consumers reported, by (consumer, checkpoint)."""
    found: dict[Key, dict[str, float | str]] = {}
    names = {use.checkpoint for use in uses}
    if not names:
        return found
    for _, data in connection.execute(_lines(run, EventKind.METRIC, names)):
        if problem_with_facts(EventKind.METRIC, data) is None and data.get("consumer"):
            key = str(data["consumer"]), str(data["checkpoint"]).rpartition(":")[2]
            found.setdefault(key, {})[str(data["metric"])] = data["value"]
    return found
