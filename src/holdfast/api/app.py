"""The ASGI application: the routes, middleware and error handlers of one server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter, FastAPI
from fastapi.middleware.gzip import GZipMiddleware

from holdfast.api import problems
from holdfast.api.negotiation import BelowProxy, Conditional, Negotiation
from holdfast.api.query_names import KNOWN_QUERY
from holdfast.api.routes import actions, checkpoints, live, overview, page, runs, session
from holdfast.api.schemas import Problem
from holdfast.api.security import Guard
from holdfast.api.services import Services
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
    for module in (runs, checkpoints, overview, actions, session):
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
