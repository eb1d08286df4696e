"""The channel between the nodes of one attempt: node 0 listens and the other nodes connect.

It sends JSON messages (`contracts.lines`), never pickles. Both ends prove that they know a random
token (HMAC-SHA256 over the other's nonce) before any other message is read. The address and the
token are in the attempt's folder, in a file that only the run's user can read.

Every question has a number, and its answer has the same number. A late answer is dropped, and never
taken for the answer to a later question. Node 0 dismisses a node that does not answer in time: it
sends a `dismissed` message and closes the connection.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.durable import to_json, write_bytes
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.lines import MESSAGE_BYTES_MAX, Line
from holdfast.contracts.rank_status import Proposal
from holdfast.contracts.reading import open_regular
from holdfast.contracts.timeouts import Timeout

CALL_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 300.0
DIAL_TIMEOUT_S: Final = 5.0
# For the whole handshake, even if the other end sends byte by byte.
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_MAX: Final = 256
BACKLOG_MIN: Final = 1024
HELLO_BYTES_MAX: Final = 64 * 1024
POLL_S: Final = 0.1
NONCE_BYTES: Final = 32
DISMISSED: Final = "dismissed"
# root has full access anyway.
TRUSTED_USERS: Final = frozenset({0})
_STRANGE: Final = (OSError, EOFError, ValueError, LookupError, TypeError)


class DismissedError(ConnectionError):
    """Node 0 has dismissed this node and continues without it."""


class ChannelHost:
    """Node 0's end: accepts the other nodes and sends them questions, one at a time."""

    def __init__(self, path: Path, nodes: int, *, ports: range | None = None) -> None:
        """Listen on a port of `ports`, or on any. Raises `AgreementError` if all are in use."""
        self._token = secrets.token_bytes(32)
        self._listener = _listen(ports, backlog=max(nodes, BACKLOG_MIN))
        self.port = int(self._listener.getsockname()[1])
        self.nodes = nodes
        self.peers: dict[int, Peer] = {}
        self._joining = threading.Lock()
        self._callers: dict[Line, None] = {}
        self._calling = threading.Lock()
        document = {"addresses": _own_addresses(), "port": self.port, "token": self._token.hex()}
        write_bytes(path, to_json(document), mode=0o600)
        threading.Thread(target=self._accept, name="channel", daemon=True).start()

    def wait_for_peers(
        self, timeout_s: float = JOIN_TIMEOUT_S, *, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until every other node has joined, or until `is_over()` is true.

        Raises `AgreementError` with the missing nodes.
        """
        timeout = Timeout(timeout_s)
        while len(self.peers) < self.nodes - 1 and not is_over():
            if timeout.is_over:
                missing = sorted(set(range(1, self.nodes)) - set(self.peers))
                raise AgreementError(
                    f"nodes {missing} did not join within {timeout_s:.0f} s; expected all "
                    f"{self.nodes}. Check that every node sees the run's root and can reach port "
                    f"{self.port} of node 0"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close all connections and stop listening. The other nodes see the end."""
        # Without the shutdown, the thread stays in `accept` and keeps the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in list(self.peers.values()):
            peer.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() == -1 or not _is_listening(self._listener):
                    return
                # The caller closed the connection, or file descriptors are exhausted for now.
                time.sleep(POLL_S)
                continue
            # Each caller has its own thread, so that a silent one does not block the others.
            with contextlib.suppress(OSError):
                line = self._register(Line(caller, bytes_max=HELLO_BYTES_MAX))
                threading.Thread(target=self._admit, args=(line,), daemon=True).start()

    def _register(self, line: Line) -> Line:
        """Register a caller. With `HANDSHAKES_MAX` callers, close the oldest connection.

        A node finishes its handshake in milliseconds, so the oldest caller is not one of ours.
        """
        with self._calling:
            if len(self._callers) >= HANDSHAKES_MAX:
                first = next(iter(self._callers))
                del self._callers[first]
                first.hang_up()
            self._callers[line] = None
        return line

    def _admit(self, line: Line) -> None:
        timeout = Timeout(HANDSHAKE_TIMEOUT_S)
        try:
            _prove(line, self._token, timeout, is_host=True)
            hello = _take(line, timeout)
            node = int(hello["node"])
            line.bytes_max = MESSAGE_BYTES_MAX
            self._take_in(node, Peer(line, hello))
        except _STRANGE:
            # Not a node of this attempt, or one that died in the handshake.
            line.close()
        finally:
            with self._calling:
                self._callers.pop(line, None)

    def _take_in(self, node: int, caller: Peer) -> None:
        """Accept a node. Refuse it while another agent for the same node is connected."""
        with self._joining:
            before = self.peers.get(node)
            if before is not None and before.is_there():
                caller.tell(refused=before.hello)
                caller.close()
                return
            # `asking` keeps questions back until the welcome message is sent.
            with caller.asking:
                self.peers[node] = caller
                caller.tell(refused=None)
        if before is not None:
            before.close()


class Peer:
    """Node 0's view of another node. Also a `NodePort` of the stop agreement.

    Several threads may ask questions. Each waits for its turn.
    """

    def __init__(self, line: Line, hello: dict[str, Any]) -> None:
        self._line = line
        self._asked = 0
        self._asked_at: float | None = None
        self.asking = threading.Lock()
        self.hello = hello
        self.is_lost = False

    @property
    def waiting_s(self) -> float:
        """Seconds for which the present question has been waiting for its answer; 0 without one."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def is_there(self) -> bool:
        """Return False if the node closed the connection, or sent data without a question."""
        if self.is_lost:
            return False
        if not self.asking.acquire(blocking=False):
            return True
        try:
            return self._line.is_quiet()
        finally:
            self.asking.release()

    def tell(self, **data: Any) -> None:
        """Send a message that is not a question."""
        self._line.send(data)

    def call(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **data: Any) -> dict[str, Any]:
        """Ask the node a question and wait for its answer.

        Raises `ConnectionError` if the node is lost. A node that does not answer within `timeout_s`
        seconds counts as lost from then on.
        """
        with self.asking:
            if self.is_lost:
                raise ConnectionError(f"node {self.hello['node']} is lost")
            self._asked_at = time.monotonic()
            try:
                return self._ask(kind, data, Timeout(timeout_s))
            except (OSError, EOFError, ValueError) as error:
                self.is_lost = True
                if isinstance(error, TimeoutError):
                    # The node may only be slow, so tell it that node 0 no longer waits.
                    with contextlib.suppress(OSError):
                        self._line.send({"kind": DISMISSED}, Timeout(0.0))
                self._line.close()
                raise ConnectionError(f"node {self.hello['node']} is lost: {error}") from error
            finally:
                self._asked_at = None

    def _ask(self, kind: str, data: dict[str, Any], timeout: Timeout) -> dict[str, Any]:
        self._asked += 1
        self._line.send({**data, "kind": kind, "message": self._asked}, timeout)
        while (answer := self._line.receive(timeout)) is not None:
            if answer.pop("answers", None) == self._asked:
                return answer
        raise TimeoutError(f"no answer to {kind} within {timeout.seconds:.0f} s")

    def newest_entered(self) -> int:
        return int(self.call("newest")["step"])

    def propose(self, serial: int, step: int) -> bool:
        return bool(self.call("propose", serial=serial, step=step)["accepted"])

    def answer(self, serial: int, state: Proposal) -> None:
        self.call("answer", serial=serial, state=int(state))

    def close(self) -> None:
        self.is_lost = True
        self._line.close()


class ChannelMember:
    """Another node's end: connects to node 0, receives its questions and sends the answers."""

    def __init__(
        self, path: Path, hello: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Join node 0. Raises `AgreementError` if it cannot be reached or refuses this agent."""
        self._line, self.host_address = _dial(path, timeout_s)
        self._question: int | None = None
        try:
            self._line.send(hello)
            first = _take(self._line, Timeout(HANDSHAKE_TIMEOUT_S))["refused"]
        except (OSError, EOFError, ValueError, LookupError) as error:
            self._line.close()
            raise AgreementError(
                f"node 0 closed the connection before node {hello['node']} had joined: {error}"
            ) from error
        if first is not None:
            self._line.close()
            raise AgreementError(
                f"node {hello['node']} has already joined with the agent {first}; node 0 refuses a "
                f"second agent for it ({hello})"
            )

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
        try:
            self._line.send({**data, "answers": self._question})
        except OSError as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error

    def close(self) -> None:
        self._line.close()


def _listen(ports: range | None, backlog: int) -> socket.socket:
    """Return a listening socket, for IPv6 and IPv4 if possible, on a port of `ports` or any."""
    tries = [0] if ports is None else random.sample(ports, len(ports))
    problem: OSError | None = None
    for port in tries:
        for family in (socket.AF_INET6, socket.AF_INET):
            is_dual = family == socket.AF_INET6
            if is_dual and not socket.has_dualstack_ipv6():
                continue
            try:
                return socket.create_server(
                    ("", port), family=family, backlog=backlog, dualstack_ipv6=is_dual
                )
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
    raise AgreementError(
        f"no free port to listen on for the other nodes: {problem}; "
        f"tried {'any' if ports is None else f'{ports.start} to {ports.stop - 1}'}"
    )


def _own_addresses() -> list[str]:
    """Return the names and addresses by which other nodes may reach this one, best first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _dial(path: Path, timeout_s: float) -> tuple[Line, str]:
    timeout = Timeout(timeout_s)
    problem = f"{path} does not exist"
    while not timeout.is_over:
        try:
            document = json.loads(_read_own(path))
            token, port = bytes.fromhex(document["token"]), int(document["port"])
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        except _STRANGE as error:
            problem = str(error)
            time.sleep(POLL_S)
            continue
        for address in document["addresses"]:
            try:
                return _call_up(address, port, token), address
            except _STRANGE as error:
                # Refused, unresolvable, or another attempt's listener on a reused port.
                problem = f"{address}:{port}: {error}"
        time.sleep(POLL_S)
    raise AgreementError(
        f"could not join node 0 within {timeout_s:.0f} s; last problem: {problem}. "
        "Check that this node sees the run's root and can reach the port of node 0"
    )


def _read_own(path: Path) -> bytes:
    """Return the content of `path`. Raises `PermissionError` for another user's file.

    The writer of this file controls the node, because the node runs what the listener asks for.
    """
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as stream:
        owner = os.fstat(handle).st_uid
        if owner not in {os.geteuid(), *TRUSTED_USERS}:
            raise PermissionError(f"{path} belongs to user {owner}, expected {os.geteuid()}")
        return stream.read(HELLO_BYTES_MAX)


def _call_up(address: str, port: int, token: bytes) -> Line:
    line = Line(socket.create_connection((address, port), timeout=DIAL_TIMEOUT_S))
    try:
        _prove(line, token, Timeout(HANDSHAKE_TIMEOUT_S), is_host=False)
    except BaseException:
        line.close()
        raise
    return line


def _prove(line: Line, token: bytes, timeout: Timeout, *, is_host: bool) -> None:
    """Prove to the other end that we know the token, and check that it knows it too.

    Each answer contains the role of its sender, so that an answer cannot be sent back to its
    sender. Raises `PermissionError` if the other end's answer is wrong.
    """
    own, other = (b"host", b"member") if is_host else (b"member", b"host")
    nonce = secrets.token_bytes(NONCE_BYTES)
    line.send({"nonce": nonce.hex()}, timeout)
    theirs = bytes.fromhex(_take(line, timeout)["nonce"])
    line.send({"proof": hmac.digest(token, own + theirs, "sha256").hex()}, timeout)
    answer = bytes.fromhex(_take(line, timeout)["proof"])
    if not hmac.compare_digest(answer, hmac.digest(token, other + nonce, "sha256")):
        raise PermissionError("the other end does not know the attempt's token")


def _take(line: Line, timeout: Timeout) -> dict[str, Any]:
    """Return the next message of a handshake. Raises `TimeoutError` if it is late."""
    message = line.receive(timeout)
    if message is None:
        raise TimeoutError(f"the handshake was not complete within {timeout.seconds:.0f} s")
    return message


def _is_listening(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
