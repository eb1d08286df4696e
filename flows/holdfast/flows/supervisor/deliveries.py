"""What a run's supervisor delivers to other services while it supervises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.journal_follow import JournalPlace, follow
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import SecretError, ServiceError
from holdfast.contracts.records import alerts, history_cache
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.secrets import SecretReference, describe, place_of_target, resolve
from holdfast.contracts.spec.sections import Topic
from holdfast.contracts.states import Cause, RunState
from holdfast.flows.supervisor.outbox import Outbox, OutboxLine, RefusedLineError, Service
from holdfast.flows.supervisor.redactor import Log, Redactor

if TYPE_CHECKING:
    from apprise import Apprise


# Addresses of notifications, as Apprise reads them.


def check_address(address: str) -> Apprise:
    """Return a sender for an address such as `mailtos://…`.

    Raises `SecretError`, without the address, if Apprise does not know its form.
    """
    # It takes a third of a second to import, and most runs have no targets.
    import apprise

    asset = apprise.AppriseAsset(app_id="Holdfast", app_desc="Holdfast", secure_logging=True)
    sender = apprise.Apprise(asset=asset)
    if not sender.add(address):
        raise SecretError(
            "is not an address of Apprise; expected one such as slack://…, mailtos://… or "
            "jsons://host/path"
        )
    return sender


# Notifications of a run's alerts by Apprise: webhooks, chat services and e-mail.

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
    if event.kind in {EventKind.NODE_SLOW, EventKind.LINK_SLOW}:
        return "node" if facts.get("asks") and facts.get("slow") else None
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

    def send(self, lines: Sequence[OutboxLine]) -> None:
        """Send a message. Raises `ServiceError`, and `RefusedLineError` once it is too old."""
        for line in lines:
            if time.time() - line.event.time >= AGE_S_MAX:
                raise RefusedLineError("a notification was given up after a day")
            title = f"{self._name}: {topic_of(line.event)}"
            body = self._redactor.text(alerts.text_of(line.event))[:TEXT_CHARACTERS_MAX]
            if not self._sender().notify(body=body, title=title, notify_type=_type_of(line.event)):
                raise ServiceError(
                    f"{self._place}: the notification was not accepted; try the address with the "
                    "command `apprise -vv`"
                )

    def stored(self, lines: Sequence[OutboxLine]) -> set[UUID]:
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


# For a service that is down when the run ends.
FINISH_S_MAX: Final = 60.0


class Deliveries:
    """Delivers one run's journals to `services`, by the names of their files in the run's folder.

    With a `redactor`, the targets of the run's alerts are services too.

    Their threads look every second at the journals that matter most, those of the run, of rank 0
    and of node 0. The supervisor's turns add the other journals of the newest two attempts. Those
    of older attempts are looked at every `AGAIN_S` seconds and at the end.
    """

    def __init__(
        self, paths: RunPaths, services: Mapping[str, Service], log: Log, redactor: Redactor | None
    ) -> None:
        self._paths, self._redactor, self._log = paths, redactor, log
        self._services = dict(services)
        self._boxes: dict[str, Outbox] = {}
        self._newest: list[AttemptPaths] = []
        self._turn = 0
        self._is_last = False

    def offer(self, history: RunHistory) -> None:
        self._newest = [self._paths.attempt(view.number) for view in history.attempts[-2:]]
        self._turn += 1
        if self._redactor is not None and not self._boxes:
            self._services |= {
                f"notify-{name}": Notifier(history, name, reference, self._redactor)
                for name, reference in history.spec.alerts.targets.items()
            }
        for name, service in self._services.items():
            if name not in self._boxes:
                self._boxes[name] = self._open(name, service, history.record.uid)
            self._boxes[name].offer()

    def finish(self, history: RunHistory, limit_s: float = FINISH_S_MAX) -> bool:
        """Deliver what is left, for at most `limit_s` seconds; return whether all is delivered."""
        self._is_last = True
        self.offer(history)
        ends_at = time.monotonic() + limit_s
        left = [
            name
            for name, box in self._boxes.items()
            if not box.close(max(0.0, ends_at - time.monotonic()))
        ]
        for name in left:
            self._log.warning("%s did not get all lines; %s", name, self._services[name].advice)
        return not left

    def _open(self, name: str, service: Service, uid: str) -> Outbox:
        return Outbox(
            self._paths.deliveries / f"{name}.json",
            uid,
            service,
            look=_Look(self),
            failed=lambda error: self._log.warning("%s gets events later: %s", name, error),
            refused=lambda error: self._log.warning("%s: %s", name, error),
        )

    def journals(self, turn: int, *, is_whole: bool) -> tuple[list[Path], int]:
        """Return the journals to look at after `turn`, and the supervisor's turn now."""
        newest, now = self._newest, self._turn
        if is_whole or self._is_last:
            return self._paths.list_journals(), now
        found = sorted(self._paths.journal.glob("*.jsonl"))
        if turn != now:
            found += [path for one in newest for path in sorted(one.journal.glob("*.jsonl"))]
        elif newest:
            found += [newest[-1].rank_journal, newest[-1].node_journal(0)]
        return found, now


class _Look:
    """Reads the new lines of a run's journals for one outbox."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._places: dict[Path, JournalPlace | None] = {}
        self._turn = 0
        self._whole_at = 0.0

    def __call__(self, take: Callable[[Event], None]) -> None:
        """Call `take` with each line that was added since the last call."""
        now = time.monotonic()
        is_whole = now >= self._whole_at
        journals, turn = self._deliveries.journals(self._turn, is_whole=is_whole)
        for path in journals:
            # The outbox ignores the lines of a replaced journal that it has.
            self._places[path] = follow(path, self._places.get(path), begin=_nothing, take=take)
        self._turn = turn
        self._whole_at = now + history_cache.AGAIN_S if is_whole else self._whole_at


def _nothing() -> None:
    """The outbox knows which lines it has."""
