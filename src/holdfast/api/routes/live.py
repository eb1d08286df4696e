"""The stream of news, the server's health, and figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from holdfast import __version__
from holdfast.api.access import AS_READER, identify
from holdfast.api.problems import Refusal
from holdfast.api.prometheus import CONTENT_TYPE, render
from holdfast.api.schemas import Health
from holdfast.api.services import Services, services_of
from holdfast.contracts.errors import LineageError

# A comment would keep the connection open as well, but a page's EventSource never sees comments.
PING_S: Final = 5.0
PING: Final = b"event: ping\ndata: {}\n\n"
CHECK_S: Final = 15.0
LAG_S_MAX: Final = 30.0

router = APIRouter(tags=["live"])


@router.get(
    "/api/v1/events",
    dependencies=[AS_READER],
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def stream_events(
    request: Request,
    run: Annotated[str | None, Query(max_length=120, description="of one run alone")] = None,
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
) -> StreamingResponse:
    """News as they come: `run` (its rows changed), `journal` (a line), `beat` (how far it is).

    `reset` says that something was missed: ask again. Each has JSON with the run's name and uid.
    `ping` comes after five seconds without news: a stream that is silent for longer is dead.
    """
    services = services_of(request)
    uid = await run_in_threadpool(lambda: services.store.find_run(run).uid) if run else None
    lines = _lines(services, request, last_event_id, uid)
    # The first line opens the stream; a refusal comes before the answer begins.
    first = await anext(lines)
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(_after(first, lines), media_type="text/event-stream", headers=headers)


@router.get("/healthz", responses={503: {"model": Health}})
def show_health(request: Request) -> JSONResponse:
    """Whether the server can do its work: 200, or 503 with what it cannot."""
    services = services_of(request)
    health = _health(services)
    try:
        is_stranger = identify(request) is None
    except Refusal:
        # A wrong token hinders no check of the server's health.
        is_stranger = True
    if is_stranger:
        # A stranger learns whether, not where.
        health = health.model_copy(update={"roots": {}, "problems": {}, "database": ""})
    return JSONResponse(health.model_dump(mode="json"), 200 if health.ok else 503)


@router.get("/metrics", dependencies=[AS_READER], response_class=Response)
def show_metrics(request: Request) -> Response:
    """Figures of the runs and of the server, as Prometheus reads them."""
    return Response(render(services_of(request)), media_type=CONTENT_TYPE)


def _health(services: Services) -> Health:
    problems = dict(services.watch.problems)
    database = "ok"
    try:
        services.store.ping()
    except LineageError as error:
        database = problems["database"] = str(error)
    lag_s = services.watch.lag_s()
    if lag_s is None:
        problems["ingest"] = "the runs have not all been looked at yet since the server started"
    elif lag_s > LAG_S_MAX:
        problems["ingest"] = f"the index is {lag_s:.0f} s behind disk"
    return Health(
        ok=database == "ok" and "ingest" not in problems,
        version=__version__,
        database=database,
        ingest_lag_s=lag_s,
        round_s=services.watch.round_s,
        streams=services.hub.readers,
        roots={str(root): root.is_dir() for root in services.roots},
        problems=problems,
    )


async def _lines(
    services: Services, request: Request, after: str | None, run: str | None
) -> AsyncIterator[bytes]:
    checked_at = time.monotonic()
    async for text in services.hub.read(after, run, idle_s=PING_S):
        yield PING if text is None else text
        if time.monotonic() - checked_at > CHECK_S:
            checked_at = time.monotonic()
            # A token may have been revoked since the stream began.
            try:
                caller = await run_in_threadpool(identify, request)
            except Refusal:
                return
            if caller is None:
                return


async def _after(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for line in lines:
        yield line
