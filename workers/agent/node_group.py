"""The nodes of an attempt, led by node 0: questions to all at once, reports, and lost nodes."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, TypeVar

from holdfast.contracts.channel import ChannelHost
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.crew import Crew, any_silent, await_result
from holdfast.workers.agent.listener import StopListener
from holdfast.workers.agent.node import Node, NodeReport
from holdfast.workers.agent.nodes import RemoteNode
from holdfast.workers.agent.notices.notice import Notice
from holdfast.workers.agent.stop_times import RESERVE_S

REMOTE_POLL_S: Final = 0.25
ANSWER_S_MIN: Final = 0.5

T = TypeVar("T")


class NodeGroup:
    """Node 0's connection to all nodes. A node that does not answer is lost for the attempt.

    `reports` are the nodes' newest reports in the current launch, by name.
    """

    def __init__(
        self, context: AgentContext, journal: JournalWriter, listener: StopListener, here: Node
    ) -> None:
        """`here` is this node."""
        self.lost: list[str] = []
        self.reports: dict[str, NodeReport] = {}
        self.crew = Crew(context.nodes)
        self._context, self._journal, self._listener = context, journal, listener
        self._here = here
        self._remotes: list[RemoteNode] = []
        self._asked: dict[str, Future[NodeReport]] = {}
        self._noticed: list[tuple[str, Notice]] = []
        self._remote_at = 0.0

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are not lost, this one first."""
        return [self._here, *self._present()]

    @property
    def is_whole(self) -> bool:
        """True if every node that is not lost has reported in the current launch."""
        return len(self.reports) == len(self.nodes)

    @property
    def is_silent(self) -> bool:
        """True if a node has left a question unanswered for too long."""
        return any_silent(self.nodes)

    @property
    def lost_numbers(self) -> list[int]:
        return [remote.number for remote in self._remotes if remote.name in self.lost]

    def gather(self, host: ChannelHost) -> None:
        """Wait for the other nodes, unless a stop is requested meanwhile.

        Raises `AgreementError` if a node does not join.
        """
        timeout_s = self._context.request.supervision.join_timeout_s
        host.wait_for_peers(timeout_s, is_over=lambda: self._listener.stop_request is not None)
        self._remotes = [RemoteNode(peer, self.crew.post) for _, peer in sorted(host.peers.items())]

    def forget_reports(self) -> None:
        """Forget the reports of the previous launch."""
        self.reports.clear()
        self._remote_at = 0.0

    def address(self) -> str:
        """Return the address at which the ranks of all nodes reach this one."""
        if self._context.nodes == 1:
            return "127.0.0.1"
        for node in self._present():
            if node.name not in self.reports:
                self._await_report(node, self.crew.begin(RemoteNode.report, node))
            if node.name in self.reports:
                return self.reports[node.name].host_address or socket.gethostname()
        return socket.gethostname()

    def ask_all(self, act: Callable[[Node], T]) -> list[tuple[Node, T]]:
        """Run `act` for all nodes at once and wait; return the answers of those not lost."""
        give_up_at = self._give_up_at()
        asked = [(node, self.crew.begin(act, node)) for node in self._present()]
        answers: list[tuple[Node, T]] = [(self._here, act(self._here))]
        for node, future in asked:
            with self._losing(node):
                answers.append((node, await_result(future, give_up_at)))
        return answers

    def poll(self) -> None:
        """Take this node's report, and the others' a few times a second, without waiting."""
        self._take(self._here, self._here.report())
        for node in self._present():
            asked = self._asked.get(node.name)
            if asked is not None and asked.done():
                del self._asked[node.name]
                with self._losing(node):
                    self._take(node, asked.result())
        if time.monotonic() - self._remote_at < REMOTE_POLL_S:
            return
        self._remote_at = time.monotonic()
        for node in self._present():
            if node.name not in self._asked:
                self._asked[node.name] = self.crew.begin(RemoteNode.report, node)

    def await_reports(self) -> None:
        """Wait for the pending reports, because they contain signals that the agents received."""
        for node in self._present():
            asked = self._asked.pop(node.name, None)
            if asked is not None:
                self._await_report(node, asked)

    def ask_reports(self) -> None:
        """Take a new report of every node."""
        for node, report in self.ask_all(lambda node: node.report()):
            self._take(node, report)

    def announce(self, deadline: float | None) -> None:
        """Announce a stop request and its deadline to all nodes' ranks."""
        for node in self.nodes:
            with self._losing(node):
                node.announce(deadline)

    def take_notices(self) -> list[tuple[str, Notice]]:
        """Return the clouds' notices since the last call, each with its host."""
        noticed, self._noticed = self._noticed, []
        return noticed

    def finish(self) -> None:
        """Tell the other nodes' agents to exit."""
        for going in [self.crew.begin(RemoteNode.finish, node) for node in self._present()]:
            with contextlib.suppress(ConnectionError):
                await_result(going, self._give_up_at())

    def close(self) -> None:
        """Close the connections' threads."""
        self.crew.close()

    def _present(self) -> list[RemoteNode]:
        return [remote for remote in self._remotes if remote.name not in self.lost]

    def _await_report(self, node: RemoteNode, asked: Future[NodeReport]) -> None:
        with self._losing(node):
            self._take(node, await_result(asked, self._give_up_at()))

    def _take(self, node: Node, report: NodeReport) -> None:
        """Store a node's report and pass on the signals and notices in it."""
        self.reports[node.name] = report
        for name in report.signals:
            self._listener.hear(name)
        self._noticed += [(node.name, notice) for notice in report.notices]

    def _give_up_at(self) -> Callable[[], float]:
        """Return a function for the time limit of answers: the deadline of a stop, if any."""
        soonest = time.time() + ANSWER_S_MIN

        def give_up_at() -> float:
            stop_request = self._listener.stop_request
            deadline = stop_request.deadline if stop_request is not None else None
            return math.inf if deadline is None else max(soonest, deadline - RESERVE_S)

        return give_up_at

    @contextlib.contextmanager
    def _losing(self, node: Node) -> Iterator[None]:
        """Mark a node that does not answer as lost, and journal that once."""
        try:
            yield
        except ConnectionError as error:
            if node.name not in self.lost:
                self.lost.append(node.name)
                self._journal.append(
                    EventKind.NODE_LOST,
                    attempt=self._context.attempt.number,
                    node=getattr(node, "number", 0),
                    host=node.name,
                    detail=str(error),
                )
