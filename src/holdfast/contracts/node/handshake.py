"""How two nodes of an attempt find each other, prove that they belong to it, and send lines."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import random
import secrets
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.reading import open_regular
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node.clocks import LOOK_S, Timeout

# A TCP connection between two nodes that carries JSON messages with a length prefix.
#
# Every wait has a limit, because the other end may be slow, stop in the middle of a message, or
# not be a node of this attempt.

MESSAGE_BYTES_MAX: Final = 64 << 20
CHUNK_BYTES: Final = 1 << 18
SEND_TIMEOUT_S: Final = 30.0
_LENGTH: Final = struct.Struct(">I")
# A node that loses power does not close its connection. The kernel detects this after about 25 s:
# by probes on an idle connection, and by the limit of unanswered data on any other.
SILENT_S: Final = 25
_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


def set_options(connected: socket.socket) -> None:
    """Send small messages at once, and have the kernel detect an end that lost power."""
    for level, option, value in _OPTIONS:
        connected.setsockopt(level, option, value)


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    content = json.dumps(message).encode()
    return _LENGTH.pack(len(content)) + content


class Decoder:
    """Puts received bytes together to messages of at most `bytes_max` bytes."""

    def __init__(self, bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._taken = bytearray()

    def feed(self, content: bytes) -> None:
        """Add received bytes."""
        self._taken += content

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the complete messages.

        Raises `ValueError` for an invalid message or one longer than `bytes_max`.
        """
        while (message := self.next()) is not None:
            yield message

    def next(self) -> dict[str, Any] | None:
        """Return the next complete message, or None. Raises like `messages`."""
        if len(self._taken) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._taken)
        if size > self.bytes_max:
            raise ValueError(f"a message of {size} bytes: expected at most {self.bytes_max}")
        end = _LENGTH.size + size
        if len(self._taken) < end:
            return None
        content = bytes(self._taken[_LENGTH.size : end])
        del self._taken[:end]
        try:
            message = json.loads(content)
        except RecursionError:
            message = None
        if not isinstance(message, dict):
            raise ValueError("a message that is not a JSON object")
        return message


class LineSocket:
    """A connected socket, owned by this object.

    One thread may receive while others send in turn.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over a socket."""
        set_options(connected)
        connected.setblocking(False)
        self._socket = connected
        self._decoder = Decoder()

    def send(self, message: dict[str, Any], timeout: Timeout | None = None) -> None:
        """Send one message. Raises `OSError` if the other end is gone or reads nothing."""
        timeout = timeout or Timeout(SEND_TIMEOUT_S)
        left = memoryview(encode(message))
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if timeout.is_over:
                    raise TimeoutError(
                        f"the other end did not read {len(left)} bytes within "
                        f"{timeout.seconds:.0f} s"
                    ) from None
                self._wait(select.POLLOUT, timeout)

    def receive(self, timeout: Timeout) -> dict[str, Any] | None:
        """Return the next message, or None if none was complete in time.

        Raises `EOFError` when the other end closed the connection, `OSError` when the connection
        breaks, and `ValueError` for an invalid message.
        """
        while (message := self._decoder.next()) is None:
            try:
                chunk = self._socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                if timeout.is_over:
                    return None
                self._wait(select.POLLIN, timeout)
                continue
            if not chunk:
                raise EOFError("the other end closed the connection")
            self._decoder.feed(chunk)
        return message

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Shut the connection down and close the socket. Messages already sent still arrive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, event: int, timeout: Timeout) -> None:
        """Wait for the socket for at most `LOOK_S`. The caller then checks its timeout."""
        with contextlib.suppress(InterruptedError):
            waiter = select.poll()
            waiter.register(self._socket, event)
            waiter.poll(min(timeout.left_s, LOOK_S) * 1000)


# How two nodes of an attempt find each other, and prove that they belong to it.
#
# Node 0 writes its addresses and a random token to a file in the attempt's folder that only the
# run's user can read. Each end sends a nonce, and answers the other's with an HMAC-SHA256 over
# both nonces.

NONCE_BYTES: Final = 32
ADDRESS_BYTES_MAX: Final = 64 * 1024
# root has full access anyway.
TRUSTED_USERS: Final = frozenset({0})


class Proof:
    """One end's part of a handshake.

    Send `opening`. Answer the other end's opening with `answer`, and give its answer to `check`.
    """

    def __init__(self, token: bytes, *, is_host: bool) -> None:
        self._token = token
        # Each answer contains the role of its sender, so it cannot be sent back to its sender.
        self._own, self._other = (b"host", b"member") if is_host else (b"member", b"host")
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.opening = {"nonce": self._nonce.hex()}

    def answer(self, opening: dict[str, Any]) -> dict[str, Any]:
        """Return the proof that this end knows the token."""
        theirs = bytes.fromhex(opening["nonce"])
        return {"proof": hmac.digest(self._token, self._own + theirs, "sha256").hex()}

    def check(self, answer: dict[str, Any]) -> None:
        """Raise `PermissionError` unless the other end knows the token."""
        expected = hmac.digest(self._token, self._other + self._nonce, "sha256")
        if not hmac.compare_digest(bytes.fromhex(answer["proof"]), expected):
            raise PermissionError("the other end does not know the attempt's token")


def parse_ports(text: str) -> range | None:
    """Return the ports of `FIRST-LAST`, as in `supervision.ports`; None for `any`."""
    if text == "any":
        return None
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def listen(ports: range | None, backlog: int) -> socket.socket:
    """Return a listening socket, for IPv6 and IPv4 if possible, on a port of `ports` or any.

    Raises `AgreementError` if all are in use.
    """
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


def own_addresses() -> list[str]:
    """Return the names and addresses by which other nodes may reach this one, best first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def read_address(path: Path) -> tuple[list[str], int, bytes]:
    """Return node 0's addresses, port and token.

    Raises `FileNotFoundError` while there is no file, `PermissionError` for another user's file,
    and `ValueError`, `LookupError` or `TypeError` for an invalid one.
    """
    document = json.loads(_read_own(path))
    return document["addresses"], int(document["port"]), bytes.fromhex(document["token"])


def _read_own(path: Path) -> bytes:
    """Return the content of `path`. Raises `PermissionError` for another user's file.

    The writer of this file controls the node, because the node runs what the listener asks for.
    """
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as stream:
        owner = os.fstat(handle).st_uid
        if owner not in {os.geteuid(), *TRUSTED_USERS}:
            raise PermissionError(f"{path} belongs to user {owner}, expected {os.geteuid()}")
        return stream.read(ADDRESS_BYTES_MAX)
