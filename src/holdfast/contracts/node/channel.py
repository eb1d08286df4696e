"""The channel between the nodes of one attempt: node 0 listens and the other nodes connect.

It sends JSON messages (`contracts.lines`), never pickles, once both ends have proved that they know
the attempt's token (`contracts.handshake`). One thread of node 0 serves all connections
(`contracts.connections`), so a silent node delays no other.

Every question has a number, and its answer has the same number. A late answer is dropped, and never
taken for the answer to a later question. Node 0 dismisses a node that does not answer in time: it
sends a `dismissed` message and closes the connection. A node may also send messages unasked.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.contracts.disk.durable import to_json, write_bytes
from holdfast.contracts.disk.filesystems import is_there
from holdfast.contracts.errors import AgreementError, MissingNodesError
from holdfast.contracts.node.connections import (
    DISMISSED,
    HANDSHAKE_TIMEOUT_S,
    STRANGE,
    Connection,
    Question,
    Switchboard,
)
from holdfast.contracts.node.handshake import Proof, listen, own_addresses, read_address
from holdfast.contracts.node.lines import Line
from holdfast.contracts.node.rank_status import Proposal
from holdfast.contracts.node.timeouts import Timeout

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
        self, connection: Connection, hello: dict[str, Any], switchboard: Switchboard
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
        listener = listen(ports, backlog)
        self.port = int(listener.getsockname()[1])
        self.nodes = nodes
        self.peers: dict[int, Peer] = {}
        self._take: TakeMessage | None = None
        self._early: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        reached_at = list(addresses or own_addresses())
        document = {"addresses": reached_at, "port": self.port, "token": token.hex()}
        write_bytes(path, to_json(document), mode=0o600)
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

    def _admit(self, connection: Connection, hello: dict[str, Any]) -> None:
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


def _join(path: Path, hello: dict[str, Any], timeout_s: float) -> tuple[Line, str]:
    """Return a connection on which node 0 has admitted this node, and node 0's address."""
    timeout = Timeout(timeout_s)
    problem = f"{path} does not exist"
    while not timeout.is_over:
        try:
            if not is_there(path):
                time.sleep(POLL_S)
                continue
            addresses, port, token = read_address(path)
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


def _call_up(address: str, port: int, token: bytes, hello: dict[str, Any]) -> Line:
    line = Line(socket.create_connection((address, port), timeout=DIAL_TIMEOUT_S))
    proof, timeout = Proof(token, is_host=False), Timeout(HANDSHAKE_TIMEOUT_S)
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


def _take(line: Line, timeout: Timeout) -> dict[str, Any]:
    """Return the next message of a handshake. Raises `TimeoutError` if it is late."""
    message = line.receive(timeout)
    if message is None:
        raise TimeoutError(f"the handshake was not complete within {timeout.seconds:.0f} s")
    return message


def _accepted(answer: dict[str, Any]) -> bool:
    return bool(answer["accepted"])
