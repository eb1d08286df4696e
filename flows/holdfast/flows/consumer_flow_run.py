"""`python -m holdfast.flows.consumer_flow_run DIRECTORY/order.json`: run a deployment.

The process of a consumer starts it in the place of a command. It creates a flow run, waits until
the flow run has ended, and reports its end by the exit status and the last line of output. If it
gets SIGTERM, it cancels the flow run first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling

from holdfast.contracts.disk.paths import ConsumerPaths
from holdfast.contracts.errors import HoldfastError, NotFoundError, ServiceError
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records.consumers import ConsumerOrder
from holdfast.contracts.records.documents import read_document
from holdfast.contracts.records.history import load_identity
from holdfast.contracts.spec.consumers import OFFERED
from holdfast.flows.deployments import api_url, newest_flow_run, open_client

WHICH: Final = ("checkpoint", "checkpoint_path")
TAG: Final = "holdfast-consumer-"
POLL_S: Final = 2.0
LOOK_S: Final = 0.2
# The process that started this one ends it at the time limit, unless it was killed itself.
LATE_S: Final = 60.0
# Statuses of HTTP from here on are problems of the server.
SERVER_ERRORS: Final = 500


class _Stop:
    """Whether this process is asked to end. The handler only sets a flag."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, *_: object) -> None:
        self.is_set = True


def parameters_for(
    schema: Mapping[str, Any], given: Mapping[str, Any], offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parameters of a flow run: those of the spec, and what the flow takes of `offered`.

    `schema` is the JSON Schema of the flow's parameters. Raises `ServiceError` if nothing would
    say which checkpoint it is.
    """
    known = schema.get("properties") or {}
    found = {name: value for name, value in offered.items() if name in known}
    if not any(name in found for name in WHICH):
        raise _RefusedError(
            f"the flow has the parameters {', '.join(known) or 'none'}; expected "
            f"{' or '.join(WHICH)}, which says what to use"
        )
    return {**given, **found}


def run(paths: ConsumerPaths, stop: _Stop) -> tuple[bool, str]:
    """Run the deployment; return whether it completed, and what became of it as text."""
    order = read_document(ConsumerOrder, paths.order)
    if order is None or order.deployment is None:
        raise NotFoundError(f"{paths.order}: no order with a deployment here")
    give_up = time.monotonic() + order.timeout_s + LATE_S
    flow_run: UUID | None = None
    said = ""
    while not stop.is_set and time.monotonic() < give_up:
        try:
            if flow_run is None:
                flow_run = _begin(paths, order)
                print(f"flow run {flow_run} of {order.deployment}", flush=True)
            state = _state_of(flow_run)
        except ServiceError as error:
            if flow_run is None and not _may_pass(error):
                raise
            # A busy server costs no try, and the flow run works without it.
            if str(error) != said:
                said = str(error)
                print(said, flush=True)
        else:
            if state is not None and state.is_final():
                return state.is_completed(), _text_of(flow_run, state)
        _rest(stop)
    if flow_run is None:
        return False, said or "the consumer was ended before it created a flow run"
    with open_client() as client:
        client.set_flow_run_state(flow_run, Cancelling(message="the consumer was ended"))
    return False, f"flow run {flow_run} is cancelled, because the consumer was ended"


class _RefusedError(ServiceError):
    """The deployment cannot be run for the checkpoint."""


def _may_pass(error: ServiceError) -> bool:
    """Return whether a later attempt to create a flow run may succeed."""
    if isinstance(error, _RefusedError) or not api_url():
        return False
    answer = error.__cause__
    is_refusal = isinstance(answer, PrefectHTTPStatusError) and (
        answer.response.status_code < SERVER_ERRORS
    )
    return not is_refusal


def _begin(paths: ConsumerPaths, order: ConsumerOrder) -> UUID:
    """Create the flow run, or return the one of an earlier start that has not ended."""
    assert order.deployment is not None
    uid = load_identity(paths.run)[0].uid
    tag = f"{TAG}{uid}-{order.consumer}-{order.checkpoint}"
    offered: dict[str, Any] = {name: os.environ[key] for name, key in OFFERED.items()}
    offered["checkpoint_step"] = order.step
    with open_client() as client:
        try:
            deployment = client.read_deployment_by_name(order.deployment)
        except ObjectNotFound as error:
            raise _RefusedError(
                f"Prefect has no deployment {order.deployment} at {api_url()}; `prefect deployment "
                "ls` lists those that it has"
            ) from error
        parameters = parameters_for(
            deployment.parameter_openapi_schema or {}, order.parameters, offered
        )
        newest = newest_flow_run(client, tag)
        state = newest.state if newest else None
        if newest and state and not state.is_final() and not state.is_cancelling():
            # The process that waited for it was killed. A second one would work beside it.
            return newest.id
        made = client.create_flow_run_from_deployment(
            deployment.id,
            parameters=parameters,
            name=f"{paths.run.name}-{order.consumer}-{order.step}",
            tags=[tag],
            # A request that is sent again makes no second flow run.
            idempotency_key=f"{tag}-{paths.number}",
        )
        return made.id


def _state_of(flow_run: UUID) -> State[Any] | None:
    with open_client() as client:
        return client.read_flow_run(flow_run).state


def _text_of(flow_run: UUID, state: State[Any]) -> str:
    why = f": {plain_line(state.message)}" if state.message else ""
    return f"flow run {flow_run} is {state.name}{why}"


def _rest(stop: _Stop) -> None:
    ends_at = time.monotonic() + POLL_S
    while not stop.is_set and time.monotonic() < ends_at:
        time.sleep(LOOK_S)


def main(path: Path) -> int:
    """Return the exit status: 0 if the flow run has completed."""
    stop = _Stop()
    try:
        is_done, text = run(ConsumerPaths(path.parent), stop)
    except HoldfastError as error:
        is_done, text = False, plain_line(error)
    print(text, flush=True)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
