"""Limits on connections: their number, and how long a request or a slow reader may take.

A client that connects is not authenticated yet, so an unfinished request must be cheap and must
end soon. uvicorn itself limits only the idle time between two requests.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# From the start of a connection, or a request's first byte, to the last byte of the body.
REQUEST_S_MAX: Final = 20.0
# A client that reads nothing of its response for this long is disconnected.
STALL_S_MAX: Final = 60.0
CONNECTIONS_MAX: Final = 4096
OPEN_FILES_WANTED: Final = 16_384
# Reserved for the database, journals, logs and static files.
OPEN_FILES_KEPT: Final = 256
_UNFINISHED: Final = frozenset({h11.IDLE, h11.SEND_BODY})


def raise_open_files() -> int:
    """Raise the limit of open files if possible; return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else soft - OPEN_FILES_KEPT
    return max(1, min(CONNECTIONS_MAX, most))


def limited_protocol(
    connections_max: int, request_s: float = REQUEST_S_MAX, stall_s: float = STALL_S_MAX
) -> type[H11Protocol]:
    """Return a protocol class for `uvicorn.Config(http=…)` of one server.

    If `connections_max` connections are open, a new one replaces the one that has waited longest
    without a complete request. If requests are in progress on all others, the new one is closed.
    """
    waiting: dict[asyncio.Protocol, None] = {}

    class Limited(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            # From the first moment: a client that sends nothing is the cheapest attack.
            super().connection_made(transport)
            self._await_request()
            if len(self.connections) > connections_max:
                # The one that has waited longest is the least likely to be a user.
                oldest: Any = next(iter(waiting))
                oldest.transport.abort()
                oldest._forget()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state in _UNFINISHED:
                self._await_request()
            else:
                self._forget()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # Between two requests, uvicorn's own shorter limit applies.
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                waiting[self] = None

        def pause_writing(self) -> None:
            super().pause_writing()
            # A reader that stalls would keep the response in memory.
            self._stall = self.loop.call_later(stall_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._cancel_stall()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            self._cancel_stall()
            super().connection_lost(exc)

        def _await_request(self) -> None:
            waiting.setdefault(self)
            if self._deadline is None:
                self._deadline = self.loop.call_later(request_s, self.transport.abort)

        def _forget(self) -> None:
            waiting.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _cancel_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

    return Limited
