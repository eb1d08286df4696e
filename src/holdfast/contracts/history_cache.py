"""The history of one run, read again and again, as its supervisor does.

A turn costs shared storage a few listings, however many attempts, nodes and lines a run has. Only
what has changed is read: journals by `journal_cache`, and an attempt that ended a while ago not at
all, except now and then for lines that came late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.errors import reading_run
from holdfast.contracts.history import (
    AttemptView,
    RunHistory,
    load_history,
    order_events,
    read_events,
    view_attempt,
)
from holdfast.contracts.journal import Event
from holdfast.contracts.journal_cache import KEPT
from holdfast.contracts.paths import AttemptPaths, RunPaths, has_spec

# Nodes may still write lines for this long after an attempt has ended.
SETTLED_S: Final = 120.0
AGAIN_S: Final = 600.0


@dataclass(frozen=True)
class _Ended:
    """An attempt that had ended when it was read, at a time of the monotonic clock."""

    view: AttemptView
    events: tuple[Event, ...]
    read_at: float


class HistoryReader:
    """Loads a run's history. One object serves one thread."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._first: RunHistory | None = None
        self._ended: dict[int, _Ended] = {}
        self._ended_since: dict[int, float] = {}

    def load(self) -> RunHistory:
        """Return the same as `load_history`. Raises like it.

        Lines that are added to an attempt long after its end may be missing for `AGAIN_S` seconds.
        """
        if self._first is None or not has_spec(self._paths.directory):
            # The identity and the spec of a run never change.
            self._first = load_history(self._paths)
            return self._first
        with reading_run(self._paths.directory):
            return self._load_again(self._first)

    def _load_again(self, first: RunHistory) -> RunHistory:
        now = time.monotonic()
        own = [KEPT.read(path) for path in sorted(self._paths.journal.glob("*.jsonl"))]
        attempts = self._paths.list_attempts()
        events = {attempt.number: self._events_of(attempt, now) for attempt in attempts}
        ordered = order_events([*own, *events.values()])
        views = tuple(self._view(attempt, ordered, now) for attempt in attempts)
        for view in views:
            self._keep(view, events[view.number], now)
        return RunHistory(
            paths=self._paths,
            record=first.record,
            spec=first.spec,
            attempts=views,
            events=ordered,
        )

    def _known(self, number: int, now: float) -> _Ended | None:
        """Return a kept attempt that need not be read again yet."""
        kept = self._ended.get(number)
        return kept if kept is not None and now - kept.read_at < AGAIN_S else None

    def _events_of(self, attempt: AttemptPaths, now: float) -> tuple[Event, ...]:
        if (kept := self._known(attempt.number, now)) is not None:
            return kept.events
        return read_events(sorted(attempt.journal.glob("*.jsonl")))

    def _view(self, attempt: AttemptPaths, events: Sequence[Event], now: float) -> AttemptView:
        kept = self._known(attempt.number, now)
        return kept.view if kept is not None else view_attempt(attempt, events)

    def _keep(self, view: AttemptView, events: tuple[Event, ...], now: float) -> None:
        """Keep an attempt that ended some time ago."""
        if not view.state.is_terminal:
            return
        since = self._ended_since.setdefault(view.number, now)
        if now - since >= SETTLED_S and self._known(view.number, now) is None:
            self._ended[view.number] = _Ended(view, events, now)
