"""Notifications of a run's alerts by Apprise: webhooks, chat services and e-mail."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.errors import SecretError, ServiceError
from holdfast.contracts.records.alerts import text_of
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.alerts import Topic
from holdfast.contracts.spec.secrets import SecretReference, describe, place_of_target, resolve
from holdfast.contracts.states import Cause, RunState
from holdfast.flows.supervisor.addresses import check_address
from holdfast.flows.supervisor.outbox import Line, RefusedLineError
from holdfast.flows.supervisor.redactor import Redactor

if TYPE_CHECKING:
    from apprise import Apprise

# A message about something that is long over helps nobody.
AGE_S_MAX: Final = 24 * 3600.0
TEXT_CHARACTERS_MAX: Final = 1000
TOPICS: Final[Mapping[EventKind, Topic]] = {
    EventKind.HANG_CONFIRMED: "hang",
    EventKind.NODE_LOST: "node",
    EventKind.NODE_UNHEALTHY: "node",
    EventKind.NUMERICS: "loss",
    EventKind.ROLLED_BACK: "loss",
    EventKind.SAVE_FAILED: "save",
    EventKind.MIRROR_FAILED: "save",
    EventKind.LIMIT_PASSED: "limit",
    EventKind.DECISION: "decision",
}
STATES: Final[Mapping[str, Topic]] = {RunState.FAILED: "failed", RunState.COMPLETED: "completed"}


def topic_of(event: Event) -> Topic | None:
    """Return the topic of a journal line, or None for a line without one."""
    facts = event.data
    if event.kind is EventKind.RUN_ENDED:
        return STATES.get(str(facts.get("state")))
    if event.kind is EventKind.ATTEMPT_ENDED:
        return "preempted" if facts.get("cause") == Cause.PREEMPTION else None
    if event.kind is EventKind.VERIFIED:
        return None if facts.get("ok") else "save"
    return TOPICS.get(EventKind(event.kind)) if event.kind in TOPICS else None


class Notifier:
    """Sends a run's notifications to one target of its spec. A failed one is tried again."""

    # A target gets one message after the other, so that none is repeated because of another.
    batch_max = 1
    is_prompt = True
    advice = "check the address of the target"

    def __init__(
        self, history: RunHistory, target: str, reference: SecretReference, redactor: Redactor
    ) -> None:
        self._name, self._paths = history.paths.name, history.paths
        self._on, self._redactor = frozenset(history.spec.alerts.on), redactor
        self._target, self._reference = target, reference
        self._known: Apprise | None = None

    def wants(self, event: Event) -> bool:
        """Return whether the spec asks for a notification of this line, and it is not too old."""
        return topic_of(event) in self._on and time.time() - event.time < AGE_S_MAX

    def send(self, lines: Sequence[Line]) -> None:
        """Send a message. Raises `ServiceError`, and `RefusedLineError` once it is too old."""
        for line in lines:
            if time.time() - line.event.time >= AGE_S_MAX:
                raise RefusedLineError("a notification was given up after a day")
            title = f"{self._name}: {topic_of(line.event)}"
            body = self._redactor.text(text_of(line.event))[:TEXT_CHARACTERS_MAX]
            if not self._sender().notify(body=body, title=title, notify_type=_type_of(line.event)):
                raise ServiceError(
                    f"{self._place}: the notification was not accepted; try the address with the "
                    "command `apprise -vv`"
                )

    def stored(self, lines: Sequence[Line]) -> set[UUID]:
        """Return no line: a former supervisor may have sent any of them."""
        return set()

    @property
    def _place(self) -> str:
        return place_of_target(self._target)

    def _sender(self) -> Apprise:
        """Return the sender. The recorded value of its address is deleted when the run ends."""
        if self._known is None:
            values, problems = resolve({self._place: self._reference}, self._paths)
            if problems:
                raise ServiceError(problems[0])
            try:
                self._known = check_address(values[self._place])
            except SecretError as error:
                raise ServiceError(describe(self._place, self._reference, error)) from error
        return self._known


def _type_of(event: Event) -> str:
    """Return Apprise's type, which chat services show as a colour."""
    topic = topic_of(event)
    if topic in {"failed", "hang"}:
        return "failure"
    is_good = topic == "completed" or event.data.get("passed") is False
    return "success" if is_good else "info" if topic == "decision" else "warning"
