"""Another node of the attempt, as node 0's agent asks it over the channel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Final

from holdfast.contracts.node.channel import CALL_TIMEOUT_S, Peer
from holdfast.contracts.node.rank_status import Proposal
from holdfast.workers.agent.launch.torchrun import KILL_WAIT_S
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.nodes.root_probe import RootProblem

FINISH_TIMEOUT_S: Final = 30.0
# A file system that is busy may take this long for a few files.
ROOT_TIMEOUT_S: Final = 120.0


class RemoteNode:
    """Another node, led over the channel.

    Every call returns at once, with a future that may raise `ConnectionError`.
    """

    def __init__(self, peer: Peer, keep: Callable[[str, NodeReport], object]) -> None:
        """`keep(name, report)` is called in the channel's thread for each report, in order."""
        self._peer, self._keep = peer, keep
        self.number = int(peer.hello["node"])
        self.name = str(peer.hello["host"])

    @property
    def waiting_s(self) -> float:
        """How many seconds the oldest question has been waiting for its answer."""
        return self._peer.waiting_s

    def start(self, launch: int, address: str, port: int) -> Future[None]:
        return self._peer.ask("start", _nothing, launch=launch, address=address, port=port)

    def prepare(self, launch: int, address: str, port: int) -> Future[None]:
        return self._peer.ask("prepare", _nothing, launch=launch, address=address, port=port)

    def check_root(self, place: str, shared: str, token: str) -> Future[Sequence[RootProblem]]:
        return self._peer.ask(
            "root",
            _root_problems,
            timeout_s=ROOT_TIMEOUT_S,
            place=place,
            shared=shared,
            token=token,
        )

    def race(self, shared: str, number: int) -> Future[bool]:
        return self._peer.ask(
            "race", lambda answer: bool(answer["won"]), shared=shared, number=number
        )

    def check_health(
        self, checks: Sequence[str], round_: int, meeting: dict[str, Any] | None = None
    ) -> Future[None]:
        return self._peer.ask(
            "health", _nothing, checks=list(checks), round=round_, meeting=meeting
        )

    def report(self) -> Future[NodeReport]:
        return self._peer.ask("report", self.take_report)

    def take_report(self, data: dict[str, Any]) -> NodeReport:
        """Return and keep the report in a message of the node."""
        report = NodeReport.from_json(data)
        self._keep(self.name, report)
        return report

    def announce(self, deadline: float | None) -> Future[None]:
        return self._peer.ask("announce", _nothing, deadline=deadline)

    def take_stacks(self, dump: int, number: int) -> Future[None]:
        return self._peer.ask("stacks", _nothing, dump=dump, number=number)

    def give_hint(self) -> Future[None]:
        """Have the node's flusher look for what other nodes have written."""
        return self._peer.ask("hint", _nothing)

    def kill(self) -> Future[None]:
        return self._peer.ask("kill", _nothing, timeout_s=KILL_WAIT_S + CALL_TIMEOUT_S)

    def drain(
        self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False
    ) -> Future[bool]:
        return self._peer.ask(
            "drain",
            lambda answer: bool(answer["done"]),
            timeout_s=timeout_s + CALL_TIMEOUT_S,
            drain_s=timeout_s,
            lost=sorted(lost),
            mirror=mirror,
        )

    def crash_report(self) -> Future[CrashReport]:
        return self._peer.ask("crash_report", CrashReport.from_json)

    def acknowledge(self) -> Future[None]:
        return self._peer.ask("acknowledge", _nothing)

    def finish(self) -> Future[None]:
        """Tell the node's agent to exit."""
        return self._peer.ask("finish", _nothing, timeout_s=FINISH_TIMEOUT_S)

    def newest_entered(self) -> Future[int]:
        return self._peer.newest_entered()

    def propose(self, serial: int, step: int) -> Future[bool]:
        return self._peer.propose(serial, step)

    def answer(self, serial: int, state: Proposal) -> Future[object]:
        return self._peer.answer(serial, state)


def _root_problems(answer: dict[str, Any]) -> Sequence[RootProblem]:
    return [RootProblem(str(one["lacks"]), str(one["text"])) for one in answer["problems"]]


def _nothing(_: dict[str, Any]) -> None:
    """The answer only confirms that the node has done it."""
