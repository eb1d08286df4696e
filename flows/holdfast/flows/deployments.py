"""Prefect's side of a submission: the deployment, its work pool and the flow run.

Every call to the API has a timeout, and every error names the command that fixes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.urls import url_for

from holdfast.contracts.errors import ServiceError

FLOW: Final = "train"
DEPLOYMENT: Final = "holdfast"
# Continues runs that are paused until capacity returns.
RESUMER: Final = f"resume/{DEPLOYMENT}"
API_S_MAX: Final = 10.0
# A server whose SQLite is busy responds with 503: the client retries after 2, 4 and 8 seconds.
RETRIES_MAX: Final = 3
WORKERS_MAX: Final = 200
# A flow run has this tag with the uid of the run that it supervises.
RUN_TAG: Final = "holdfast-run-"
FLOW_RUNS_MAX: Final = 50
CREATES_MAX: Final = 3
# From a worker's taking a flow run to the lock of its supervisor.
START_S_MAX: Final = 120.0
BLOCKS_SHOWN: Final = 50


@dataclass(frozen=True, kw_only=True)
class FlowRunStarted:
    """A flow run that Prefect accepted, or that was there before, as `is_new` says.

    `warning` is the reason why it may not start soon.
    """

    id: str
    name: str
    url: str | None
    warning: str | None
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class ServiceReport:
    """The deployment's work pool, and the number of its workers that are online."""

    url: str
    pool: str | None
    workers: int


def api_url() -> str | None:
    """Return the URL of the Prefect API from the environment or the active profile, or None."""
    url: str | None = PREFECT_API_URL.value()
    return url


def submit_to_prefect(
    parameters: dict[str, Any], *, name: str | None = None, uid: str
) -> FlowRunStarted:
    """Create a flow run that supervises the run `uid`, unless one waits or starts. Does not wait.

    Two commands at the same time create one flow run: both have the same idempotency key.
    Raises `ServiceError` if the API cannot be reached within `API_S_MAX` seconds, has no such
    deployment, or rejects the parameters.
    """
    with open_client() as client:
        deployment = read_deployment(client)
        if deployment.paused:
            raise ServiceError(
                f"deployment {FLOW}/{DEPLOYMENT} is paused; "
                f"resume it with `prefect deployment resume {FLOW}/{DEPLOYMENT}`"
            )
        tag = f"{RUN_TAG}{uid}"
        for _ in range(CREATES_MAX):
            newest = newest_flow_run(client, tag)
            if newest is not None and _will_supervise(client, newest):
                return _started(client, newest, deployment.work_pool_name, is_new=False)
            flow_run = client.create_flow_run_from_deployment(
                deployment.id,
                parameters=parameters,
                name=name,
                tags=[tag],
                # The same key on two commands gives one flow run. The newest flow run is in it, so
                # a later call can create another one.
                idempotency_key=f"{tag}-after-{newest.id if newest else 'none'}",
            )
            # The flow run of another command, which has the same key, may have ended meanwhile.
            if flow_run.state is None or not flow_run.state.is_final():
                return _started(client, flow_run, deployment.work_pool_name, is_new=True)
        raise ServiceError(
            f"each of {CREATES_MAX} flow runs of this run ended before it supervised anything; "
            f"see their logs in Prefect: they have the tag {tag}"
        )


def newest_flow_run(client: SyncPrefectClient, tag: str) -> FlowRun | None:
    """Return the flow run with this tag that was created last, or None."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=FLOW_RUNS_MAX,
    )
    return max(found, key=lambda one: (one.created is not None, one.created), default=None)


def _will_supervise(client: SyncPrefectClient, found: FlowRun) -> bool:
    """Return whether a flow run, whose process holds no lock yet, will supervise its run.

    One that waits for a worker will, even if it is late. One that a worker has taken is lost if
    it does not supervise within `START_S_MAX` seconds.
    """
    state = found.state
    if state is None or state.is_final() or state.is_cancelling():
        return False
    if state.is_scheduled():
        return True
    if state.is_paused() and state.state_details.pause_reschedule:
        # Prefect starts it again, and its supervisor finds the run.
        client.resume_flow_run(found.id)
        return True
    # By the server's clock, which has also set the state's time.
    return _server_time(client) - state.timestamp.timestamp() < START_S_MAX


def _server_time(client: SyncPrefectClient) -> float:
    """Return the server's clock, by which its states have their times."""
    return parsedate_to_datetime(client.request("GET", "/health").headers["date"]).timestamp()


def _started(
    client: SyncPrefectClient, flow_run: FlowRun, pool: str | None, *, is_new: bool
) -> FlowRunStarted:
    warning = None
    if pool and not _live_workers(client, pool):
        warning = (
            f"no worker polls pool {pool}, so the run waits; start a worker: "
            f"`prefect worker start --pool {pool}`"
        )
    return FlowRunStarted(
        id=str(flow_run.id),
        name=flow_run.name,
        url=url_for(flow_run),
        warning=warning,
        is_new=is_new,
    )


def resume_flow_run(flow_run: str) -> FlowRunStarted | None:
    """Resume a suspended flow run; return None for one in another state. Raises `ServiceError`."""
    with open_client() as client:
        try:
            found = client.read_flow_run(UUID(flow_run))
        except ObjectNotFound:
            return None
        state = found.state
        if state is None or not state.is_paused() or not state.state_details.pause_reschedule:
            return None
        client.resume_flow_run(found.id)
        return _started(client, found, None, is_new=False)


def check_service() -> ServiceReport:
    """Check the service without submitting. Raises `ServiceError` if a submission would fail."""
    with open_client() as client:
        deployment = read_deployment(client)
        pool = deployment.work_pool_name
        workers = _live_workers(client, pool) if pool else 0
        return ServiceReport(url=str(client.api_url), pool=pool, workers=workers)


def check_resumer() -> None:
    """Raise `ServiceError` if Prefect has no deployment that continues paused runs."""
    with open_client() as client:
        read_deployment(client, RESUMER)


def flow_run_state(flow_run: str) -> tuple[str, bool]:
    """Return the name of a flow run's state, and whether it is final. Raises `ServiceError`."""
    with open_client() as client:
        state = client.read_flow_run(UUID(flow_run)).state
        return (str(state.name), state.is_final()) if state else ("Unknown", False)


def read_secret_block(name: str) -> Any:
    """Return the value of the `Secret` block `name`. Raises `ServiceError` if it is unreadable."""
    with open_client() as client:
        try:
            block = client.read_block_document_by_name(name, "secret", include_secrets=True)
        except ObjectNotFound as error:
            raise ServiceError(
                f"Prefect has no Secret block {name} at {api_url()}; create it there"
            ) from error
        return block.data.get("value")


@contextmanager
def open_client() -> Iterator[SyncPrefectClient]:
    """Yield a client after a health check of the API. Its errors become `ServiceError`."""
    if not (url := api_url()):
        raise ServiceError(
            "PREFECT_API_URL is not set. Start a server (`prefect server start`) and set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api, or run without Prefect."
        )
    with (
        # Without retries: a server that is down is reported in seconds. They are on again below.
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        translate_errors(),
        get_client(sync_client=True, httpx_settings=_bounded()) as client,
    ):
        failure = client.api_healthcheck()
        if failure is not None:
            raise ServiceError(
                f"Prefect's API at {url} does not answer ({failure or type(failure).__name__}). "
                "Start it with `prefect server start`, or set PREFECT_API_URL to its address."
            )
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES_MAX}):
            yield client


def _bounded() -> dict[str, Any]:
    """Return settings of the client that end its retries if a server does not answer at all."""

    def about_to_send(request: httpx.Request) -> None:
        # The client sends the same object again.
        facts = request.extensions
        waited_s = time.monotonic() - facts.setdefault("holdfast_began", time.monotonic())
        if waited_s >= API_S_MAX and not facts.get("holdfast_answered"):
            raise ServiceError(
                f"Prefect's API at {api_url()} did not answer for {waited_s:.0f} s, though its "
                "health check did. Check its log and its database."
            )

    def answered(response: httpx.Response) -> None:
        response.request.extensions["holdfast_answered"] = True

    hooks = {"request": [about_to_send], "response": [answered]}
    return {"timeout": API_S_MAX, "event_hooks": hooks}


def read_deployment(client: SyncPrefectClient, name: str = f"{FLOW}/{DEPLOYMENT}") -> Any:
    """Return the deployment of this name. Raises `ServiceError` if there is none."""
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        raise ServiceError(
            f"Prefect has no deployment {name} at {api_url()}; `holdfast deploy` creates it"
        ) from error


def read_block(client: SyncPrefectClient, kind: str, name: str) -> Any:
    """Return the block `name` of the type `kind`. Raises `ServiceError`, which names the others."""
    try:
        return client.read_block_document_by_name(name, kind, include_secrets=False)
    except ObjectNotFound as error:
        there = client.read_block_documents(offset=0, limit=BLOCKS_SHOWN)
        known = sorted(f"{one.block_type.slug}/{one.name}" for one in there if one.block_type)
        raise ServiceError(
            f"Prefect has no block {kind}/{name} at {api_url()}; it has: "
            f"{', '.join(known) or 'no blocks'}"
        ) from error


def _live_workers(client: SyncPrefectClient, pool: str) -> int:
    # Pass both arguments: the client would send null for them, which the server may reject.
    workers = client.read_workers_for_work_pool(pool, offset=0, limit=WORKERS_MAX)
    return sum(worker.status is WorkerStatus.ONLINE for worker in workers)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the client's errors into a `ServiceError` with the URL and Prefect's message."""
    try:
        yield
    except PrefectHTTPStatusError as error:
        text = error.response.text[:500]
        raise ServiceError(f"Prefect at {api_url()} refused the request: {text}") from error
    except httpx.HTTPError as error:
        raise ServiceError(
            f"Prefect's API at {api_url()} cannot be used ({type(error).__name__}: {error}). "
            "Check that `prefect server start` is running there."
        ) from error
