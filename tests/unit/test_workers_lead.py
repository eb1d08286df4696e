"""Node 0's agent and the nodes that it leads, which are played."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
from tests.runs import RunFolder

from holdfast.contracts.channel import ChannelHost
from holdfast.contracts.journal import JournalWriter
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.lead import Lead
from holdfast.workers.agent.runtime import NodeReport, NodeRuntime, Wreck
from holdfast.workers.agent.signals import SignalBox

STEPS_GAINED = 7
LOOKS = 3


class PlayedNode:
    """A node with one rank: it trains for some looks, then ends as the incarnation is to."""

    step_s = 1.0

    def __init__(self, name: str, ends: dict[int, int]) -> None:
        self.name, self._ends = name, ends
        self._incarnation, self._looks, self._killed = 0, 0, False

    def start(self, incarnation: int, address: str, port: int) -> None:
        self._incarnation, self._looks, self._killed = incarnation, 0, False

    def report(self) -> NodeReport:
        self._looks += 1
        ends = self._looks > LOOKS
        code = self._ends.get(self._incarnation, 0) if ends else None
        return NodeReport(
            exit_code=137 if self._killed and not ends else code,
            phases=("TRAIN",),
            registered=1,
            alive=1,
            completed=STEPS_GAINED * self._incarnation,
            resumed=STEPS_GAINED * (self._incarnation - 1),
        )

    def kill(self) -> None:
        self._killed = True

    def prepare(self, incarnation: int, address: str, port: int) -> None:
        raise AssertionError("it does not train for so long")

    def drain(self, timeout_s: float, lost: Any = (), *, mirror: bool = False) -> bool:
        return True

    def wreck(self) -> Wreck:
        return Wreck()


class PlayedPeer:
    """The wire to another node's agent."""

    def __init__(self, node: PlayedNode) -> None:
        self.hello = {"node": 1, "host": node.name}
        self._node = node

    def call(self, what: str, timeout_s: float = 0.0, **given: Any) -> Any:
        if what == "report":
            return self._node.report().to_json()
        if what == "wreck":
            return self._node.wreck().to_json()
        if what == "start":
            return self._node.start(**given)
        return self._node.kill() if what == "kill" else {"done": True}


@dataclasses.dataclass
class PlayedHost:
    """The other agents that have come."""

    peers: dict[int, PlayedPeer]


@pytest.mark.timeout(60)
def test_what_a_node_said_before_a_restart_does_not_end_what_comes_after(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=2)
    here, there = (PlayedNode(name, {1: 1, 2: 0}) for name in ("n0", "n1"))
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(
            context,
            SignalBox(),
            journal,
            cast(NodeRuntime, here),
            cast(ChannelHost, PlayedHost({1: PlayedPeer(there)})),
        )
        # Nothing takes time here: the other node was asked a moment before.
        lead.run()
    assert [one.ending for one in lead.incarnations] == ["crashed", "completed"]
