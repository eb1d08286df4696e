"""Every query uses an index, according to the databases' query plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tests.support.postgres import PostgresServer
from tests.support.runs import T0, RunFolder, build_sample_runs

from holdfast.contracts.states import RunState
from holdfast.lineage.database import tables
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.states import CheckpointState
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import pages, run_queries
from holdfast.lineage.queries.comparison import compare, list_files
from holdfast.lineage.queries.durability import add_durability, list_with_status
from holdfast.lineage.queries.totals import list_nodes, metric_series, node_faults

TABLES = {table.name for table in tables.TABLES}
CHECKPOINT = "gpt:step-00000200.a0003.l01"
OTHER = "gpt-b:step-00000150.a0001.l01"
Statement = tuple[str, Any]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    for _ in build_sample_runs(tmp_path / "runs"):
        pass
    if request.param == "sqlite":
        with open_database(f"sqlite:///{tmp_path / 'index.db'}") as opened:
            yield opened
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as address:
        upgrade(address)
        with open_database(address) as opened:
            yield opened


def questions(database: Database, root: Path) -> list[Callable[[], object]]:
    """All queries of the product, with every filter and from a later page."""
    runs = pages.RunFilter(
        states=(RunState.COMPLETED,), search="g", created_from=T0, created_to=T0 + 9, root=root
    )
    checkpoints = pages.CheckpointFilter(
        states=(CheckpointState.COMMITTED,), pinned=False, step_from=1, step_to=900
    )
    lines = pages.EventFilter(kinds=("committed",), attempt=1)

    def later(ask: Callable[..., Any], *given: Any, **options: Any) -> Callable[[], object]:
        def both() -> object:
            first = ask(database, *given, **options, limit=1)
            return ask(database, *given, **options, after=first.next, limit=1)

        return both

    return [
        *(later(pages.list_runs, sort=sort) for sort in pages.INDEXED),
        *(lambda s=sort: pages.list_runs(database, runs, sort=s) for sort in pages.INDEXED),
        lambda: pages.list_runs(database, pages.RunFilter(states=(RunState.RUNNING,))),
        later(pages.list_checkpoints, "gpt"),
        later(pages.list_checkpoints, "gpt", newest_first=False),
        lambda: pages.list_checkpoints(database, "gpt", checkpoints),
        later(pages.list_events, "gpt"),
        lambda: pages.list_events(database, "gpt", lines),
        later(pages.list_storage),
        later(list_nodes),
        lambda: node_faults(database, "node-a"),
        lambda: metric_series(database, "gpt"),
        lambda: compare(database, CHECKPOINT, OTHER),
        lambda: list_files(database, CHECKPOINT),
        lambda: pages.list_runs(database, pages.RunFilter(root=root), limit=None),
        lambda: pages.list_runs(database, limit=5),
        lambda: pages.newest_lines(database, "a" * 32, [("committed", "staged"), ("note",)], 5),
        lambda: run_queries.checkpoint_sections(database, ["a" * 32]),
        lambda: run_queries.show_run(database, "a" * 32),
        lambda: run_queries.show_run(database, str(root / "gpt")),
        lambda: pages.list_checkpoints(database, "gpt", limit=None),
        lambda: run_queries.lineage_graph(database, "gpt"),
        lambda: add_durability(database, "gpt-b", run_queries.lineage_graph(database, "gpt-b")),
        lambda: list_with_status(database, "gpt", limit=5),
        lambda: pages.newest_on_branch(database, "a" * 32),
        lambda: run_queries.ancestry(database, CHECKPOINT),
    ]


def collect(database: Database, ask: Callable[[], object]) -> list[Statement]:
    """The statements that a query sends, with their parameters."""
    said: list[Statement] = []

    def note(_c: Any, _k: Any, statement: str, parameters: Any, _x: Any, many: bool) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH", "INSERT", "DELETE", "UPDATE")):
            said.append((statement, parameters[0] if many else parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
    return said


def full_scans(database: Database, statement: Statement) -> list[str]:
    """The parts of a statement's plan that read a whole table of ours."""
    with database.writing() as connection:
        if database.is_postgresql:
            # Full scans of small tables are fine; the test is whether an index would be used for
            # large ones.
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement[0]}", statement[1])
            found = plan.scalar()
            nodes = walk_plan(json.loads(found) if isinstance(found, str) else found)
            return [
                f"Seq Scan on {node['Relation Name']}"
                for node in nodes
                if node.get("Node Type") == "Seq Scan" and node.get("Relation Name") in TABLES
            ]
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement[0]}", statement[1])
        lines = [str(row[3]) for row in plan]
    return [line for line in lines if line.startswith("SCAN") and is_table(line.split()[1], line)]


def is_table(name: str, line: str) -> bool:
    """True if a line of SQLite's plan is a full scan of one of our tables, also by its alias."""
    return "USING" not in line and (name in TABLES or name in {"source", "older"})


def walk_plan(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, list):
        for item in part:
            yield from walk_plan(item)
    elif isinstance(part, dict):
        yield part
        for item in part.values():
            yield from walk_plan(item)


def test_every_statement_uses_an_index(database: Database, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folder = RunFolder(root, "gpt-c", "c" * 32, {"checkpoint": {"keep": {"last": 1}}})

    def train() -> None:
        folder.submit(1, 2, T0)
        folder.commit(10, 1)
        folder.log(1, 1, range(9), T0)

    def train_on() -> None:
        folder.log(1, 1, range(9, 2000), T0 + 9)
        folder.delete("step-00000010.a0001.l01", "no rule keeps it")

    asks: list[Callable[[], object]] = [lambda: reindex(database, root)]
    for change in (lambda: None, train, train_on):
        asks += [change, lambda: ingest_run(database, folder.paths)]
    asks += questions(database, root)
    statements = {}
    for ask in asks:
        statements.update({said[0]: said for said in collect(database, ask)})
    assert len(statements) > 40
    bad = {
        text: scans for text, said in statements.items() if (scans := full_scans(database, said))
    }
    assert not bad, "\n\n".join(f"{scans}\n{text}" for text, scans in bad.items())


def test_full_table_scan_is_detected(database: Database) -> None:
    """The check reports a query by a column without an index."""
    placeholder = "%(x)s" if database.is_postgresql else "?"
    parameters: Any = {"x": "me"} if database.is_postgresql else ("me",)
    statement = f"SELECT uid FROM runs WHERE created_by = {placeholder}"
    assert full_scans(database, (statement, parameters))
