"""Requests to a metadata service: plain HTTP by the standard library, bounded in time and bytes.

Proxies are never used and redirections never followed. A timer closes the connection of a service
that answers byte by byte, because the socket's own timeout restarts with every byte.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.contracts.errors import NoticeError
from holdfast.workers.agent.notices.notice import Poll

LINK_LOCAL: Final = "http://169.254.169.254"
REQUEST_TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 * 1024
EXCERPT_MAX: Final = 200


@dataclass(frozen=True)
class MetadataAnswer:
    """An answer; `headers` are by lower-case name."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """The body as text, stripped."""
        return self.body.decode(errors="replace").strip()

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises `NoticeError` for anything else."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise NoticeError(f"expected JSON, got {self.excerpt}") from error
        if not isinstance(found, dict):
            raise NoticeError(f"expected a JSON object, got {self.excerpt}")
        return found

    @property
    def excerpt(self) -> str:
        """The beginning of the body, for messages."""
        return repr(self.text[:EXCERPT_MAX])


class Metadata:
    """One service at `base`; safe for use by several threads."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_closed = False

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> MetadataAnswer:
        """Send one request and return its answer within `timeout_s` (default: `REQUEST_TIMEOUT_S`).

        Raises `NoticeError`.
        """
        timeout_s = REQUEST_TIMEOUT_S if timeout_s is None else timeout_s
        give_up = time.monotonic() + timeout_s
        connection = None
        try:
            parts = urlsplit(self._base)
            connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
            connection.connect()
            with self._hanging_up(connection.sock, timeout_s):
                where = parts.path.rstrip("/") + path
                connection.request(method, where, body, {**headers, "Connection": "close"})
                response = connection.getresponse()
                content = response.read(ANSWER_BYTES_MAX + 1)
        except (OSError, HTTPException, ValueError) as error:
            message = str(error)[:EXCERPT_MAX] or type(error).__name__
            raise NoticeError(f"{method} {self._base}{path}: {message}") from error
        finally:
            if connection is not None:
                connection.close()
        # The library treats a truncated answer as complete.
        if time.monotonic() > give_up or (response.length and len(content) <= ANSWER_BYTES_MAX):
            raise NoticeError(f"{method} {path}: the answer was incomplete after {timeout_s:.1f} s")
        if len(content) > ANSWER_BYTES_MAX:
            raise NoticeError(f"{method} {path}: the answer has more than {ANSWER_BYTES_MAX} bytes")
        named = {name.lower(): value for name, value in response.getheaders()}
        return MetadataAnswer(response.status, content, named)

    def close(self) -> None:
        """Abort all open requests; later requests fail."""
        with self._lock:
            self._is_closed = True
            for one in self._open:
                _shut(one)

    @contextlib.contextmanager
    def _hanging_up(self, connected: socket.socket, timeout_s: float) -> Any:
        timer = threading.Timer(timeout_s, _shut, (connected,))
        timer.daemon = True
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the agent is closing")
            self._open.add(connected)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connected)


class Cloud(ABC):
    """One cloud's metadata service, seen from a node. Its methods raise `NoticeError`."""

    name: str
    every_s: float

    def __init__(self, base: str) -> None:
        self._service = Metadata(base)

    @abstractmethod
    def probe(self) -> None:
        """Return if this machine belongs to the cloud; raise otherwise."""

    @abstractmethod
    def polls(self) -> tuple[Poll, ...]:
        """Return functions that check for notices at a given Unix time, each in its own thread."""

    def acknowledge(self, event_id: str) -> None:  # noqa: B027
        """Tell the cloud that it need not wait any longer. Most take the node when time is up."""

    def close(self) -> None:
        """Abort all open requests."""
        self._service.close()


def expect(answer: MetadataAnswer, *statuses: int) -> MetadataAnswer:
    """Return the answer if its status is one of `statuses`; otherwise raise `NoticeError`."""
    if answer.status not in statuses:
        wanted = " or ".join(map(str, statuses))
        raise NoticeError(f"status {answer.status}, expected {wanted}: {answer.excerpt}")
    return answer


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
