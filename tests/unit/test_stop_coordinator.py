"""The stop coordinators of two nodes without an agent."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.node import agreement
from holdfast.contracts.node.rank_status import Proposal, RankStatusTable
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.session import stop_coordinator
from holdfast.trainer.session.stop_coordinator import StopCoordinator

WAIT_S = 30.0


def context_of(folder: Path, node: int, status_table: RankStatusTable) -> RankContext:
    """The part of a rank context that a stop coordinator uses."""
    context = SimpleNamespace(
        identity=SimpleNamespace(node=node, nodes=2),
        attempt=SimpleNamespace(channel=folder / "channel.json"),
        run=SimpleNamespace(stop_file=folder / "stop"),
        status_table=status_table,
    )
    return cast(RankContext, context)


@pytest.mark.timeout(60)
def test_a_node_that_answers_late_stops_with_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_tables = []
    for _ in range(2):
        status_table, handle = RankStatusTable.create(1)
        os.close(handle)
        status_tables.append(status_table)
    answer, held_up = agreement.answer_from_status_table, threading.Event()

    def answer_late(
        status_table: RankStatusTable, question: dict[str, Any]
    ) -> dict[str, Any] | None:
        if not held_up.is_set():
            held_up.set()
            time.sleep(1.0)
        return answer(status_table, question)

    monkeypatch.setattr(agreement, "answer_from_status_table", answer_late)
    monkeypatch.setattr(stop_coordinator, "LOOK_TIMEOUT_S", 0.2)
    noted: list[EventKind] = []
    both = [
        StopCoordinator(
            context_of(tmp_path, node, status_table), lambda kind, **_: noted.append(kind)
        )
        for node, status_table in enumerate(status_tables)
    ]
    try:
        assert held_up.wait(WAIT_S)
        time.sleep(0.5)
        (tmp_path / "stop").touch()
        give_up = time.monotonic() + WAIT_S
        while EventKind.STOP_AGREED not in noted:
            assert time.monotonic() < give_up, noted
            time.sleep(0.02)
    finally:
        for one in both:
            one.close()
    assert [status_table.proposal[0] for status_table in status_tables] == [Proposal.GO] * 2
    for status_table in status_tables:
        status_table.close()
