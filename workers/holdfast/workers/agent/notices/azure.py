"""Microsoft Azure: scheduled events, and their acknowledgement when nothing is left to lose."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Final

from holdfast.contracts.errors import NoticeError
from holdfast.workers.agent.notices.metadata import Cloud, MetadataAnswer, expect
from holdfast.workers.agent.notices.notice import Notice, Poll, deadline_of

EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS: Final = {"Metadata": "true"}
# The first request in a machine's life enables the events, which takes Azure a while.
LOOK_TIMEOUT_S: Final = 20.0
LEAD_S: Final = 30.0
# Events that end every process of the machine. A freeze of seconds does not.
ENDINGS: Final = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
EVENTS_MAX: Final = 1000


class Azure(Cloud):
    """One node's view of Azure's metadata service."""

    name = "azure"
    # Azure recommends polling every second.
    every_s = 1.0

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self._machine = ""

    def probe(self) -> None:
        self._machine = self._name()

    def polls(self) -> tuple[Poll, ...]:
        return (self.look,)

    def acknowledge(self, event_id: str) -> None:
        body = json.dumps({"StartRequests": [{"EventId": event_id}]}).encode()
        headers = {**HEADERS, "Content-Type": "application/json"}
        expect(self._service.ask("POST", EVENTS, headers, body=body), 200)

    def look(self, now: float) -> list[Notice]:
        """Return the events that end this machine."""
        answer = self._service.ask("GET", EVENTS, HEADERS, timeout_s=LOOK_TIMEOUT_S)
        document = expect(answer, 200)
        if not self._machine:
            # Without the machine's name, every event counts as this machine's.
            with contextlib.suppress(NoticeError):
                self._machine = self._name()
        return read_events(document, machine=self._machine, now=now)

    def _name(self) -> str:
        answer = expect(self._service.ask("GET", NAME, HEADERS), 200)
        if not answer.text or not answer.text.isprintable():
            raise NoticeError(f"expected the machine's name, got {answer.excerpt}")
        return answer.text


def read_events(answer: MetadataAnswer, *, machine: str, now: float) -> list[Notice]:
    """Return the notices in a document of scheduled events. Raises `NoticeError`.

    The document covers a whole scale set, so only events that name `machine` count.
    """
    events = answer.json().get("Events")
    if not isinstance(events, list) or len(events) > EVENTS_MAX:
        raise NoticeError(f"expected a list of Events, got {answer.excerpt}")
    return [
        _notice(event, now) for event in events if isinstance(event, dict) and _ends(event, machine)
    ]


def _ends(event: Mapping[str, Any], machine: str) -> bool:
    kind, resources = event.get("EventType"), event.get("Resources")
    is_named = not machine or not isinstance(resources, list) or machine in resources
    return isinstance(kind, str) and kind in ENDINGS and is_named


def _notice(event: Mapping[str, Any], now: float) -> Notice:
    kind, identity = event["EventType"], event.get("EventId")
    until = event.get("NotBefore")
    return Notice(
        cloud="azure",
        wants="stop",
        # NotBefore is empty once the event has started.
        deadline=deadline_of(until, now=now, lead_s=LEAD_S),
        detail=f"Azure announced {kind}, not before {until or 'now'}",
        event_id=identity if isinstance(identity, str) else "",
    )
