"""What a run's supervisor delivers to other services while it supervises."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from holdfast.contracts.history import RunHistory, read_events
from holdfast.contracts.journal import Event
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.flows.notifications import Notifier
from holdfast.flows.outbox import Outbox, Service
from holdfast.flows.redactor import Log, Redactor

# For a service that is down when the run ends.
FINISH_S_MAX: Final = 60.0


class Deliveries:
    """Delivers one run's journals to `services`, by the names of their files in the run's folder.

    With a `redactor`, the targets of the run's alerts are services too.

    Threads of their own look every second at the journals that matter most, those of the run, of
    rank 0 and of node 0. Lines of other nodes come with the supervisor's turns.
    """

    def __init__(
        self, paths: RunPaths, services: Mapping[str, Service], log: Log, redactor: Redactor | None
    ) -> None:
        self._paths, self._redactor, self._log = paths, redactor, log
        self._services = dict(services)
        self._boxes: dict[str, Outbox] = {}
        self._attempt: AttemptPaths | None = None

    def offer(self, history: RunHistory) -> None:
        """Deliver what is new. Returns at once."""
        last = history.last_attempt
        self._attempt = self._paths.attempt(last.number) if last else None
        if self._redactor is not None and not self._boxes:
            self._services |= {
                f"notify-{name}": Notifier(history, name, reference, self._redactor)
                for name, reference in history.spec.alerts.targets.items()
            }
        for name, service in self._services.items():
            if name not in self._boxes:
                self._boxes[name] = self._open(name, service, history.record.uid)
            self._boxes[name].offer(history.events)

    def finish(self, history: RunHistory, limit_s: float = FINISH_S_MAX) -> bool:
        """Deliver what is left, for at most `limit_s` seconds; return whether all is delivered."""
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
            look=self._look,
            failed=lambda error: self._log.warning("%s gets events later: %s", name, error),
            refused=lambda error: self._log.warning("%s: %s", name, error),
        )

    def _look(self) -> tuple[Event, ...]:
        journals = sorted(self._paths.journal.glob("*.jsonl"))
        if self._attempt is not None:
            journals += [self._attempt.rank_journal, self._attempt.node_journal(0)]
        return read_events(journals)
