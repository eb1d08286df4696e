"""Why the checkpoints of a run are kept or would be deleted, according to the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, or_, select, true

from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.states import AttemptState, RunState
from holdfast.lineage.database.permissions import may_see
from holdfast.lineage.database.states import CheckpointState, EdgeKind
from holdfast.lineage.database.tables import ATTEMPTS, CHECKPOINTS, EDGES, RUNS
from holdfast.lineage.ingest.reasons import explain
from holdfast.lineage.queries.find import Row, rows_of

# The columns that the keep rules need.
_RULE_COLUMNS = ("name", "step", "committed_at", "metrics", "state", "rolled_back")


def reasons_of(connection: Connection, run: Row, checkpoints: Sequence[Row]) -> list[str]:
    """Return why each of `checkpoints`, which belong to `run`, is kept or was deleted."""
    keep = keep_of(run)
    branch = _branch(connection, run, whole=keep.is_limited)
    return explain(checkpoints, _uses(connection, run), keep, branch=branch)


def keep_of(run: Row) -> Keep:
    """Return the keep rules of a run's spec."""
    keep = (run["spec"].get("checkpoint") or {}).get("keep") or {}
    return Keep.read(keep)


def _branch(connection: Connection, run: Row, *, whole: bool) -> list[Row]:
    """Return the checkpoints the run can resume from, oldest first; unless `whole`, the newest."""
    columns = CHECKPOINTS.c
    order = (columns.step, columns.attempt, columns.launch)
    query = select(*(columns[name] for name in _RULE_COLUMNS)).where(
        columns.run_uid == run["uid"],
        columns.state == CheckpointState.COMMITTED.value,
        columns.rolled_back.is_(False),
    )
    if not whole:
        query = query.limit(1)
    found = rows_of(connection, query.order_by(*(column.desc() for column in order)))
    return found[::-1]


def _uses(connection: Connection, run: Row) -> dict[str, list[str]]:
    """Return the other uses of this run's checkpoints, by directory name."""
    uses: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name, use in (*_resumes(connection, run), *_exports_and_forks(connection, run)):
        uses[name][use] = None
    return {name: list(texts) for name, texts in uses.items()}


def _resumes(connection: Connection, run: Row) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints that live attempts resumed from."""
    ended = [str(state) for state in AttemptState if state.is_terminal]
    resumed = select(ATTEMPTS.c.number, ATTEMPTS.c.resumed_from).where(
        ATTEMPTS.c.run_uid == run["uid"],
        ATTEMPTS.c.state.not_in(ended),
        ATTEMPTS.c.resumed_from.is_not(None),
    )
    for number, identity in connection.execute(resumed):
        yield identity.rpartition(":")[2], f"in use: attempt {number} resumed from it"


def _exports_and_forks(connection: Connection, run: Row) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints that were exported, and those that live runs were forked from."""
    live = [str(state) for state in RunState if state.is_live]
    source = RUNS.alias("source")
    seen = may_see(connection, EDGES.c.run_uid)
    is_seen = (true() if seen is None else seen).label("is_seen")
    query = (
        select(EDGES, source.c.state, is_seen)
        .outerjoin(source, source.c.uid == EDGES.c.source_uid)
        .where(or_(EDGES.c.target_uid == run["uid"], EDGES.c.source_uid == run["uid"]))
        .where(EDGES.c.kind.in_([EdgeKind.EXPORTED_TO.value, EdgeKind.FORKED_FROM.value]))
        .order_by(EDGES.c.id)
    )
    for edge in rows_of(connection, query):
        # A fork that is not in the index may be live.
        is_live = edge["state"] in (None, *live)
        if edge["kind"] == EdgeKind.EXPORTED_TO and edge["source_uid"] == run["uid"]:
            yield edge["source"], f"exported to {edge['target']}"
        elif edge["kind"] == EdgeKind.FORKED_FROM and edge["target_uid"] == run["uid"] and is_live:
            fork = f"run {edge['source_run']}" if edge["is_seen"] else "a run that you may not read"
            yield edge["target"], f"in use as the parent of {fork}"
