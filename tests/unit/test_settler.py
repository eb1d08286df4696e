"""The settlers of two nodes without an agent."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.contracts.board import Board, Proposal
from holdfast.contracts.channel import answer_for_board
from holdfast.contracts.journal import EventKind
from holdfast.trainer import settler
from holdfast.trainer.link import Link
from holdfast.trainer.settler import Settler

WAIT_S = 30.0


def link_of(folder: Path, node: int, board: Board) -> Link:
    """As much of a link as a settler wants."""
    link = SimpleNamespace(
        identity=SimpleNamespace(node=node, nodes=2),
        attempt=SimpleNamespace(channel=folder / "channel.json"),
        run=SimpleNamespace(stop_file=folder / "stop"),
        board=board,
    )
    return cast(Link, link)


@pytest.mark.timeout(60)
def test_a_node_that_was_held_up_for_a_while_stops_with_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = []
    for _ in range(2):
        board, handle = Board.create(1)
        os.close(handle)
        boards.append(board)
    answer, held_up = answer_for_board, threading.Event()

    def answer_late(board: Board, question: dict[str, Any]) -> dict[str, Any] | None:
        if not held_up.is_set():
            held_up.set()
            time.sleep(1.0)
        return answer(board, question)

    monkeypatch.setattr(settler, "answer_for_board", answer_late)
    monkeypatch.setattr(settler, "LOOK_TIMEOUT_S", 0.2)
    noted: list[EventKind] = []
    both = [
        Settler(link_of(tmp_path, node, board), lambda kind, **_: noted.append(kind))
        for node, board in enumerate(boards)
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
    assert [board.proposal[0] for board in boards] == [Proposal.GO] * 2
    for board in boards:
        board.close()
