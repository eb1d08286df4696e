"""What holds for every request before any route sees it: hosts, origins, sizes, headers.

A page of another site may make a browser send requests here, and may, by pointing its own name
at this address, even read the answers. So the `Host` must be one of ours, and whoever changes
something must come from our own page or from no page at all.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.problems import LOG, refused

BODY_BYTES_MAX: Final = 64 * 1024
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
CONTENT_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, kw_only=True)
class AccessPolicy:
    """Who can reach the server: `hosts` are the names it goes by, in lower case.

    With `any_address` it goes by IP addresses too: no name server can point one elsewhere.
    """

    hosts: frozenset[str] = frozenset()
    any_address: bool = False

    def is_ours(self, host: str) -> bool:
        """True when `host`, a `Host` header with or without port, names this server."""
        name = host_name(host)
        if name in {"localhost", "127.0.0.1", "::1"} or name in self.hosts:
            return True
        return self.any_address and is_address(name)


class Guard:
    """ASGI middleware: refuses what no route should see, and puts headers on every answer.

    `answered` is told of each answer: method, status and seconds until it began.
    """

    def __init__(
        self, app: ASGIApp, access_policy: AccessPolicy, answered: Callable[[str, int, float], None]
    ) -> None:
        self._app = app
        self._access_policy = access_policy
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun, began = False, time.monotonic()

        async def send_guarded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                took_s = time.monotonic() - began
                self._answered(scope["method"], message["status"], took_s)
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = problem_with(scope["method"], Headers(scope=scope), self._access_policy)
        if refusal is not None:
            status, words = refusal
            await refused(status, words)(scope, receive, send_guarded)
            return
        try:
            await self._app(scope, _Bounded(receive).receive, send_guarded)
        # Whatever a route did not foresee: the asker is told, the log has the rest.
        except Exception:
            LOG.exception("%s %s", scope["method"], scope["path"])
            if has_begun:
                raise
            words = "the server failed on this request; its log has the traceback"
            await refused(500, words)(scope, receive, send_guarded)


class _Bounded:
    """Hands on a body of `BODY_BYTES_MAX` at most; one without a length may not go beyond."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = BODY_BYTES_MAX

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            return {"type": "http.disconnect"}
        return message


def problem_with(
    method: str, headers: Headers, access_policy: AccessPolicy
) -> tuple[int, str] | None:
    """Why a request is refused, as status and words; None when it may go on."""
    host = headers.get("host", "")
    if len(headers.getlist("host")) != 1 or not access_policy.is_ours(host):
        return 421, (
            f"this server does not go by the name {host[:100]!r}; start it with `holdfast serve "
            "--name NAME` if it should"
        )
    length = headers.get("content-length", "0")
    if not length.isdigit():
        return 400, f"content-length {length[:20]!r}: expected a number"
    if int(length) > BODY_BYTES_MAX:
        return 413, f"a body of {length} bytes, expected at most {BODY_BYTES_MAX}"
    if method in SAFE_METHODS:
        return None
    return _foreign_problem(headers, host)


def _foreign_problem(headers: Headers, host: str) -> tuple[int, str] | None:
    """Why a change that a browser sends does not come from our own page."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, "a page of another origin may not change anything here"
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        return 403, "a page of another site may not change anything here"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if headers.get("content-length", "0") != "0" and kind != "application/json":
        return 415, f"content type {kind[:50]!r}: expected application/json"
    return None


def host_name(host: str) -> str:
    """The name in a `Host` header, without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def is_address(name: str) -> bool:
    """True for an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """True for an address, or the name of one, that only this machine reaches."""
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)
