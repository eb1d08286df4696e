"""A TCP connection between two nodes that carries JSON messages with a length prefix.

Every wait has a limit, because the other end may be slow, stop in the middle of a message, or not
be a node of this attempt.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

from holdfast.contracts.node.timeouts import LOOK_S, Timeout

MESSAGE_BYTES_MAX: Final = 64 << 20
CHUNK_BYTES: Final = 1 << 18
SEND_TIMEOUT_S: Final = 30.0
_LENGTH: Final = struct.Struct(">I")
# A node that loses power does not close its connection. The kernel detects this after about 25 s.
_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
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


class Line:
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
