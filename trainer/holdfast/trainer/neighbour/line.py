"""A connection between the flushers of two nodes: JSON messages, each with bytes behind it.

A node's flusher writes its addresses and a random token to a file in the launch's folder that only
the run's user can read. Both ends prove that they know the token (`contracts.node.handshake`).

Owner → neighbour:

    hello {node, launch} → welcome {}
    begin {record, keep} → ready {lacks: [numbers of blocks]} | refused {reason}
        The neighbour forgets all steps of the owner but `keep`.
    block {number}, with its bytes; no answer
    end {} → held {step} | damaged {files}
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.node.clocks import LOOK_S, Timeout
from holdfast.contracts.node.handshake import Proof, read_address, set_options

HEAD_BYTES_MAX: Final = 64 << 20
# Before the other end has proved that it belongs to the attempt.
STRANGER_BYTES_MAX: Final = 4096
TIMEOUT_S: Final = 60.0
DIAL_S: Final = 5.0
HANDSHAKE_S: Final = 10.0
_HEAD: Final = struct.Struct(">IQ")


class Line:
    """A connected socket, owned by this object, for one thread. Every wait has a limit."""

    def __init__(self, connected: socket.socket, is_over: Callable[[], bool]) -> None:
        """Take over a socket. A wait ends with `ConnectionAbortedError` once `is_over()`."""
        set_options(connected)
        connected.setblocking(False)
        self._socket, self._is_over = connected, is_over
        self.head_bytes_max = STRANGER_BYTES_MAX
        self.waiting_bytes = 0

    def send(self, kind: str, content: memoryview | None = None, /, **data: Any) -> None:
        """Send one message. Raises `OSError` if the other end is gone or reads nothing."""
        head = json.dumps({"kind": kind, **data}).encode()
        size = 0 if content is None else len(content)
        self._send(memoryview(_HEAD.pack(len(head), size) + head))
        if content is not None:
            self._send(content)

    def receive(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any] | None:
        """Return the next message, or None if none begins in time.

        Read the bytes behind it, `waiting_bytes` of them, by `take` before the next call. Raises
        `OSError` if the connection ends or breaks, and `ValueError` for an invalid message.
        """
        if not self._wait(select.POLLIN, Timeout(timeout_s)):
            return None
        begin = memoryview(bytearray(_HEAD.size))
        self.take(begin)
        size, self.waiting_bytes = _HEAD.unpack(begin)
        if size > self.head_bytes_max:
            raise ValueError(f"a message of {size} bytes: expected at most {self.head_bytes_max}")
        head = memoryview(bytearray(size))
        self.take(head)
        try:
            message = json.loads(bytes(head))
        except RecursionError:
            message = None
        if not isinstance(message, dict) or "kind" not in message:
            raise ValueError("a message without a kind")
        return message

    def continue_until(self, is_over: Callable[[], bool]) -> None:
        """From now on, waits end once `is_over()`, and messages may be long."""
        self._is_over, self.head_bytes_max = is_over, HEAD_BYTES_MAX

    def expect(self, *kinds: str) -> dict[str, Any]:
        """Return the next message, which must be of one of these kinds. Raises like `receive`."""
        message = self.receive()
        if message is None:
            raise TimeoutError(f"no answer within {TIMEOUT_S:.0f} s")
        if message["kind"] not in kinds:
            raise ValueError(f"a message {message['kind']!r}: expected {' or '.join(kinds)}")
        return message

    def take(self, target: memoryview) -> None:
        """Read bytes until `target` is full. Raises `OSError` if they do not arrive."""
        timeout = Timeout(TIMEOUT_S)
        while target:
            try:
                count = self._socket.recv_into(target)
            except BlockingIOError:
                if not self._wait(select.POLLIN, timeout):
                    raise TimeoutError(f"no bytes within {TIMEOUT_S:.0f} s") from None
                continue
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            target = target[count:]
            timeout.restart()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, content: memoryview) -> None:
        timeout = Timeout(TIMEOUT_S)
        while content:
            try:
                content = content[self._socket.send(content) :]
                timeout.restart()
            except BlockingIOError:
                if not self._wait(select.POLLOUT, timeout):
                    raise TimeoutError(f"nothing was read within {TIMEOUT_S:.0f} s") from None

    def _wait(self, event: int, timeout: Timeout) -> bool:
        """Return True once the socket is ready, and False when the time is up."""
        waiter = select.poll()
        waiter.register(self._socket, event)
        while not self._is_over():
            if waiter.poll(min(timeout.left_s, LOOK_S) * 1000):
                return True
            if timeout.is_over:
                return False
        raise ConnectionAbortedError("the flusher ends, or has another neighbour")


def call(place: Path, hello: dict[str, Any], is_over: Callable[[], bool]) -> Line:
    """Return a connection to the flusher whose address file is `place`.

    Raises `OSError`, `ValueError` or `LookupError` if it cannot be reached or is not the one.
    """
    addresses, port, token = read_address(place)
    problem: Exception = ConnectionRefusedError(f"{place} lists no address")
    for address in addresses:
        try:
            line = Line(socket.create_connection((address, port), timeout=DIAL_S), is_over)
        except OSError as error:
            problem = error
            continue
        try:
            proof = Proof(token, is_host=False)
            line.send("nonce", **proof.opening)
            line.send("proof", **proof.answer(line.expect("nonce")))
            proof.check(line.expect("proof"))
            line.continue_until(is_over)
            line.send("hello", **hello)
            line.expect("welcome")
        except BaseException as error:
            line.close()
            if not isinstance(error, OSError | ValueError | LookupError):
                raise
            problem = error
            continue
        return line
    raise problem


def answer(
    connected: socket.socket, token: bytes, is_over: Callable[[], bool]
) -> tuple[Line, dict[str, Any]]:
    """Return the connection to a caller that knows `token`, and its hello message.

    Raises `OSError`, `ValueError` or `LookupError` for any other caller, and for one that takes
    longer than `HANDSHAKE_S`.
    """
    give_up = time.monotonic() + HANDSHAKE_S
    line = Line(connected, lambda: is_over() or time.monotonic() > give_up)
    try:
        proof = Proof(token, is_host=True)
        theirs = line.expect("nonce")
        line.send("nonce", **proof.opening)
        line.send("proof", **proof.answer(theirs))
        proof.check(line.expect("proof"))
        line.continue_until(is_over)
        hello = line.expect("hello")
        line.send("welcome")
    except BaseException:
        line.close()
        raise
    return line, hello
