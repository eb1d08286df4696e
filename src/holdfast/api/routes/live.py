"""Routes for the event stream, the server's health and the Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from holdfast.api import access, prometheus, query_names
from holdfast.api.problems import Refusal
from holdfast.api.schemas import Health
from holdfast.api.services import Services, services_of
from holdfast.contracts.errors import LineageError
from holdfast.contracts.version import holdfast_version

# A comment line would keep the connection open too, but EventSource does not report comments.
PING_S: Final = 5.0
PING: Final = b"event: ping\ndata: {}\n\n"
CHECK_S: Final = 15.0
LAG_S_MAX: Final = 30.0

router = APIRouter(tags=["live"])


@router.get(
    "/api/v1/events",
    dependencies=[access.AS_READER, query_names.KNOWN_QUERY],
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def stream_events(
    request: Request,
    run: Annotated[str | None, Query(max_length=120, description="Only events of this run")] = None,
    after: Annotated[
        str | None,
        Query(max_length=100, description="Only events after this id, as with `Last-Event-ID`"),
    ] = None,
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
) -> StreamingResponse:
    """Stream server-sent events: `run`, `journal`, `beat`, `hello`, `reset` and `ping`.

    `run` means that a run's rows changed, `journal` is a new journal line, and `beat` is the
    progress of a live run. The data of these three is JSON with the run's name and uid.

    `hello` opens a new stream. `reset` means that events were lost, so reload all data. `ping`
    follows five seconds without another event. A stream that is silent for longer is broken.
    """
    services = services_of(request)
    ref = None if run is None else await run_in_threadpool(services.store.find_run, run)
    uid = ref.uid if ref else None
    lines = _lines(services, request, last_event_id or after, uid)
    # Read the first line here, so that a `Refusal` still becomes an error response.
    first = await anext(lines)
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(_after(first, lines), media_type="text/event-stream", headers=headers)


@router.get("/healthz", responses={503: {"model": Health}})
def show_health(request: Request) -> JSONResponse:
    """Return the server's health: 200 if it is healthy, otherwise 503 with the problems."""
    services = services_of(request)
    health = _health(services)
    try:
        # A monitor without a token must see whether the server is healthy, and nothing else.
        is_anonymous = access.identify(request) is None
    except Refusal:
        # A health check succeeds even with a wrong token.
        is_anonymous = True
    if is_anonymous:
        # Without a valid token the response has no paths and no error messages.
        health = health.model_copy(update={"roots": {}, "problems": {}, "database": ""})
    return JSONResponse(health.model_dump(mode="json"), 200 if health.ok else 503)


@router.get("/metrics", dependencies=[access.AS_READER], response_class=Response)
def show_metrics(request: Request) -> Response:
    """Return metrics of the runs and of the server in Prometheus' text format."""
    return Response(prometheus.render(services_of(request)), media_type=prometheus.CONTENT_TYPE)


def _health(services: Services) -> Health:
    problems = dict(services.watch.problems)
    database = "ok"
    try:
        services.store.ping()
    except LineageError as error:
        database = problems["database"] = str(error)
    lag_s = services.watch.lag_s()
    if lag_s is None:
        problems["ingest"] = "the server started recently and has not read all runs yet"
    elif lag_s > LAG_S_MAX:
        problems["ingest"] = (
            f"the index was last up to date {lag_s:.0f} s ago; expected at most {LAG_S_MAX:.0f} s"
        )
    return Health(
        ok=database == "ok" and "ingest" not in problems,
        version=holdfast_version(),
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
            # The token may have been revoked since the stream was opened.
            try:
                caller = await run_in_threadpool(access.identify, request)
            except Refusal:
                return
            if caller is None:
                return


async def _after(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for line in lines:
        yield line
