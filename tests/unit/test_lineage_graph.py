"""What a lineage graph of many checkpoints costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sqlalchemy import insert, select
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.lineage.database.tables import CHECKPOINTS, EVENTS
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.queries.durability import add_durability
from holdfast.lineage.queries.run_queries import lineage_graph

SAVES: Final = 6000
TRIES: Final = 3


def make_mirrored(database: Database, root: Path) -> None:
    """Index a run whose `SAVES` checkpoints are all on the mirror."""
    run = RunFolder(root, "gpt", "a" * 32)
    run.submit(1, 1, T0)
    run.claim(1, T0)
    first = run.commit(1, 1, at=T0)
    run.tell("cli", EventKind.MIRRORED, checkpoint=first)
    reindex(database, root)
    with database.writing() as connection:
        saved = dict(connection.execute(select(CHECKPOINTS)).mappings().one())
        line = dict(
            connection.execute(select(EVENTS).where(EVENTS.c.kind == str(EventKind.MIRRORED)))
            .mappings()
            .one()
        )
        names = [f"step-{step:08d}.a0001.l01" for step in range(2, SAVES + 1)]
        rows = [
            {**saved, "name": name, "step": step, "path": f"{saved['path']}-{step}"}
            for step, name in enumerate(names, 2)
        ]
        connection.execute(insert(CHECKPOINTS), rows)
        lines = [
            {**line, "sequence": 100 + number, "data": {**line["data"], "checkpoint": name}}
            for number, name in enumerate(names)
        ]
        connection.execute(insert(EVENTS), lines)


def least_s(ask: Callable[[], object]) -> float:
    """The least processor time of a few tries, seconds."""
    found = []
    for _ in range(TRIES):
        began = time.process_time()
        ask()
        found.append(time.process_time() - began)
    return min(found)


def test_durability_of_a_graph_costs_no_more_than_the_graph_itself(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path / 'index.db'}") as database:
        make_mirrored(database, tmp_path / "runs")
        graph = lineage_graph(database, "gpt")
        shown = add_durability(database, "gpt", graph)
        mirrored = [node for node in shown["nodes"] if node.get("mirrored")]
        assert len(mirrored) == SAVES
        # One merge of all states for each checkpoint took thirteen times as long as the graph.
        assert least_s(lambda: add_durability(database, "gpt", graph)) < 3 * least_s(
            lambda: lineage_graph(database, "gpt")
        )
