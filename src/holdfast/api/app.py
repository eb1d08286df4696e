"""The ASGI application: the routes, middleware and error handlers of one server.

The middleware does HTTP itself, the same for every route: HEAD, conditions and encodings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter, FastAPI
from fastapi.middleware.gzip import GZipMiddleware
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api import problems
from holdfast.api.query_names import KNOWN_QUERY
from holdfast.api.routes import (
    actions,
    checkpoints,
    curves,
    errors,
    live,
    logs,
    overview,
    page,
    runs,
    series,
    session,
)
from holdfast.api.schemas import Problem
from holdfast.api.security import Guard
from holdfast.api.services import Services
from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.version import holdfast_version

PREFIX: Final = "/api/v1"
COMPRESSED_BYTES_MIN: Final = 1000
# Higher levels save little, and each response is compressed again.
LEVEL: Final = 5


def create_app(services: Services, prefix: str = "") -> FastAPI:
    """Create the ASGI application. Its watch runs from start-up to shut-down.

    `prefix` is its path below a proxy, such as `/holdfast`. Requests may have it or not.
    """
    app = FastAPI(
        title="Holdfast",
        version=holdfast_version(),
        description="Runs, attempts, checkpoints and their lineage.",
        openapi_url=f"{PREFIX}/openapi.json",
        # These pages load scripts from other hosts, which the content security policy forbids.
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}},
    )
    app.state.services = services
    problems.register(app)
    api = APIRouter(prefix=PREFIX, dependencies=[KNOWN_QUERY])
    for module in (runs, series, logs, errors, checkpoints, overview, curves, actions, session):
        api.include_router(module.router)
    app.include_router(api)
    app.include_router(live.router)
    app.include_router(page.router)
    # Middleware that is added later runs earlier, so `Guard` sees each request first.
    app.add_middleware(BelowProxy, prefix=prefix)
    app.add_middleware(Conditional)
    # Starlette does not compress the event stream: compression would delay its events.
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES_MIN, compresslevel=LEVEL)
    app.add_middleware(Negotiation)
    app.add_middleware(
        Guard, access_policy=services.access_policy, answered=services.measures.answered
    )
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.hub.open()
    services.watch.start()
    try:
        yield
    finally:
        # Streams end first, so that no reader waits for a watch that has stopped.
        services.hub.close()
        services.watch.stop()
        services.jobs.close()
        services.session_audit.flush()
        services.store.index.close()


# The types of answers that get an ETag here. Files have one already.
TAGGED: Final = ("application/json", "text/html")
# What a 304 response repeats of the 200 response.
_KEPT_IN_304: Final = frozenset({"etag", "cache-control", "vary", "last-modified", "date"})


class Negotiation:
    """ASGI middleware: answers HEAD as GET without a body, and states the accepted encoding.

    The middleware and the routes inside see `gzip` or `identity` as the accepted encoding.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope={**scope, "headers": list(scope["headers"])})
        # Starlette looks for the word `gzip` only, and would compress for `gzip;q=0`.
        headers["accept-encoding"] = "gzip" if accepts_gzip(headers) else "identity"
        inner = {**scope, "headers": headers.raw}
        if scope["method"] == "HEAD":
            await _head(self._app, {**inner, "method": "GET"}, receive, send)
        else:
            await self._app(inner, receive, send)


class BelowProxy:
    """ASGI middleware: the server's path below a proxy, which may remove it from requests."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The router removes `root_path` where a request has it.
        await self._app({**scope, "root_path": self._prefix}, receive, send)


class Conditional:
    """ASGI middleware: gives JSON and HTML answers to GET an ETag; answers 304 if it matches."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("if-none-match", "")
        start: Message | None = None
        is_same = False

        async def send_checked(message: Message) -> None:
            nonlocal start, is_same
            if is_same:
                return
            if message["type"] == "http.response.start":
                start = message
                # The start waits for the body, because the ETag follows from it.
                return
            if start is not None:
                headers = MutableHeaders(scope=start)
                is_whole = not message.get("more_body") and "body" in message
                is_tagged = headers.get("content-type", "").startswith(TAGGED)
                if start["status"] == 200 and is_whole and is_tagged:
                    headers.setdefault("etag", f'W/"{digest_of(message["body"])}"')
                is_same = start["status"] == 200 and matches(headers.get("etag", ""), wanted)
                if is_same:
                    kept = [(k, v) for k, v in start["headers"] if k.decode() in _KEPT_IN_304]
                    await send({**start, "status": 304, "headers": kept})
                    await send({"type": "http.response.body", "body": b""})
                    return
                await send(start)
                start = None
            await send(message)

        await self._app(scope, receive, send_checked)


def matches(etag: str, wanted: str) -> bool:
    """Return True if `etag` is among those of an `If-None-Match` header."""
    if not etag or not wanted:
        # Weak comparison: compression changes the bytes, not the content.
        return False
    given = {one.strip().removeprefix("W/") for one in wanted.split(",")}
    return "*" in given or etag.removeprefix("W/") in given


def accepts_gzip(headers: Headers) -> bool:
    """Return True if the client accepts gzip: it is named, or `*` is, and not with `q=0`."""
    weights: dict[str, float] = {}
    for part in ",".join(headers.getlist("accept-encoding")).split(","):
        name, _, parameter = part.partition(";")
        key, _, value = parameter.strip().partition("=")
        weight = 1.0
        if key.strip().lower() == "q":
            try:
                weight = float(value)
            except ValueError:
                weight = 0.0
        weights[name.strip().lower()] = weight
    return weights.get("gzip", weights.get("*", 0.0)) > 0


async def _head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what GET begins its response with. A stream, which never ends, is left then."""
    has_begun = asyncio.Event()

    async def send_start(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            has_begun.set()

    answering = asyncio.ensure_future(app(scope, receive, send_start))
    begun = asyncio.ensure_future(has_begun.wait())
    try:
        await asyncio.wait({answering, begun}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        begun.cancel()
        if has_begun.is_set():
            # An event stream has no end, so its route is cancelled after the headers.
            answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
