"""The nodes of an attempt, led by node 0: questions to all at once, reports, and lost nodes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, Final, TypeVar

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.node import agreement, clocks
from holdfast.contracts.node.channel import CALL_TIMEOUT_S, ChannelHost, Peer, SilentError
from holdfast.contracts.node.rank_status import Proposal
from holdfast.workers.agent.context import AgentContext, NodePlace
from holdfast.workers.agent.launch.torchrun import KILL_WAIT_S
from holdfast.workers.agent.losses import left_of_launch, lost_of_launch
from holdfast.workers.agent.node import CrashReport, LedNode, NodeReport
from holdfast.workers.agent.notices.notice import Notice
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.listener import StopListener
from holdfast.workers.agent.stops.sources import RESERVE_S
from holdfast.workers.nodes.root_probe import RootProblem

# Another node of the attempt, as node 0's agent asks it over the channel.

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

    def start(
        self,
        launch: int,
        address: str,
        port: int,
        place: NodePlace | None = None,
        *,
        is_alone: bool = False,
    ) -> Future[None]:
        facts: dict[str, Any] = {"launch": launch, "address": address, "port": port}
        facts["is_alone"] = is_alone
        if place is not None:
            facts["place"] = asdict(place)
        return self._peer.ask("start", _nothing, **facts)

    def prepare(self, launch: int, address: str, port: int) -> Future[None]:
        return self._peer.ask("prepare", _nothing, launch=launch, address=address, port=port)

    def expect(self, term: int) -> Future[None]:
        return self._peer.ask("expect", _nothing, term=term)

    def protect(self, launch: int, node: int, holder: int) -> Future[None]:
        return self._peer.ask("protect", _nothing, launch=launch, node=node, holder=holder)

    def copy(self, launch: int, round_: int, keep: int) -> Future[None]:
        return self._peer.ask("copy", _nothing, launch=launch, round=round_, keep=keep)

    @property
    def switch(self) -> str:
        """The path of switches above the node, or '' if unknown."""
        return str(self._peer.hello.get("switch", ""))

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


REMOTE_POLL_S: Final = 0.25
# With these, the reports of a thousand nodes take less than a tenth of a core.
POLL_S_PER_NODE: Final = 0.004
STOPPING_POLL_S_PER_NODE: Final = 0.001
ANSWER_S_MIN: Final = 0.5
# Ranks wait at a step while a proposal is open. A node that is silent for this long refuses it.
AGREE_WAIT_S: Final = 5.0
LOOK_S: Final = 0.5
SPARE_POLL_S: Final = 5.0
DRAIN_S_MIN: Final = 0.1
DRAIN_S_MAX: Final = 2.0
# Of nodes behind the same cut, the first and the last are found to be silent this far apart.
SILENT_TOGETHER_S: Final = 60.0
JOIN_POLL_S: Final = 0.1

T = TypeVar("T")


class NodeGroup:
    """Node 0's connection to all nodes. A node that does not answer is lost for the attempt.

    `reports` are the nodes' newest reports in the current launch, by name.
    """

    def __init__(
        self,
        context: AgentContext,
        journal: JournalWriter,
        listener: StopListener,
        here: NodeRuntime,
    ) -> None:
        """`here` is this node."""
        self.lost: list[str] = []
        # Nodes of the launch that were released, because they are drained or slow.
        self.left: list[str] = []
        # Those that were lost in earlier launches, and those that wait to take a lost one's place.
        self.dropped: list[str] = []
        self.spares: list[RemoteNode] = []
        # When nodes that may be alive behind a cut network were last heard of, by name.
        self._silent: dict[str, float] = {}
        # The lead's term. Nodes that take part in its launches may take the next one.
        self.term = 1
        self.reports: dict[str, NodeReport] = {}
        # Called in the channel's thread, with another node's heartbeat, and when another node's
        # flusher has written something.
        self.take_beat: Callable[[dict[str, Any]], object] = lambda beat: None
        self.take_flush: Callable[[], object] = lambda: None
        # Called with the number of a node that takes no part any more.
        self.drop_beat: Callable[[int], object] = lambda number: None
        self._context, self._journal, self._listener = context, journal, listener
        self._here = here
        # In the order of their places, from place 1 on.
        self._remotes: list[RemoteNode] = []
        self._is_rearranged = False
        self._known: dict[int, RemoteNode] = {}
        self._asked: dict[str, Future[NodeReport]] = {}
        self._asked_spares: dict[str, Future[NodeReport]] = {}
        self._spares_asked_at = 0.0
        # Filled by the channel's thread too.
        self._noticed: deque[tuple[str, Notice]] = deque()
        self._arrived: dict[str, NodeReport] = {}
        # A share of the nodes is asked at each turn; these say where in their list, and since when.
        self._next_node, self._due_nodes, self._polled_at = 0, 0.0, 0.0

    @property
    def nodes(self) -> list[LedNode]:
        """The nodes that are not lost, this one first."""
        return [self._here, *self._present()]

    @property
    def switches(self) -> list[str]:
        """The path of switches above each node, in the order of `nodes`."""
        return [self._context.switch, *(node.switch for node in self._present())]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of all nodes that the attempt has had: those that train now come first."""
        idle = [spare.name for spare in self.spares]
        names = [*(node.name for node in self.nodes), *self._gone, *self.dropped, *idle]
        return tuple(dict.fromkeys(names))

    @property
    def is_whole(self) -> bool:
        """True if every node that is not lost has reported in the current launch."""
        return len(self.reports) == len(self.nodes)

    @property
    def is_silent(self) -> bool:
        """True if a node has left a question unanswered for too long."""
        return any(remote.waiting_s > AGREE_WAIT_S for remote in self._present())

    @property
    def lost_numbers(self) -> list[int]:
        """The places of the lost nodes in the current launch."""
        return [place for place, one in enumerate(self._remotes, 1) if one.name in self.lost]

    def places(self) -> dict[str, NodePlace]:
        """Return the places of all nodes in the next launch, by name; {} while none has changed."""
        if not self._is_rearranged:
            return {}
        names = [self._here.name, *(remote.name for remote in self._remotes)]
        return {
            name: NodePlace(node=place, nodes=len(names), term=self.term)
            for place, name in enumerate(names)
        }

    def set_aside_spares(self) -> None:
        """Let the nodes beyond those of the spec wait, once all have joined and are healthy."""
        nodes = self._context.nodes
        self._remotes, self.spares = self._remotes[: nodes - 1], self._remotes[nodes - 1 :]
        self.forget_reports()

    def rearrange(self, nodes: int) -> list[str]:
        """Continue on `nodes` nodes without those that are gone; return the spares that take part.

        A spare takes the place of such a node. Nodes beyond the number wait as spares.
        """
        spares, gone = deque(self.spares), self._gone
        filled = [
            (spares.popleft() if spares else None) if remote.name in gone else remote
            for remote in self._remotes
        ]
        present = [remote for remote in filled if remote is not None]
        while spares and len(present) < nodes - 1:
            present.append(spares.popleft())
        joined = [remote.name for remote in present if remote in self.spares]
        self.spares = [*present[nodes - 1 :], *spares]
        self._remotes = present[: nodes - 1]
        for remote in self._known.values():
            if remote.name in gone:
                self.drop_beat(remote.number)
        self.dropped += gone
        self.lost, self.left = [], []
        self._is_rearranged = True
        self.forget_reports()
        return joined

    def release(self, hosts: Collection[str], launch: int | None = None) -> None:
        """End the agents of nodes that take no further part: spares, or those that end `launch`.

        The ranks of `launch` must have stopped.
        """
        going = [node for node in (*self._present(), *self.spares) if node.name in hosts]
        facts: dict[str, Any] = {} if launch is None else {"launch": launch}
        for node in going:
            # Before it ends: a node that leads next must not take it for lost.
            self._journal.append(
                EventKind.NOTE,
                attempt=self._context.attempt.number,
                text=f"{node.name} takes no further part",
                host=node.name,
                released=node.number,
                **facts,
            )
            with contextlib.suppress(ConnectionError):
                await_result(node.finish(), self._give_up_at())
        idle = [spare.name for spare in self.spares if spare.name in hosts]
        self.spares = [spare for spare in self.spares if spare.name not in hosts]
        self.dropped += idle
        self.left += [node.name for node in self._present() if node.name in hosts]

    def gather(self, host: ChannelHost) -> None:
        """Wait for the other nodes, unless a stop is requested meanwhile.

        Raises `MissingNodesError` if a node does not join.
        """
        host.subscribe(self._hear)
        timeout_s = self._context.request.supervision.join_timeout_s
        try:
            host.wait_for_peers(timeout_s, is_over=lambda: self._listener.stop_request is not None)
        finally:
            self._remotes = [RemoteNode(peer, self._keep) for _, peer in sorted(host.peers.items())]
            self._known = {remote.number: remote for remote in self._remotes}

    def gather_left(
        self, host: ChannelHost, left: Collection[int], launch: int, timeout_s: float
    ) -> None:
        """Wait for the nodes `left` after the loss of a lead. Those that do not join are lost.

        Nodes that took part in `launch` keep the order of their places. The others are spares.
        """
        host.subscribe(self._hear)
        give_up = time.monotonic() + timeout_s
        while not set(left) <= set(host.peers) and time.monotonic() < give_up:
            self._listener.wait(JOIN_POLL_S)
        found = [(peer.hello, RemoteNode(peer, self._keep)) for peer in host.peers.values()]
        self._known = {remote.number: remote for _, remote in found}
        trained = [(hello, one) for hello, one in found if hello.get("launch") == launch]
        ordered = sorted(trained, key=lambda pair: int(pair[0]["place"]))
        self._remotes = [one for _, one in ordered]
        idle = [one for one in self._known.values() if one not in self._remotes]
        self.spares = sorted(idle, key=lambda one: one.number)
        hosts = self._context.hosts
        for number in sorted(set(left) - set(self._known)):
            name = hosts[number] if number < len(hosts) else f"node {number}"
            self.lost.append(name)
            self._journal_loss(number, name, f"it did not join within {timeout_s:.0f} s")

    def take_losses(self, lead: str, nodes: int, launch: int, events: Sequence[Event]) -> None:
        """Set which nodes of the last launch are lost. Call it after `gather_left`."""
        joined = {remote.name for remote in self._remotes}
        self.left = [host for host in left_of_launch(launch, events) if host not in joined]
        unjoined, missing = self.lost, nodes - 1 - len(self._remotes) - len(self.left)
        self.lost = lost_of_launch(missing, lead=lead, unjoined=unjoined, events=events)
        self.dropped += [name for name in unjoined if name not in self.lost]

    def forget_reports(self) -> None:
        """Forget the reports of the previous launch, also those that are on their way.

        A node answers in order, so call this after every node has answered `start`.
        """
        self.reports.clear()
        self._asked.clear()
        self._arrived.clear()
        self._polled_at = 0.0

    def address(self) -> str:
        """Return the address at which the ranks of all nodes reach this one."""
        if self._context.nodes == 1:
            return "127.0.0.1"
        for node in self._present():
            if node.name not in self.reports:
                with self._losing(node):
                    await_result(node.report(), self._give_up_at())
                self._take_reports()
            if node.name in self.reports:
                return self.reports[node.name].host_address or socket.gethostname()
        return socket.gethostname()

    def ask_all(self, act: Callable[[LedNode], T | Future[T]]) -> list[tuple[LedNode, T]]:
        """Run `act` for all nodes at once and wait; return the answers of those not lost."""
        give_up_at = self._give_up_at()
        others: list[tuple[LedNode, Future[T]]] = [
            (n, agreement.begin(act, n)) for n in self._present()
        ]
        # This node comes last, because it answers within the call.
        asked = [(self._here, agreement.begin(act, self._here)), *others]
        answers: list[tuple[LedNode, T]] = []
        for node, future in asked:
            with self._losing(node):
                answers.append((node, await_result(future, give_up_at)))
        return answers

    def drain_all(self, until: Callable[[], float], *, mirror: bool) -> list[str]:
        """Wait for all flushers, at most until Unix time `until()`; return the nodes that are late.

        They are asked in short slices, so that a deadline that arrives meanwhile applies. The files
        of lost nodes are not waited for. With `mirror`, copies to the mirror are waited for too.
        """
        done: set[str] = set()
        late: list[str] = [""]
        while late and (left_s := until() - clocks.now()) > 0:
            slice_s = max(DRAIN_S_MIN, min(DRAIN_S_MAX, left_s))
            drain = partial(_drain, done, slice_s, self.lost_numbers, mirror)
            answers = self.ask_all(drain)
            done |= {node.name for node, is_done in answers if is_done}
            late = [node.name for node, is_done in answers if not is_done]
        return [name for name in late if name]

    def poll(self) -> None:
        """Take this node's report and those of the other nodes that have arrived.

        The others are asked every `poll_s` seconds. They also send a report unasked when something
        has changed that must not wait.
        """
        self._keep(self._here.name, self._here.report())
        for node in self._present():
            asked = self._asked.get(node.name)
            if asked is not None and asked.done():
                del self._asked[node.name]
                with self._losing(node):
                    asked.result()
        self._take_reports()
        for node in self._due():
            self._asked[node.name] = node.report()
        self._look_after_spares()

    def _look_after_spares(self) -> None:
        """Ask the spare nodes for a sign of life now and then. Those that give none are dropped."""
        for spare in list(self.spares):
            asked = self._asked_spares.get(spare.name)
            if asked is not None and asked.done():
                del self._asked_spares[spare.name]
                with self._losing(spare):
                    asked.result()
        now = time.monotonic()
        if now - self._spares_asked_at >= SPARE_POLL_S:
            self._spares_asked_at = now
            for spare in self.spares:
                if spare.name not in self._asked_spares:
                    self._asked_spares[spare.name] = spare.report()

    def _due(self) -> list[RemoteNode]:
        """Return the nodes to ask for a report now: a few at each turn, each every `poll_s`."""
        now, present = time.monotonic(), self._present()
        passed_s, self._polled_at = now - self._polled_at, now
        self._due_nodes += min(1.0, passed_s / self.poll_s) * len(present)
        count = int(self._due_nodes)
        self._due_nodes -= count
        first = self._next_node % max(1, len(present))
        self._next_node = first + count
        chosen = (present + present)[first : first + count]
        return [node for node in chosen if node.name not in self._asked]

    @property
    def poll_s(self) -> float:
        """Seconds between two questions for a node's report: longer with more nodes."""
        is_stopping = self._listener.stop_request is not None
        per_node_s = STOPPING_POLL_S_PER_NODE if is_stopping else POLL_S_PER_NODE
        return max(REMOTE_POLL_S, per_node_s * len(self._remotes))

    def ask_reports(self) -> None:
        """Take a new report of every node."""
        answers = self.ask_all(lambda node: node.report())
        self._keep(self._here.name, answers[0][1])
        self._take_reports()

    def is_cut_off(self) -> bool:
        """Return True if more nodes have just fallen silent than still answer this one.

        Then this node has probably been cut off, and the others are alive. Waits for the spares.
        """
        now, waiting = time.monotonic(), [spare.name for spare in self.spares]
        silent = {name for name, at in self._silent.items() if now - at < SILENT_TOGETHER_S}
        present = {node.name for node in self.nodes}
        if len(silent) + len(waiting) <= len(present):
            return False
        asked = {spare.name: spare.report() for spare in self.spares}
        done = concurrent.futures.wait(asked.values(), AGREE_WAIT_S).done
        heard = {name for name, future in asked.items() if future in done and _succeeded(future)}
        return len(silent) + len(asked.keys() - heard) > len(present | heard)

    def announce(self, deadline: float | None) -> None:
        """Announce a stop request and its deadline to all nodes' ranks, without waiting."""
        for node in reversed(self.nodes):
            node.announce(deadline)

    def take_notices(self) -> list[tuple[str, Notice]]:
        """Return the clouds' notices since the last call, each with its host."""
        return [self._noticed.popleft() for _ in range(len(self._noticed))]

    def finish(self) -> None:
        """Tell the other nodes' agents to exit."""
        for going in [node.finish() for node in (*self._present(), *self.spares)]:
            with contextlib.suppress(ConnectionError):
                await_result(going, self._give_up_at())

    def _present(self) -> list[RemoteNode]:
        gone = set(self._gone)
        return [remote for remote in self._remotes if remote.name not in gone]

    @property
    def _gone(self) -> list[str]:
        """The hosts that take no further part in the launch."""
        return [*self.lost, *self.left]

    def _hear(self, hello: dict[str, Any], message: dict[str, Any]) -> None:
        """Take what a node sent unasked. Called in the channel's thread."""
        for name in message.get("signals", ()):
            self._listener.hear(str(name))
        if "beat" in message:
            self.take_beat(message["beat"])
        if "flushed" in message:
            self.take_flush()
        if "report" in message:
            self._keep(str(hello["host"]), NodeReport.from_json(message["report"]))

    def pass_on_flush(self, kind: str) -> None:
        """Tell the other nodes' flushers that this node's has committed a step or has failed."""
        if kind != "wrote":
            for node in self._present():
                node.give_hint()

    def _keep(self, name: str, report: NodeReport) -> None:
        """Keep a node's newest report until the loop takes it, and every notice in it."""
        if not self._is_aside(name):
            self._noticed.extend((name, notice) for notice in report.notices)
        self._arrived[name] = report

    def _take_reports(self) -> None:
        while self._arrived:
            name, report = self._arrived.popitem()
            if not self._is_aside(name):
                self.reports[name] = report

    def _is_aside(self, name: str) -> bool:
        """Return True for a node that takes no part in the launch."""
        return name in self.dropped or any(spare.name == name for spare in self.spares)

    def _give_up_at(self) -> Callable[[], float]:
        """Return a function for the time limit of answers: the deadline of a stop, if any."""
        soonest = clocks.now() + ANSWER_S_MIN

        def give_up_at() -> float:
            stop_request = self._listener.stop_request
            deadline = stop_request.deadline if stop_request is not None else None
            return math.inf if deadline is None else max(soonest, deadline - RESERVE_S)

        return give_up_at

    @contextlib.contextmanager
    def _losing(self, node: LedNode) -> Iterator[None]:
        """Mark a node that does not answer as lost, and journal that once."""
        try:
            yield
        except ConnectionError as error:
            if node.name not in (*self._gone, *self.dropped):
                spares = [spare for spare in self.spares if spare is not node]
                is_spare = len(spares) < len(self.spares)
                self.spares = spares
                (self.dropped if is_spare else self.lost).append(node.name)
                facts = {"is_spare": True} if is_spare else {}
                if isinstance(error, SilentError):
                    self._silent[node.name] = time.monotonic()
                number = getattr(node, "number", self._context.node)
                self._journal_loss(number, node.name, str(error), **facts)

    def _journal_loss(self, number: int, name: str, detail: str, **facts: bool) -> None:
        self._journal.append(
            EventKind.NODE_LOST,
            attempt=self._context.attempt.number,
            node=number,
            host=name,
            detail=detail,
            **facts,
        )


def _succeeded(future: Future[Any]) -> bool:
    return future.exception() is None


def await_result(future: Future[T], give_up_at: Callable[[], float]) -> T:
    """Return the future's result; raise `ConnectionError` at Unix time `give_up_at()`."""
    while not concurrent.futures.wait([future], LOOK_S).done:
        if clocks.now() > give_up_at():
            raise ConnectionError("the node did not answer before the deadline of the stop")
    return future.result()


def _drain(
    done: Collection[str], slice_s: float, lost: list[int], mirror: bool, node: LedNode
) -> bool | Future[bool]:
    return node.name in done or node.drain(slice_s, lost, mirror=mirror)
