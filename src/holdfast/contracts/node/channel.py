"""The channel between the nodes of one attempt: node 0 listens and the other nodes connect.

It sends JSON messages (`contracts.lines`), never pickles, once both ends have proved that they know
the attempt's token (`contracts.handshake`). One thread of node 0 serves all connections
(`contracts.connections`), so a silent node delays no other.

Every question has a number, and its answer has the same number. A late answer is dropped, and never
taken for the answer to a later question. Node 0 dismisses a node that does not answer in time: it
sends a `dismissed` message and closes the connection. A node may also send messages unasked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.errors import AgreementError, MissingNodesError
from holdfast.contracts.node import handshake
from holdfast.contracts.node.clocks import GAP_S_MAX, Timeout
from holdfast.contracts.node.rank_status import Proposal

# Node 0's connections to all other nodes, served by one thread.
#
# Its event loop asks all nodes at once and takes the answers as they come, so a silent node
# delays no other.

# For the whole handshake, even if the other end sends byte by byte.
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_MAX: Final = 256
HELLO_BYTES_MAX: Final = 64 * 1024
LOOK_S: Final = 0.1
# What was sent before the end of a connection may still arrive for this long.
LINGER_S: Final = 2.0
DISMISSED: Final = "dismissed"
UNREACHED: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
STRANGE: Final = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError)


class SilentError(ConnectionError):
    """A node is lost of which nothing arrives any more. It may be alive behind a cut network."""


@dataclass(eq=False)
class Question:
    """A question to one node. `read` makes the result of the node's answer."""

    kind: str
    data: dict[str, Any]
    timeout_s: float
    read: Callable[[dict[str, Any]], Any]
    future: Future[Any] = field(default_factory=Future)


class Switchboard:
    """The thread that accepts and serves connections, from `start` until `close`.

    `admit(connection, hello)` is called when a caller has proved that it knows `token`. It may
    raise `ConnectionError` to refuse the caller. `take(hello, message)` is called for each message
    that a node sends unasked. Both run in the thread, so they must not wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        backlog: int,
        token: bytes,
        admit: Callable[[NodeConnection, dict[str, Any]], None],
        take: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self.token, self.admit, self.take = token, admit, take
        # Seconds for which this process could run.
        self.running_s, self._looked_at = 0.0, time.monotonic()
        # All connections, and those without a hello message; oldest first.
        self._connections: dict[NodeConnection, None] = {}
        self._callers: dict[NodeConnection, None] = {}
        self._outbox: deque[tuple[NodeConnection, Question]] = deque()
        self._is_flushing = self._is_closed = False
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, backlog), name="channel", daemon=True
        )

    def start(self) -> None:
        """Begin to accept connections. `admit` and `take` may be called from now on."""
        self._thread.start()

    def post(self, connection: NodeConnection, question: Question) -> None:
        """Send a question, from any thread."""
        self._outbox.append((connection, question))
        if self._is_closed:
            self._refuse_all()
        elif not self._is_flushing:
            self._is_flushing = True
            self.soon(self._flush)

    def soon(self, act: Callable[[], object]) -> None:
        """Have the thread call `act`, from any thread."""
        # After `close` there is no loop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Close all connections and stop listening. The other nodes see the end."""
        self._is_closed = True
        self.soon(self._closing.set)
        self._thread.join(2 * LINGER_S)
        self._refuse_all()

    def opened(self, connection: NodeConnection) -> None:
        """Register a caller. With `HANDSHAKES_MAX` callers, close the oldest connection.

        A node finishes its handshake in milliseconds, so the oldest caller is not one of ours.
        """
        self._connections[connection] = None
        if len(self._callers) >= HANDSHAKES_MAX:
            next(iter(self._callers)).end("too many callers")
        self._callers[connection] = None

    def ended(self, connection: NodeConnection, *, is_closed: bool = False) -> None:
        """Forget a caller that has joined or will not join, or a connection that is closed."""
        self._callers.pop(connection, None)
        if is_closed:
            self._connections.pop(connection, None)

    def _run(self, listener: socket.socket, backlog: int) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener, backlog))
        finally:
            self._is_closed = True
            self._loop.close()
            self._refuse_all()

    async def _serve(self, listener: socket.socket, backlog: int) -> None:
        server = await self._loop.create_server(
            lambda: NodeConnection(self), sock=listener, backlog=backlog
        )
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), LOOK_S)
            self._look()
        server.close()
        self._flush()
        for connection in list(self._connections):
            connection.end("node 0 has closed the channel")
        give_up = time.monotonic() + LINGER_S
        while self._connections and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_S / 10)

    def _look(self) -> None:
        """End the connections whose time is up. Time in which this process slept does not count."""
        now = time.monotonic()
        self.running_s += min(now - self._looked_at, GAP_S_MAX)
        self._looked_at = now
        for connection in list(self._connections):
            connection.look()

    def _flush(self) -> None:
        self._is_flushing = False
        while self._outbox:
            connection, question = self._outbox.popleft()
            connection.ask(question)

    def _refuse_all(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                connection, question = self._outbox.popleft()
                question.future.set_exception(connection.lost())


class NodeConnection(asyncio.Protocol):
    """One caller, and a node of the attempt from its `hello` message on.

    `waiting_s` is how many seconds the oldest question has been waiting for its answer; 0 without
    one. `problem` says why the connection ended.
    """

    def __init__(self, switchboard: Switchboard) -> None:
        self.hello: dict[str, Any] = {}
        self.waiting_s = 0.0
        self.problem = ""
        # Whether it ended because nothing arrived any more.
        self.is_silent = False
        self._switchboard = switchboard
        self._decoder = handshake.Decoder(HELLO_BYTES_MAX)
        self._proof = handshake.Proof(switchboard.token, is_host=True)
        self._take = self._take_opening
        self._asked = 0
        self._open: dict[int, Question] = {}
        self._oldest: Question | None = None
        self._since_s = switchboard.running_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with contextlib.suppress(OSError):
            handshake.set_options(transport.get_extra_info("socket"))
        self._switchboard.opened(self)
        self.send(self._proof.opening)

    def data_received(self, data: bytes) -> None:
        self._decoder.feed(data)
        try:
            while not self.problem and (message := self._decoder.next()) is not None:
                self._take(message)
        except STRANGE as error:
            self.end(str(error) or repr(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.problem:
            # The kernel received nothing, neither an answer nor the end of the connection.
            self.is_silent = isinstance(exc, OSError) and exc.errno in UNREACHED
        self.end(str(exc or "the other end closed the connection"))
        self._switchboard.ended(self, is_closed=True)

    def send(self, message: dict[str, Any]) -> None:
        self._transport.write(handshake.encode(message))

    def ask(self, question: Question) -> None:
        """Send a question. An ended connection refuses it with `ConnectionError`."""
        if self.problem:
            question.future.set_exception(self.lost())
            return
        self._asked += 1
        self._open[self._asked] = question
        self.send({**question.data, "kind": question.kind, "message": self._asked})

    def look(self) -> None:
        """End the connection if its handshake or its oldest question takes too long."""
        now_s = self._switchboard.running_s
        if self.problem:
            if now_s - self._since_s > LINGER_S:
                self._transport.abort()
        elif not self.hello:
            if now_s - self._since_s > HANDSHAKE_TIMEOUT_S:
                self.end("the handshake took too long")
        else:
            oldest = next(iter(self._open.values()), None)
            if oldest is not self._oldest:
                self._oldest, self._since_s = oldest, now_s
            self.waiting_s = now_s - self._since_s if oldest else 0.0
            if oldest and self.waiting_s > oldest.timeout_s:
                # The node may only be slow, so tell it that node 0 no longer waits.
                self.send({"kind": DISMISSED})
                self.is_silent = True
                self.end(f"no answer to {oldest.kind} within {oldest.timeout_s:.0f} s")

    def end(self, problem: str) -> None:
        """Close the connection because of `problem`. What was sent before still arrives."""
        if self.problem:
            return
        self.problem, self.waiting_s, self._since_s = problem, 0.0, self._switchboard.running_s
        self._switchboard.ended(self)
        while self._open:
            self._open.popitem()[1].future.set_exception(self.lost())
        self._transport.close()

    def lost(self) -> ConnectionError:
        """Return the error of every question to this node from now on."""
        problem = self.problem or "node 0 has closed the channel"
        kind = SilentError if self.is_silent else ConnectionError
        return kind(f"node {self.hello.get('node')} is lost: {problem}")

    def _take_opening(self, message: dict[str, Any]) -> None:
        self.send(self._proof.answer(message))
        self._take = self._take_proof

    def _take_proof(self, message: dict[str, Any]) -> None:
        self._proof.check(message)
        self._take = self._take_hello

    def _take_hello(self, message: dict[str, Any]) -> None:
        self._decoder.bytes_max = handshake.MESSAGE_BYTES_MAX
        self._take = self._take_answer
        self._switchboard.admit(self, message)
        self.hello = message
        self._switchboard.ended(self)

    def _take_answer(self, message: dict[str, Any]) -> None:
        if "answers" not in message:
            self._switchboard.take(self.hello, message)
            return
        number = message.pop("answers")
        if (question := self._open.get(number)) is None:
            return
        try:
            answer = question.read(message)
        except STRANGE as error:
            # This refuses all open questions, this one too.
            self.end(f"its answer to {question.kind} cannot be read: {error!r}")
            return
        del self._open[number]
        question.future.set_result(answer)


CALL_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 300.0
DIAL_TIMEOUT_S: Final = 5.0
BACKLOG_MIN: Final = 1024
POLL_S: Final = 0.1

T = TypeVar("T")
TakeMessage = Callable[[dict[str, Any], dict[str, Any]], None]


class DismissedError(ConnectionError):
    """Node 0 has dismissed this node and continues without it."""


class Peer:
    """Node 0's view of another node, for any thread. Also a `NodePort` of the stop agreement."""

    def __init__(
        self, connection: NodeConnection, hello: dict[str, Any], switchboard: Switchboard
    ) -> None:
        self.hello = hello
        self._connection, self._switchboard = connection, switchboard

    @property
    def is_lost(self) -> bool:
        return bool(self._connection.problem)

    @property
    def waiting_s(self) -> float:
        """Seconds for which the oldest question has been waiting for its answer; 0 without one."""
        return self._connection.waiting_s

    def ask(
        self,
        kind: str,
        read: Callable[[dict[str, Any]], T],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        **data: Any,
    ) -> Future[T]:
        """Ask the node a question. The future has `read(answer)`.

        A node answers in order, so the time limit of a question starts when the questions before it
        are answered. If the node does not answer within `timeout_s` seconds, or with something that
        `read` refuses by an error, it counts as lost from then on. The future of a lost node raises
        `ConnectionError`.
        """
        question = Question(kind, data, timeout_s, read)
        self._switchboard.post(self._connection, question)
        return question.future

    def newest_entered(self) -> Future[int]:
        return self.ask("newest", lambda answer: int(answer["step"]))

    def propose(self, serial: int, step: int) -> Future[bool]:
        return self.ask("propose", _accepted, serial=serial, step=step)

    def answer(self, serial: int, state: Proposal) -> Future[object]:
        return self.ask("answer", lambda _: None, serial=serial, state=int(state))


class ChannelHost:
    """Node 0's end: accepts the other nodes, and asks them all at once."""

    def __init__(
        self,
        path: Path,
        nodes: int,
        *,
        ports: range | None = None,
        addresses: Sequence[str] | None = None,
    ) -> None:
        """Listen on a port of `ports`, or on any. Raises `AgreementError` if all are in use.

        `addresses` are those at which the other nodes try to reach this one, best first; None for
        the host's name and its addresses.
        """
        token, backlog = secrets.token_bytes(32), max(nodes, BACKLOG_MIN)
        listener = handshake.listen(ports, backlog)
        self.port = int(listener.getsockname()[1])
        self.nodes = nodes
        self.peers: dict[int, Peer] = {}
        self._take: TakeMessage | None = None
        self._early: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        reached_at = list(addresses or handshake.own_addresses())
        document = {"addresses": reached_at, "port": self.port, "token": token.hex()}
        durable.write_bytes(path, durable.to_json(document), mode=0o600)
        self._switchboard = Switchboard(listener, backlog, token, self._admit, self._take_message)
        # A node may join within microseconds, and `_admit` needs all of the above.
        self._switchboard.start()

    def wait_for_peers(
        self, timeout_s: float = JOIN_TIMEOUT_S, *, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until every other node has joined, or until `is_over()` is true.

        Raises `MissingNodesError`.
        """
        timeout = Timeout(timeout_s)
        while len(self.peers) < self.nodes - 1 and not is_over():
            if timeout.is_over:
                missing = sorted(set(range(1, self.nodes)) - set(self.peers))
                raise MissingNodesError(
                    f"nodes {missing} did not join within {timeout_s:.0f} s; expected all "
                    f"{self.nodes}. Check that every node sees the run's root and can reach port "
                    f"{self.port} of node 0",
                    missing,
                )
            time.sleep(POLL_S)

    def subscribe(self, take: TakeMessage) -> None:
        """Have `take(hello, message)` called for every message that a node sends unasked.

        The channel's thread calls it, so it must not wait. A node whose message it refuses by an
        error is lost.
        """
        self._take = take
        self._switchboard.soon(self._pass_on)

    def close(self) -> None:
        """Close all connections and stop listening. The other nodes see the end."""
        self._switchboard.close()

    def _admit(self, connection: NodeConnection, hello: dict[str, Any]) -> None:
        """Accept a node. Refuse it while another agent for the same node is connected."""
        node = int(hello["node"])
        before = self.peers.get(node)
        if before is not None and not before.is_lost:
            connection.send({"refused": before.hello})
            raise ConnectionError(f"another agent for node {node} is connected")
        self.peers[node] = Peer(connection, hello, self._switchboard)
        connection.send({"refused": None})

    def _take_message(self, hello: dict[str, Any], message: dict[str, Any]) -> None:
        self._early.append((hello, message))
        self._pass_on()

    def _pass_on(self) -> None:
        while self._take is not None and self._early:
            self._take(*self._early.popleft())


class ChannelMember:
    """Another node's end: connects to node 0, receives its questions and sends the answers."""

    def __init__(
        self, path: Path, hello: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Join node 0. Raises `AgreementError` if it cannot be reached or refuses this agent."""
        self._line, self.host_address = _join(path, hello, timeout_s)
        self._question: int | None = None
        self._sending = threading.Lock()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return node 0's next question, or None if none came in time.

        Raises `ConnectionError` if node 0 is gone, `DismissedError` if it dismissed this node.
        """
        try:
            question = self._line.receive(Timeout(timeout_s))
        except (OSError, EOFError, ValueError) as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error
        if question is None:
            return None
        if question["kind"] == DISMISSED:
            raise DismissedError("node 0 dismissed this node, because an answer took too long")
        self._question = question.pop("message", None)
        return question

    def reply(self, **data: Any) -> None:
        """Answer the last question. Raises `ConnectionError` if node 0 is gone."""
        self._send({**data, "answers": self._question})

    def tell(self, **data: Any) -> None:
        """Send node 0 a message unasked, from any thread. Raises like `reply`."""
        self._send(data)

    def fileno(self) -> int:
        return self._line.fileno()

    def close(self) -> None:
        self._line.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._line.send(message)
        except OSError as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error


def _join(path: Path, hello: dict[str, Any], timeout_s: float) -> tuple[handshake.LineSocket, str]:
    """Return a connection on which node 0 has admitted this node, and node 0's address."""
    timeout = Timeout(timeout_s)
    problem = f"{path} does not exist"
    while not timeout.is_over:
        try:
            if not filesystems.is_there(path):
                time.sleep(POLL_S)
                continue
            addresses, port, token = handshake.read_address(path)
        except STRANGE as error:
            problem = str(error)
            time.sleep(POLL_S)
            continue
        for address in addresses:
            try:
                return _call_up(address, port, token, hello), address
            except STRANGE as error:
                # Unresolvable, closed by a busy node 0, or another attempt's listener on its port.
                problem = f"{address}:{port}: {error}"
        time.sleep(POLL_S)
    raise AgreementError(
        f"could not join node 0 within {timeout_s:.0f} s; last problem: {problem}. "
        "Check that this node sees the run's root and can reach the port of node 0"
    )


def _call_up(address: str, port: int, token: bytes, hello: dict[str, Any]) -> handshake.LineSocket:
    line = handshake.LineSocket(socket.create_connection((address, port), timeout=DIAL_TIMEOUT_S))
    proof, timeout = handshake.Proof(token, is_host=False), Timeout(HANDSHAKE_TIMEOUT_S)
    try:
        line.send(proof.opening, timeout)
        line.send(proof.answer(_take(line, timeout)), timeout)
        proof.check(_take(line, timeout))
        line.send(hello, timeout)
        if (first := _take(line, timeout)["refused"]) is not None:
            raise AgreementError(
                f"node {hello['node']} has already joined with the agent {first}; node 0 refuses a "
                f"second agent for it ({hello})"
            )
    except BaseException:
        line.close()
        raise
    return line


def _take(line: handshake.LineSocket, timeout: Timeout) -> dict[str, Any]:
    """Return the next message of a handshake. Raises `TimeoutError` if it is late."""
    message = line.receive(timeout)
    if message is None:
        raise TimeoutError(f"the handshake was not complete within {timeout.seconds:.0f} s")
    return message


def _accepted(answer: dict[str, Any]) -> bool:
    return bool(answer["accepted"])
