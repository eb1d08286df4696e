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
from typing import Any, Final

from holdfast.contracts.timeouts import LOOK_S, Timeout

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


class Line:
    """A connected socket, owned by this object. Only one thread at a time may use it."""

    def __init__(self, connected: socket.socket, *, bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        """Take over a socket. `bytes_max` is the longest message accepted from the other end."""
        for level, option, value in _OPTIONS:
            connected.setsockopt(level, option, value)
        connected.setblocking(False)
        self._socket = connected
        self._taken = bytearray()
        self.bytes_max = bytes_max

    def send(self, message: dict[str, Any], timeout: Timeout | None = None) -> None:
        """Send one message. Raises `OSError` if the other end is gone or reads nothing."""
        timeout = timeout or Timeout(SEND_TIMEOUT_S)
        content = json.dumps(message).encode()
        left = memoryview(_LENGTH.pack(len(content)) + content)
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
        breaks, and `ValueError` for an invalid message or one longer than `bytes_max`.
        """
        while (message := self._next()) is None:
            try:
                chunk = self._socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                if timeout.is_over:
                    return None
                self._wait(select.POLLIN, timeout)
                continue
            if not chunk:
                raise EOFError("the other end closed the connection")
            self._taken += chunk
        return message

    def is_quiet(self) -> bool:
        """Return True if the other end has sent nothing new and has not closed the connection."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._taken
        except OSError:
            return False
        return False

    def hang_up(self) -> None:
        """Shut the connection down, from any thread. A thread in `receive` gets `EOFError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close the socket. Messages already sent still arrive."""
        self.hang_up()
        self._socket.close()

    def _next(self) -> dict[str, Any] | None:
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

    def _wait(self, event: int, timeout: Timeout) -> None:
        """Wait for the socket for at most `LOOK_S`. The caller then checks its timeout."""
        with contextlib.suppress(InterruptedError):
            waiter = select.poll()
            waiter.register(self._socket, event)
            waiter.poll(min(timeout.left_s, LOOK_S) * 1000)
