"""The channel between the nodes of one attempt: node 0 listens, the others call.

Standard library only: JSON messages (`contracts.lines`), never pickles. Both ends prove that they
know a random token (HMAC-SHA256 over the other's nonce) before a word is read. Address and token
lie in the attempt's folder, readable by the run's user alone.

Every question has a number, and its answer has the same one: a late answer is dropped, and never
taken for the answer to a later question. A node that does not answer in time is dismissed: it is
told so, and its connection is closed.
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
from holdfast.contracts.rank_status import NOWHERE, Proposal, RankStatusTable
from holdfast.contracts.reading import open_regular
from holdfast.contracts.timeouts import Timeout

CALL_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 300.0
DIAL_TIMEOUT_S: Final = 5.0
# For all of a handshake together, however little at a time the other end says.
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_MAX: Final = 256
BACKLOG_MIN: Final = 1024
HELLO_BYTES_MAX: Final = 64 * 1024
POLL_S: Final = 0.1
NONCE_BYTES: Final = 32
DISMISSED: Final = "dismissed"
# root needs no trick.
TRUSTED_USERS: Final = frozenset({0})
_STRANGE: Final = (OSError, EOFError, ValueError, LookupError, TypeError)


class DismissedError(ConnectionError):
    """Node 0 has given this node up, and goes on without it."""


class ChannelHost:
    """Node 0's end: accepts the other nodes and asks them things, one question at a time."""

    def __init__(self, path: Path, nodes: int, *, ports: range | None = None) -> None:
        """Listens on a port of `ports`, or on any. Raises `AgreementError` when all are taken."""
        self._token = secrets.token_bytes(32)
        self._listener = _listen(ports, backlog=max(nodes, BACKLOG_MIN))
        self.port = int(self._listener.getsockname()[1])
        self.nodes = nodes
        self.peers: dict[int, Peer] = {}
        self._joining = threading.Lock()
        self._callers: dict[Line, None] = {}
        self._calling = threading.Lock()
        document = {
            "addresses": _own_addresses(),
            "port": self.port,
            "token": self._token.hex(),
        }
        write_bytes(path, to_json(document), mode=0o600)
        threading.Thread(target=self._accept, name="channel", daemon=True).start()

    def wait_for_peers(
        self, timeout_s: float = JOIN_TIMEOUT_S, *, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until every other node has called, or `is_over()`.

        Raises `AgreementError` that names those missing.
        """
        timeout = Timeout(timeout_s)
        while len(self.peers) < self.nodes - 1 and not is_over():
            if timeout.is_over:
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
            with contextlib.suppress(OSError):
                line = self._register(Line(caller, bytes_max=HELLO_BYTES_MAX))
                threading.Thread(target=self._admit, args=(line,), daemon=True).start()

    def _register(self, line: Line) -> Line:
        """Count a caller in; where there are too many, the one that came first must go.

        A node is through with its handshake in milliseconds, so the first is none of ours.
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
            # A stranger, or a node that died meanwhile: it is as if it had never called.
            line.close()
        finally:
            with self._calling:
                self._callers.pop(line, None)

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
    """Another node, as node 0 sees it. Also a `NodePort` of the stop agreement.

    Several threads may ask it things; each waits for its turn.
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
        """How long the question that is open now has been waiting for its answer; 0 without one."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def is_there(self) -> bool:
        """False once the node has hung up. Between two questions it has nothing to say."""
        if self.is_lost:
            return False
        if not self.asking.acquire(blocking=False):
            return True
        try:
            return self._line.is_quiet()
        finally:
            self.asking.release()

    def tell(self, **data: Any) -> None:
        """Say something that is no question."""
        self._line.send(data)

    def call(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **data: Any) -> dict[str, Any]:
        """Ask the node and wait for its answer.

        Raises `ConnectionError` when it is lost. A node that does not answer within `timeout_s`
        seconds is lost from then on.
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
                    # It may only be slow, and must learn that nobody waits for it any longer.
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
    """Another node's end: calls node 0 and answers its questions from `handlers`."""

    def __init__(
        self, path: Path, hello: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        """Raises `AgreementError` when node 0 is not there, or another one speaks for the node."""
        self._line, self.host_address = _dial(path, timeout_s)
        self._question: int | None = None
        try:
            self._line.send(hello)
            first = _take(self._line, Timeout(HANDSHAKE_TIMEOUT_S))["refused"]
        except (OSError, EOFError, ValueError, LookupError) as error:
            self._line.close()
            raise AgreementError(
                f"node 0 hung up on node {hello['node']} before it had joined: {error}"
            ) from error
        if first is not None:
            self._line.close()
            raise AgreementError(
                f"node {hello['node']} has joined already, as {first}; a second agent for it "
                f"({hello}) is not let in"
            )

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Node 0's next question, or None when none came.

        Raises `ConnectionError` when node 0 is gone, `DismissedError` when it goes on without us.
        """
        try:
            question = self._line.receive(Timeout(timeout_s))
        except (OSError, EOFError, ValueError) as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error
        if question is None:
            return None
        if question["kind"] == DISMISSED:
            raise DismissedError("node 0 gave this node up: an answer took too long")
        self._question = question.pop("message", None)
        return question

    def reply(self, **data: Any) -> None:
        """Answer the question received last; raises `ConnectionError` when node 0 is gone."""
        try:
            self._line.send({**data, "answers": self._question})
        except OSError as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error

    def close(self) -> None:
        self._line.close()


def answer_from_status_table(
    status_table: RankStatusTable, question: dict[str, Any]
) -> dict[str, Any] | None:
    """A member's answer to the questions of the stop agreement; None for any other question."""
    kind = question["kind"]
    if kind == "newest":
        return {
            "step": status_table.newest_entered,
            "oldest": status_table.oldest_entered,
            "signal": status_table.signals,
            "asked": status_table.asked,
        }
    if kind == "propose":
        status_table.propose(question["serial"], question["step"])
        return {"accepted": status_table.accepts(question["serial"], question["step"])}
    if kind == "answer":
        status_table.answer(question["serial"], Proposal(question["state"]))
        return {}
    if kind == "announce":
        status_table.announce_stop(question.get("deadline"))
        return {"step": NOWHERE}
    return None


def _listen(ports: range | None, backlog: int) -> socket.socket:
    """A listener of both address families where there are two, on a port of `ports` or any."""
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
        f"no port to listen on for the other nodes: {problem}; "
        f"tried {'any' if ports is None else f'{ports.start} to {ports.stop - 1}'}"
    )


def _own_addresses() -> list[str]:
    """Names and addresses under which another node may reach this one, best first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _dial(path: Path, timeout_s: float) -> tuple[Line, str]:
    timeout = Timeout(timeout_s)
    problem = f"{path} was not there"
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
                # Refused, unresolvable, or another attempt's listener on a port used again.
                problem = f"{address}:{port}: {error}"
        time.sleep(POLL_S)
    raise AgreementError(
        f"could not join node 0 within {timeout_s:.0f} s; last seen: {problem}. "
        "Is the run's root shared, and can this node reach that port?"
    )


def _read_own(path: Path) -> bytes:
    """The content of `path`; raises `PermissionError` for another user's file.

    Whoever writes the address leads this node: it starts what it is told to.
    """
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as stream:
        owner = os.fstat(handle).st_uid
        if owner not in {os.geteuid(), *TRUSTED_USERS}:
            raise PermissionError(f"{path} is of user {owner}, expected {os.geteuid()}")
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
    """Show the other end that we know the token, and see that it does.

    Each end answers the other's nonce under its own role's name, so that neither's answer can
    be sent back to it. Raises `PermissionError` when the other end's answer is wrong.
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
    """The next message of a handshake; `TimeoutError` when it is late."""
    message = line.receive(timeout)
    if message is None:
        raise TimeoutError(f"no whole handshake within {timeout.seconds:.0f} s")
    return message


def _is_listening(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
