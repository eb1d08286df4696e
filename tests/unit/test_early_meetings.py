"""Early meetings of the ranks of a launch: a save before a test, and each one once."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, cast

from tests.unit.test_contracts_agreement import JOIN_S, make_ranks, wait_until

from holdfast.contracts.node.agreement import ROUNDS_MAX, StatusPort
from holdfast.contracts.node.rank_status import NOWHERE, Proposal, RankStatusTable
from holdfast.workers.agent.node import LedNode, NodeReport
from holdfast.workers.agent.stops.agreement import EarlySave


class Listening(StatusPort):
    """The port of a node that remembers its answers."""

    def __init__(self, table: RankStatusTable) -> None:
        super().__init__(table)
        self.answers: list[Proposal] = []

    def answer(self, serial: int, state: Proposal) -> None:
        self.answers.append(state)
        super().answer(serial, state)


def test_a_save_comes_before_a_test_and_each_of_them_comes_once() -> None:
    table, handle = RankStatusTable.create(2)
    os.close(handle)
    port, notes = Listening(table), list[str]()
    early = EarlySave(notes.append, 5.0)

    def pursue(serial: int) -> int:
        report: Any = SimpleNamespace(entered=table.oldest_entered, asked=table.asked)
        return early.pursue([cast(LedNode, port)], [cast(NodeReport, report)], serial)

    ranks = make_ranks([table], 1, 0.01)
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    early.ask_test()
    assert pursue(1) == 1, "no rank trains yet"
    for thread in threads:
        thread.start()
    wait_until(lambda: table.oldest_entered > NOWHERE)
    early.ask()
    serial = pursue(1)
    assert serial == 1 + ROUNDS_MAX
    while [word for word in port.answers if word is not Proposal.ABORT] == [Proposal.SAVE]:
        serial = pursue(serial)
    assert pursue(serial) == serial
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert [rank.error for rank in ranks] == [None] * 2
    words = [word for word in port.answers if word is not Proposal.ABORT]
    assert words == [Proposal.SAVE, Proposal.TEST]
    met = ranks[0].saved_after
    assert len(met) == 2
    assert ranks[1].saved_after == met
    assert [note.rpartition(": ")[2] for note in notes] == ["an early save", "a test"]
    table.close()
