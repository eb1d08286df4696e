"""The channel between the nodes of one attempt: node 0 listens, the others call.

Standard library only: connections of `multiprocessing.connection`, JSON in their byte messages
and never pickles. Both ends prove that they know a random token (HMAC-SHA256 over the other's
nonce) before a word is read. Address and token lie in the attempt's folder, readable by the
run's user alone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.board import NOWHERE, Board, Proposal
from holdfast.contracts.durable import to_json, write_bytes
from holdfast.contracts.errors import AgreementError

CALL_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 300.0
DIAL_TIMEOUT_S: Final = 5.0
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_MAX: Final = 256
HELLO_BYTES_MAX: Final = 64 * 1024
POLL_S: Final = 0.1
NONCE_BYTES: Final = 32
# A node that lost its power sends no farewell: the kernel asks, and gives up after about 25 s.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class ChannelHost:
    """Node 0's end: accepts the other nodes and asks them things, one question at a time."""

    def __init__(self, path: Path, nodes: int) -> None:
        self._token = secrets.token_bytes(32)
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=max(nodes, 16))
        self._handshakes = threading.BoundedSemaphore(HANDSHAKES_MAX)
        self.port = int(self._listener.getsockname()[1])
        self.nodes = nodes
        self.peers: dict[int, Peer] = {}
        self._joining = threading.Lock()
        document = {
            "addresses": _own_addresses(),
            "port": self.port,
            "token": self._token.hex(),
        }
        write_bytes(path, to_json(document), mode=0o600)
        threading.Thread(target=self._accept, name="channel", daemon=True).start()

    def wait_for_peers(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait until every other node has called; raises `AgreementError` naming those missing."""
        give_up = time.monotonic() + timeout_s
        while len(self.peers) < self.nodes - 1:
            if time.monotonic() > give_up:
                missing = sorted(set(range(1, self.nodes)) - set(self.peers))
                raise AgreementError(
                    f"nodes {missing} did not join within {timeout_s:.0f} s; expected all "
                    f"{self.nodes}. Is the run's root shared, and can nodes reach port {self.port}?"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Hang up on everybody; the others take it as the end."""
        # Closing alone would leave the thread in `accept`, and with it the port open.
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
                # The caller was gone again, or descriptors ran out for the moment.
                time.sleep(POLL_S)
                continue
            # Each caller has a thread of its own: one that stays silent keeps nobody waiting.
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(caller,), daemon=True).start()
            else:
                caller.close()

    def _admit(self, caller: socket.socket) -> None:
        connection = None
        try:
            connection = _wrap(caller)
            _prove(connection, self._token, is_host=True)
            hello = json.loads(_take(connection, HELLO_BYTES_MAX))
            self._take_in(int(hello["node"]), Peer(connection, hello))
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            # A stranger, or a node that died meanwhile: it is as if it had never called.
            (connection or caller).close()
        finally:
            self._handshakes.release()

    def _take_in(self, node: int, caller: Peer) -> None:
        """Let a node join. While the first that called for it is there, a second one is refused."""
        with self._joining:
            before = self.peers.get(node)
            if before is not None and before.is_there():
                caller.tell(refused=before.hello)
                caller.close()
                return
            # The first question comes after the welcome, and the welcome after all can see it.
            with caller.asking:
                self.peers[node] = caller
                caller.tell(refused=None)
        if before is not None:
            before.close()


class Peer:
    """Another node, as node 0 sees it. Also a `NodePort` of the stop agreement."""

    def __init__(self, connection: Connection, hello: dict[str, Any]) -> None:
        self._connection = connection
        self.asking = threading.Lock()
        self.hello = hello
        self.is_lost = False

    def is_there(self) -> bool:
        """False once the node has hung up. Between two questions it has nothing to say."""
        if self.is_lost:
            return False
        if not self.asking.acquire(blocking=False):
            return True
        try:
            return not self._connection.poll(0)
        except (OSError, EOFError):
            return False
        finally:
            self.asking.release()

    def tell(self, **data: Any) -> None:
        """Say something that is no question."""
        self._connection.send_bytes(json.dumps(data).encode())

    def call(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **data: Any) -> dict[str, Any]:
        """Ask the node and wait for its answer; raises `ConnectionError` when it is lost."""
        with self.asking:
            try:
                self._connection.send_bytes(json.dumps({"kind": kind, **data}).encode())
                if not self._connection.poll(timeout_s):
                    raise ConnectionError(f"no answer to {kind} within {timeout_s:.0f} s")
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                self.is_lost = True
                raise ConnectionError(f"node {self.hello['node']} is lost: {error}") from error
        return answer

    def newest_entered(self) -> int:
        return int(self.call("newest")["step"])

    def propose(self, serial: int, step: int) -> bool:
        return bool(self.call("propose", serial=serial, step=step)["accepted"])

    def answer(self, serial: int, state: Proposal) -> None:
        self.call("answer", serial=serial, state=int(state))

    def close(self) -> None:
        self._connection.close()


class ChannelMember:
    """Another node's end: calls node 0 and answers its questions from `handlers`."""

    def __init__(
        self, path: Path, hello: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Raises `AgreementError` when node 0 is not there, or another one speaks for the node."""
        self._connection, self.host_address = _dial(path, timeout_s)
        try:
            self._connection.send_bytes(json.dumps(hello).encode())
            first = json.loads(_take(self._connection, HELLO_BYTES_MAX))["refused"]
        except (OSError, EOFError) as error:
            self._connection.close()
            raise AgreementError(
                f"node 0 hung up on node {hello['node']} before it had joined: {error}"
            ) from error
        if first is not None:
            self._connection.close()
            raise AgreementError(
                f"node {hello['node']} has joined already, as {first}; a second agent for it "
                f"({hello}) is not let in"
            )

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Node 0's next question, or None when none came; `ConnectionError` when it is gone."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            question: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error
        return question

    def reply(self, **data: Any) -> None:
        """Answer the question received last."""
        self._connection.send_bytes(json.dumps(data).encode())

    def close(self) -> None:
        self._connection.close()


def answer_for_board(board: Board, question: dict[str, Any]) -> dict[str, Any] | None:
    """A member's answer to the questions of the stop agreement; None for any other question."""
    kind = question["kind"]
    if kind == "newest":
        return {
            "step": board.newest_entered,
            "oldest": board.oldest_entered,
            "signal": board.signals,
            "asked": board.asked,
        }
    if kind == "propose":
        board.propose(question["serial"], question["step"])
        return {"accepted": board.accepts(question["serial"], question["step"])}
    if kind == "answer":
        board.answer(question["serial"], Proposal(question["state"]))
        return {}
    if kind == "announce":
        board.announce_stop(question.get("deadline"))
        return {"step": NOWHERE}
    return None


def _own_addresses() -> list[str]:
    """Names and addresses under which another node may reach this one, best first."""
    name = socket.gethostname()
    found = [name]
    try:
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError:
        found.append("127.0.0.1")
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _dial(path: Path, timeout_s: float) -> tuple[Connection, str]:
    give_up = time.monotonic() + timeout_s
    problem = f"{path} was not there"
    while time.monotonic() < give_up:
        try:
            document = json.loads(path.read_bytes())
            token, port = bytes.fromhex(document["token"]), int(document["port"])
        except (OSError, ValueError):
            time.sleep(POLL_S)
            continue
        for address in document["addresses"]:
            try:
                return _call_up(address, port, token), address
            except (OSError, EOFError) as error:
                # Refused, unresolvable, or another attempt's listener on a port used again.
                problem = f"{address}:{port}: {error}"
        time.sleep(POLL_S)
    raise AgreementError(
        f"could not join node 0 within {timeout_s:.0f} s; last seen: {problem}. "
        "Is the run's root shared, and can this node reach that port?"
    )


def _call_up(address: str, port: int, token: bytes) -> Connection:
    connection = _wrap(socket.create_connection((address, port), timeout=DIAL_TIMEOUT_S))
    try:
        _prove(connection, token, is_host=False)
    except BaseException:
        connection.close()
        raise
    return connection


def _prove(connection: Connection, token: bytes, *, is_host: bool) -> None:
    """Show the other end that we know the token, and see that it does.

    Each end answers the other's nonce under its own role's name, so that neither's answer can
    be sent back to it. Raises `PermissionError` when the other end's answer is wrong.
    """
    own, other = (b"host", b"member") if is_host else (b"member", b"host")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(nonce)
    theirs = _take(connection, NONCE_BYTES)
    connection.send_bytes(hmac.digest(token, own + theirs, "sha256"))
    answer = _take(connection, NONCE_BYTES)
    if not hmac.compare_digest(answer, hmac.digest(token, other + nonce, "sha256")):
        raise PermissionError("the other end does not know the attempt's token")


def _take(connection: Connection, bytes_max: int) -> bytes:
    """The next message of a handshake; `OSError` when it is late or too long."""
    if not connection.poll(HANDSHAKE_TIMEOUT_S):
        raise TimeoutError(f"silent for {HANDSHAKE_TIMEOUT_S:.0f} s in the handshake")
    return connection.recv_bytes(bytes_max)


def _wrap(connected: socket.socket) -> Connection:
    for level, option, value in _KEEPALIVE:
        connected.setsockopt(level, option, value)
    connected.setblocking(True)
    return Connection(connected.detach())


def _is_listening(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
