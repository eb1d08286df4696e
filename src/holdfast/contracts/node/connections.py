"""Node 0's connections to all other nodes, served by one thread.

Its event loop asks all nodes at once and takes the answers as they come, so a silent node delays no
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.contracts.node.handshake import Proof
from holdfast.contracts.node.lines import MESSAGE_BYTES_MAX, Decoder, encode, set_options
from holdfast.contracts.node.timeouts import GAP_S_MAX

# For the whole handshake, even if the other end sends byte by byte.
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_MAX: Final = 256
HELLO_BYTES_MAX: Final = 64 * 1024
LOOK_S: Final = 0.1
# What was sent before the end of a connection may still arrive for this long.
LINGER_S: Final = 2.0
DISMISSED: Final = "dismissed"
STRANGE: Final = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError)


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
        admit: Callable[[Connection, dict[str, Any]], None],
        take: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self.token, self.admit, self.take = token, admit, take
        # Seconds for which this process could run.
        self.running_s, self._looked_at = 0.0, time.monotonic()
        # All connections, and those without a hello message; oldest first.
        self._connections: dict[Connection, None] = {}
        self._callers: dict[Connection, None] = {}
        self._outbox: deque[tuple[Connection, Question]] = deque()
        self._is_flushing = self._is_closed = False
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, backlog), name="channel", daemon=True
        )

    def start(self) -> None:
        """Begin to accept connections. `admit` and `take` may be called from now on."""
        self._thread.start()

    def post(self, connection: Connection, question: Question) -> None:
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

    def opened(self, connection: Connection) -> None:
        """Register a caller. With `HANDSHAKES_MAX` callers, close the oldest connection.

        A node finishes its handshake in milliseconds, so the oldest caller is not one of ours.
        """
        self._connections[connection] = None
        if len(self._callers) >= HANDSHAKES_MAX:
            next(iter(self._callers)).end("too many callers")
        self._callers[connection] = None

    def ended(self, connection: Connection, *, is_closed: bool = False) -> None:
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
            lambda: Connection(self), sock=listener, backlog=backlog
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


class Connection(asyncio.Protocol):
    """One caller, and a node of the attempt from its `hello` message on.

    `waiting_s` is how many seconds the oldest question has been waiting for its answer; 0 without
    one. `problem` says why the connection ended.
    """

    def __init__(self, switchboard: Switchboard) -> None:
        self.hello: dict[str, Any] = {}
        self.waiting_s = 0.0
        self.problem = ""
        self._switchboard = switchboard
        self._decoder = Decoder(HELLO_BYTES_MAX)
        self._proof = Proof(switchboard.token, is_host=True)
        self._take = self._take_opening
        self._asked = 0
        self._open: dict[int, Question] = {}
        self._oldest: Question | None = None
        self._since_s = switchboard.running_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with contextlib.suppress(OSError):
            set_options(transport.get_extra_info("socket"))
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
        self.end(str(exc or "the other end closed the connection"))
        self._switchboard.ended(self, is_closed=True)

    def send(self, message: dict[str, Any]) -> None:
        self._transport.write(encode(message))

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
        return ConnectionError(f"node {self.hello.get('node')} is lost: {problem}")

    def _take_opening(self, message: dict[str, Any]) -> None:
        self.send(self._proof.answer(message))
        self._take = self._take_proof

    def _take_proof(self, message: dict[str, Any]) -> None:
        self._proof.check(message)
        self._take = self._take_hello

    def _take_hello(self, message: dict[str, Any]) -> None:
        self._decoder.bytes_max = MESSAGE_BYTES_MAX
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
