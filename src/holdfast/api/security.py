"""The checks of every request before a route sees it, and the headers of every response.

A page of another site can make a browser send requests to this server. If it points its own host
name at this address (DNS rebinding), it can even read the responses. Therefore `Host` must name
this server, and a write from a browser must come from the server's own page.
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
    """The host names that requests may use: `hosts`, in lower case, and those of loopback.

    With `any_address`, IP addresses are accepted too. DNS rebinding is not possible with these.
    """

    hosts: frozenset[str] = frozenset()
    any_address: bool = False

    def is_ours(self, host: str) -> bool:
        """Return True if `host`, a `Host` header with or without a port, names this server."""
        name = host_name(host)
        if name in {"localhost", "127.0.0.1", "::1"} or name in self.hosts:
            return True
        return self.any_address and is_address(name)


class Guard:
    """ASGI middleware: rejects invalid requests and adds the security headers to every response.

    `answered` is called for each response with the method, the status and the seconds until the
    response started.
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
        bounded = _Bounded(receive)

        async def send_guarded(message: Message) -> None:
            nonlocal has_begun
            if bounded.is_exceeded:
                # The route saw an incomplete body, so its response must not be sent.
                return
            if message["type"] == "http.response.start":
                has_begun = True
                took_s = time.monotonic() - began
                self._answered(scope["method"], message["status"], took_s)
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        # Before any route: a page of another site must not reach even a route that reads nothing.
        refusal = problem_with(scope["method"], Headers(scope=scope), self._access_policy)
        if refusal is not None:
            status, message = refusal
            await refused(status, message)(scope, receive, send_guarded)
            return
        try:
            await self._app(scope, bounded.receive, send_guarded)
        # An unexpected error: the client gets a plain message and the log gets the traceback.
        except Exception:
            LOG.exception("%s %s", scope["method"], scope["path"])
            if has_begun:
                raise
            message = "internal server error; the server's log has the traceback"
            await refused(500, message)(scope, receive, send_guarded)
        if bounded.is_exceeded and not has_begun:
            # The answer is sent here, after the route has ended without one.
            bounded.is_exceeded = False
            message = f"the request body is larger than {BODY_BYTES_MAX} bytes"
            await refused(413, message, {"Connection": "close"})(scope, receive, send_guarded)


class _Bounded:
    """Limits a body without a Content-Length to `BODY_BYTES_MAX`: beyond that, it disconnects.

    `is_exceeded` then is True.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = BODY_BYTES_MAX
        self.is_exceeded = False

    async def receive(self) -> Message:
        # The client's own Content-Length may be missing or wrong, so the bytes are counted.
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.is_exceeded = True
            return {"type": "http.disconnect"}
        return message


def problem_with(
    method: str, headers: Headers, access_policy: AccessPolicy
) -> tuple[int, str] | None:
    """Return the status and message with which to refuse a request, or None to accept it."""
    host = headers.get("host", "")
    # Several `Host` headers could show a proxy and this server different names.
    if len(headers.getlist("host")) != 1 or not access_policy.is_ours(host):
        return 421, (
            f"the Host header {host[:100]!r} does not name this server; to accept this name, "
            "start it with `holdfast serve --name NAME`"
        )
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        return 400, f"Content-Length is {length[:20]!r}; expected a number"
    if int(length) > BODY_BYTES_MAX:
        return 413, f"the request body has {length} bytes; expected at most {BODY_BYTES_MAX}"
    if method in SAFE_METHODS:
        return None
    return _foreign_problem(headers, host)


def _foreign_problem(headers: Headers, host: str) -> tuple[int, str] | None:
    """Return why a write request does not come from the server's own page, or None."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if origin is not None and not _is_of(origin, host, trusts_port=site == "same-origin"):
        return 403, (
            f"the page comes from {origin[:100]!r}, and the Host header is {host[:100]!r}: write "
            "requests from pages of another origin are not allowed. If this is the server's own "
            "page, let the proxy keep the Host header with its port"
        )
    if site not in {"none", "same-origin"}:
        return 403, "write requests from pages of another site are not allowed"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A form of another site can send anything but JSON without a preflight request.
    if headers.get("content-length", "0") != "0" and kind != "application/json":
        return 415, f"Content-Type is {kind[:50]!r}; expected application/json"
    return None


def _is_of(origin: str, host: str, *, trusts_port: bool) -> bool:
    """Return True if a page of `origin` is one of this server, which was reached as `host`.

    A proxy on another port often leaves the port out of `Host`. A browser that says `same-origin`
    has compared the ports itself.
    """
    its = urlsplit(origin).netloc.lower()
    return its == host.lower() or (trusts_port and its != "" and host_name(its) == host_name(host))


def host_name(host: str) -> str:
    """Return the name in a `Host` header without port and brackets, in lower case."""
    if host.startswith("["):
        # A bracket without its pair, or with anything but a port behind it, names no host.
        name, bracket, port = host[1:].partition("]")
        is_name = bracket and (not port or (port[0] == ":" and port[1:].isdecimal()))
        return name.lower() if is_name else host.lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)
