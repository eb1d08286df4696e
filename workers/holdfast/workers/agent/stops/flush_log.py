"""The saves of this run so far, read from its growing journals."""

from __future__ import annotations

from pathlib import Path

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.workers.decisions.flush_forecast import SAVES_RECENT, FlushForecast, forecast_flush

# A save has a line when it is staged and one when it is committed, unless it fails.
LINES_KEPT_MAX = 4 * SAVES_RECENT


class FlushLog:
    """Reads earlier attempts' journals once, and this attempt's own at each call."""

    def __init__(self, run: RunPaths, attempt: AttemptPaths) -> None:
        self._run, self._attempt = run, attempt
        self._offsets: dict[Path, int] = {}
        self._lines: list[Event] = []

    def forecast(self) -> FlushForecast | None:
        """Return how long the next flush is expected to take, or None before any save."""
        attempts = [self._attempt] if self._offsets else self._run.list_attempts()
        fresh: list[Event] = []
        # Rank 0 journals every save.
        for path in [attempt.rank_journal for attempt in attempts]:
            events, self._offsets[path] = read_journal(path, self._offsets.get(path, 0))
            saves = {EventKind.STAGED, EventKind.COMMITTED}
            fresh += [event for event in events if event.kind in saves]
        fresh.sort(key=lambda event: event.time)
        self._lines = [*self._lines, *fresh][-LINES_KEPT_MAX:]
        return forecast_flush(self._lines)
