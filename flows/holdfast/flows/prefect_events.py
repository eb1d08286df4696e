"""Journal lines as events of Prefect, for its event feed and its automations.

An event's id is computed from its line, so the server knows a line that comes twice. The server
answers before it stores an event, so it is asked later which events it has stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from prefect.exceptions import PrefectHTTPStatusError

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.records.documents import RunRecord
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.states import Cause
from holdfast.flows.deployments import open_client
from holdfast.flows.supervisor.deliveries import FINISH_S_MAX, Deliveries
from holdfast.flows.supervisor.outbox import OutboxLine, RefusedLineError
from holdfast.flows.supervisor.redactor import Redactor
from holdfast.workers.runs.run_folders import require_own

# The names of Prefect events, and the part of a run that each is about. Without Prefect.

ATTEMPT: Final = "attempt"
CHECKPOINT: Final = "checkpoint"
PREEMPTION: Final = "preemption"
PREFIX: Final = "holdfast"

# Journal lines that Prefect gets, and their names there. `*` is a word from the line itself.
NAMES: Final[Mapping[EventKind, str]] = {
    EventKind.SUPERVISED: "run.supervised",
    EventKind.OPERATOR_REQUEST: "run.requested",
    EventKind.DECISION: "run.decided",
    EventKind.RUN_ENDED: "run.*",
    EventKind.ATTEMPT_RESERVED: "attempt.reserved",
    EventKind.ATTEMPT_SUBMITTED: "attempt.submitted",
    EventKind.SUCCESSOR_SUBMITTED: "run.successor-submitted",
    EventKind.SUCCESSOR_ADOPTED: "run.successor-adopted",
    EventKind.SUCCESSOR_WITHDRAWN: "run.successor-withdrawn",
    EventKind.ATTEMPT_STATE: "attempt.*",
    EventKind.CLAIMED: "attempt.claimed",
    EventKind.LAUNCH_STARTED: "attempt.launched",
    EventKind.LAUNCH_ENDED: "attempt.launch-ended",
    EventKind.RESUMED: "attempt.resumed",
    EventKind.SIGNAL: "attempt.stopping",
    EventKind.STOP_FAILED: "attempt.stop-failed",
    EventKind.ATTEMPT_ENDED: "attempt.ended",
    EventKind.GOODPUT: "attempt.accounted",
    EventKind.HANG_SUSPECTED: "attempt.hang-suspected",
    EventKind.HANG_CLEARED: "attempt.hang-cleared",
    EventKind.HANG_CONFIRMED: "attempt.hang-confirmed",
    EventKind.STRAGGLER: "attempt.straggler-found",
    EventKind.NODE_LOST: "attempt.node-lost",
    EventKind.NODE_SILENT: "attempt.node-silent",
    EventKind.NODE_SLOW: "attempt.node-slow",
    EventKind.LINK_SLOW: "attempt.link-slow",
    EventKind.NODE_UNHEALTHY: "attempt.node-unhealthy",
    EventKind.LIMIT_PASSED: "run.*",
    EventKind.NUMERICS: "attempt.bad-loss",
    EventKind.ROLLED_BACK: "attempt.rolled-back",
    EventKind.NOTICE: "preemption.noticed",
    EventKind.COMMITTED: "checkpoint.committed",
    EventKind.SAVE_FAILED: "checkpoint.save-failed",
    EventKind.MIRRORED: "checkpoint.mirrored",
    EventKind.MIRROR_FAILED: "checkpoint.mirror-failed",
    EventKind.FETCHED: "checkpoint.fetched",
    EventKind.VERIFIED: "checkpoint.*",
    EventKind.PINNED: "checkpoint.pinned",
    EventKind.UNPINNED: "checkpoint.unpinned",
    EventKind.CHECKPOINT_DELETED: "checkpoint.pruned",
    EventKind.FORKED: "checkpoint.forked",
    EventKind.EXPORTED: "checkpoint.exported",
    EventKind.IMPORTED: "checkpoint.imported",
}


def event_name(event: Event) -> str:
    """Return the name of the Prefect event for a journal line, or '' if Prefect does not get it."""
    if event.kind not in NAMES:
        return ""
    kind, facts = EventKind(event.kind), event.data
    name = NAMES[kind]
    if kind is EventKind.SIGNAL and facts.get("cause") == Cause.PREEMPTION:
        name = NAMES[EventKind.NOTICE]
    elif kind is EventKind.VERIFIED:
        name = name.replace("*", "verified" if facts.get("ok") else "damaged")
    elif kind is EventKind.LIMIT_PASSED:
        name = name.replace("*", "limit-passed" if facts["passed"] else "within-limit")
    elif "*" in name:
        name = name.replace("*", str(facts.get("state", "ended")).replace("_", "-"))
    return f"{PREFIX}.{name}"


def subject(event: Event) -> str:
    """Return what the event is about: `run`, `attempt` or `checkpoint`."""
    part = NAMES[EventKind(event.kind)].partition(".")[0]
    return ATTEMPT if part == PREEMPTION else part


LOG: Final = logging.getLogger("holdfast")
# The name of the file that says how far events are delivered.
PREFECT: Final = "prefect"
# An event of more than 1.5 MB is refused. Tracebacks and evidence are cut.
TEXT_CHARACTERS_MAX: Final = 4000
ITEMS_MAX: Final = 64
ID: Final = "prefect.resource.id"
NAME: Final = "prefect.resource.name"
ROLE: Final = "prefect.resource.role"
# Facts that automations compare, as labels of the event's resource.
LABELS: Final = ("state", "cause", "action", "host", "step", "limit")
# Statuses that say that the server or the caller's login is at fault, not the event.
TRANSIENT: Final = frozenset({401, 403, 404, 408, 425, 429})

Labels = dict[str, str]


class PrefectEvents:
    """The events of one run. `flow_run` and `deployment` are the ids of those that supervise it."""

    batch_max = 50
    is_prompt = False
    advice = "`holdfast events RUN --publish` sends the others"

    def __init__(
        self, record: RunRecord, redactor: Redactor, *, flow_run: str = "", deployment: str = ""
    ) -> None:
        self._record, self._redactor = record, redactor
        supervisors = (("flow-run", flow_run), ("deployment", deployment))
        self._related = [
            {ID: f"prefect.{role}.{id_}", ROLE: role} for role, id_ in supervisors if id_
        ]

    def wants(self, event: Event) -> bool:
        return bool(event_name(event))

    def send(self, lines: Sequence[OutboxLine]) -> None:
        # The health check first, so that a server that is down is not taken for a refused event.
        with open_client() as client, _refusals():
            client.request("POST", "/events", json=[self._event(line) for line in lines])

    def stored(self, lines: Sequence[OutboxLine]) -> set[UUID]:
        times = [line.at for line in lines]
        # By default, the server leaves out events that are later than its own clock.
        occurred = {"since": _moment(min(times) - 1.0), "until": _moment(max(times) + 1.0)}
        # Prefect answers before it stores an event, and loses its queue if it is killed, see
        # decision 66.
        asked = {"id": {"id": [str(line.id) for line in lines]}, "occurred": occurred}
        body = {"filter": asked, "limit": len(lines)}
        with open_client() as client:
            found = client.request("POST", "/events/filter", json=body).json()
        return {UUID(one["id"]) for one in found["events"]}

    def _event(self, line: OutboxLine) -> dict[str, Any]:
        event = line.event
        facts = self._redactor.facts(event.data)
        run = self._run()
        number = facts.get("attempt") or facts.get("after_attempt")
        attempt = self._part(ATTEMPT, number, f"{run[NAME]} attempt {number}")
        name = facts.get("checkpoint") or facts.get("to")
        checkpoint = self._part(CHECKPOINT, name, f"{run[NAME]}:{name}")
        main = {ATTEMPT: attempt, CHECKPOINT: checkpoint}.get(subject(event)) or run
        labels = {
            f"{PREFIX}.{key}": str(facts[key])
            for key in LABELS
            if isinstance(facts.get(key), str | int | float)
        }
        roles = (("run", run), (ATTEMPT, attempt), (CHECKPOINT, checkpoint))
        related = [{**one, ROLE: role} for role, one in roles if one and one is not main]
        return {
            "id": str(line.id),
            # The outbox has moved the time where lines of different hosts would be out of order,
            # see decision 66.
            "occurred": _moment(line.at),
            "event": event_name(event),
            "resource": {**main, **labels},
            "related": [*related, *self._related],
            "payload": {**_shortened(facts), "time": event.time, "writer": event.writer},
        }

    def _run(self) -> Labels:
        found = self._record
        return {
            ID: f"{PREFIX}.run.{found.uid}",
            NAME: found.run,
            f"{PREFIX}.name": found.name,
            f"{PREFIX}.root": found.root,
        }

    def _part(self, kind: str, key: object, name: str) -> Labels | None:
        """Return an attempt or a checkpoint of the run as a resource; None without a `key`."""
        return {ID: f"{PREFIX}.{kind}.{self._record.uid}.{key}", NAME: name} if key else None


def publish(paths: RunPaths) -> None:
    """Send the run's events that Prefect does not have, such as those of a later `verify`.

    A supervisor does this all the time. Raises `ServiceError` if Prefect does not store them, and
    `SpecError` for another user's run.
    """
    require_own(paths)
    history, redactor = load_tallied(paths), Redactor()
    redactor.learn(history.record.spec, paths)
    events = PrefectEvents(history.record, redactor)
    with open_client():
        # Raises here if the server cannot be used, with the reason.
        pass
    if not Deliveries(paths, {PREFECT: events}, redactor.log(LOG), None).finish(history):
        raise ServiceError(
            f"{paths.name}: Prefect did not store all events within {FINISH_S_MAX:.0f} s, or "
            "another process is sending them; try again later"
        )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _shortened(value: Any) -> Any:
    """Return a JSON value with long texts and lists cut."""
    if isinstance(value, str):
        is_long = len(value) > TEXT_CHARACTERS_MAX
        return f"…{value[-TEXT_CHARACTERS_MAX:]}" if is_long else value
    if isinstance(value, Mapping):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(one) for one in value[:ITEMS_MAX]]
    return value


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the refusal of an event into `RefusedLineError`. Other errors can go away."""
    try:
        yield
    except PrefectHTTPStatusError as error:
        status = error.response.status_code
        # These pass with time or a login. Any other status says that this event will never be
        # accepted.
        if 400 <= status < 500 and status not in TRANSIENT:
            text = error.response.text[:500]
            raise RefusedLineError(f"Prefect refused an event: {text}") from error
        raise ServiceError(f"Prefect does not accept events: {error}") from error
