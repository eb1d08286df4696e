"""Prefect's side of a submission: the deployment, its work pool and the flow run.

Every call to the API has a timeout, and every error names the command that fixes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.urls import url_for

from holdfast.contracts.errors import ServiceError

FLOW: Final = "train"
DEPLOYMENT: Final = "holdfast"
API_S_MAX: Final = 10.0
# A server whose SQLite is busy responds with 503: the client retries after 2, 4 and 8 seconds.
RETRIES_MAX: Final = 3
WORKERS_MAX: Final = 200
BLOCKS_SHOWN: Final = 50


@dataclass(frozen=True, kw_only=True)
class FlowRunStarted:
    """A flow run that Prefect accepted. `warning` is the reason why it may not start soon."""

    id: str
    name: str
    url: str | None
    warning: str | None


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


def submit_to_prefect(parameters: dict[str, Any], *, name: str | None = None) -> FlowRunStarted:
    """Create a flow run of the deployment with these `parameters`. Returns at once.

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
        flow_run = client.create_flow_run_from_deployment(
            deployment.id, parameters=parameters, name=name
        )
        pool = deployment.work_pool_name
        warning = None
        if pool and not _live_workers(client, pool):
            warning = (
                f"no worker polls pool {pool}, so the run waits; start a worker: "
                f"`prefect worker start --pool {pool}`"
            )
        return FlowRunStarted(
            id=str(flow_run.id), name=flow_run.name, url=url_for(flow_run), warning=warning
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
        return FlowRunStarted(id=flow_run, name=found.name, url=url_for(found), warning=None)


def check_service() -> ServiceReport:
    """Check the service without submitting. Raises `ServiceError` if a submission would fail."""
    with open_client() as client:
        deployment = read_deployment(client)
        pool = deployment.work_pool_name
        workers = _live_workers(client, pool) if pool else 0
        return ServiceReport(url=str(client.api_url), pool=pool, workers=workers)


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
