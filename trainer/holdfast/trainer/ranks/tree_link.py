"""One connection between two ranks: the proof that both belong to the job, and whole messages."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any, Final

from holdfast.contracts.node.handshake import Proof

READ_BYTES: Final = 1 << 20
HELLO_BYTES_MAX: Final = 4096
GREET_S: Final = 5.0
DIAL_S: Final = 5.0
ANSWER_S: Final = 30.0
DIAL_NAP_S: Final = 0.05
# A host that no longer answers is noticed after three minutes.
KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 8),
)
_HEAD: Final = struct.Struct("<BQ")


class _Kind(IntEnum):
    MESSAGE = 0
    FAILED = 1
    LEFT = 2


class Link:
    """A connected neighbour. `messages` are those that have arrived, oldest first.

    With `has_left`, it has closed its end in an orderly way.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self.messages: deque[bytes] = deque()
        self.has_left = False
        self._socket, self._arrived = connected, bytearray()
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def handle(self) -> int:
        """The file descriptor."""
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Send a message. Raises `OSError` if the neighbour has ended or does not take it."""
        self._send(_Kind.MESSAGE, content)

    def hear(self) -> str:
        """Take what has arrived. Return the problem that the neighbour passes on, or "".

        Raises `OSError` if the neighbour has ended without leaving.
        """
        arrived = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        if not arrived:
            raise ConnectionResetError("closed")
        self._arrived += arrived
        while len(self._arrived) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._arrived)
            end = _HEAD.size + size
            if len(self._arrived) < end:
                break
            content = bytes(memoryview(self._arrived)[_HEAD.size : end])
            del self._arrived[:end]
            if kind == _Kind.FAILED:
                return content.decode(errors="replace")
            if kind == _Kind.LEFT:
                self.has_left = True
                break
            self.messages.append(content)
        return ""

    def leave(self) -> None:
        """Close this end in an orderly way."""
        self._last(_Kind.LEFT, b"")

    def fail(self, problem: str) -> None:
        """Pass a problem on, and close this end."""
        self._last(_Kind.FAILED, problem.encode())

    def close(self) -> None:
        """Close this process's descriptor only."""
        self._socket.close()

    def _last(self, kind: _Kind, content: bytes) -> None:
        # The neighbour may have ended, or may not read any more.
        with contextlib.suppress(OSError):
            self._socket.settimeout(GREET_S)
            self._send(kind, content)
        self._socket.close()

    def _send(self, kind: _Kind, content: bytes) -> None:
        head = _HEAD.pack(kind, len(content))
        if len(content) < READ_BYTES:
            self._socket.sendall(head + content)
        else:
            self._socket.sendall(head)
            self._socket.sendall(content)


def dial(
    addresses: Sequence[str], port: int, token: bytes, hello: dict[str, Any], give_up: float
) -> socket.socket | None:
    """Return a connection to the rank that listens at one of `addresses`, or None if there is none.

    It tries all of them until `give_up`, a monotonic time. Both ends prove that they know `token`.
    """
    while time.monotonic() < give_up:
        for address in addresses:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                connected = socket.create_connection((address, port), timeout=DIAL_S)
                try:
                    # The other end accepts once it is connected itself. A stranger never answers.
                    connected.settimeout(ANSWER_S)
                    proof = Proof(token, is_host=False)
                    _write(connected, {**proof.opening, **hello})
                    theirs = _read(connected)
                    _write(connected, proof.answer(theirs))
                    proof.check(theirs)
                    _read(connected)
                except BaseException:
                    connected.close()
                    raise
                return connected
        time.sleep(DIAL_NAP_S)
    return None


def greet(
    listener: socket.socket, token: bytes, title: str, own: int, expected: Collection[int]
) -> tuple[int, socket.socket]:
    """Accept one connection of a child. Return the child's number and the connection.

    Raises `OSError` if nobody connects, or a stranger does.
    """
    connected, _ = listener.accept()
    try:
        connected.settimeout(GREET_S)
        proof = Proof(token, is_host=True)
        theirs = _read(connected)
        _write(connected, {**proof.opening, **proof.answer(theirs)})
        proof.check(_read(connected))
        child = int(theirs["from"])
        if theirs["tree"] != title or theirs["to"] != own or child not in expected:
            raise ConnectionRefusedError("a rank of another tree")
        _write(connected, {})
    except (ValueError, LookupError, TypeError) as error:
        connected.close()
        raise ConnectionRefusedError("not a rank of this job") from error
    except BaseException:
        connected.close()
        raise
    return child, connected


def _write(connected: socket.socket, document: dict[str, Any]) -> None:
    connected.sendall(json.dumps(document).encode() + b"\n")


def _read(connected: socket.socket) -> dict[str, Any]:
    """Return one line, read byte by byte, because messages follow it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = connected.recv(1)
        if not piece or len(line) > HELLO_BYTES_MAX:
            raise ConnectionResetError("closed during the handshake")
        line += piece
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__}, expected an object")
    return document
