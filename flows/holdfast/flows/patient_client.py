"""Asks Prefect about flow runs, and waits while its server is down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

import anyio
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Pending

from holdfast.flows.supervisor.redactor import Log

LOOK_S: Final = 2.0

T = TypeVar("T")


class PatientClient:
    """Asks with `client`, every `LOOK_S` seconds until there is an answer."""

    def __init__(self, client: PrefectClient, log: Log) -> None:
        self._client, self._log = client, log

    async def flow_run(self, number: UUID) -> FlowRun | None:
        """Return a flow run, or None if it was deleted."""
        try:
            return await self._ask(partial(self._client.read_flow_run, number))
        except ObjectNotFound:
            return None

    async def state(self, number: UUID) -> State[Any]:
        """Return a flow run's state: cancelled, if it was deleted."""
        found = await self.flow_run(number)
        if found is None:
            return Cancelled(message="the flow run was deleted")
        return found.state or Pending()

    async def states(self, number: UUID) -> list[State[Any]]:
        """Return the states that a flow run went through. Raises `ObjectNotFound`."""
        return await self._ask(partial(self._client.read_flow_run_states, number))

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await question()
            except ObjectNotFound:
                raise
            # Whatever its client raises, the server is asked again.
            except Exception as error:
                self._log.warning("Prefect does not answer: %s", error)
            await anyio.sleep(LOOK_S)
