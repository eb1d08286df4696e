"""What a run's supervisor delivers to other services while it supervises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import Event
from holdfast.contracts.disk.journal_follow import Place, follow
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import AGAIN_S
from holdfast.flows.supervisor.notifications import Notifier
from holdfast.flows.supervisor.outbox import Outbox, Service
from holdfast.flows.supervisor.redactor import Log, Redactor

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
        """Deliver what is new. Returns at once."""
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
        self._places: dict[Path, Place | None] = {}
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
        self._whole_at = now + AGAIN_S if is_whole else self._whole_at


def _nothing() -> None:
    """The outbox knows which lines it has."""
