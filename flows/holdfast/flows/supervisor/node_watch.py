"""Report nodes whose heartbeats stop, without waiting for the scheduler.

The agents and the scheduler react to a lost node. The supervisor only logs and journals it.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.workers.nodes.heartbeats import HeartbeatWatch, clock_problems, read_heartbeats

NAMED_MAX: Final = 16


class NodeWatch:
    """Watches the heartbeats of the live attempt. The supervisor calls `look` at every turn."""

    def __init__(self) -> None:
        self._number = 0
        self._watch: HeartbeatWatch | None = None
        self._are_clocks_checked = False

    def look(self, attempt: AttemptPaths, heartbeat_s: float, journal: JournalWriter) -> list[str]:
        """Journal which nodes became silent or are heard again; return messages about it."""
        if self._watch is None or self._number != attempt.number:
            self._watch = HeartbeatWatch(attempt, heartbeat_s)
            self._number, self._are_clocks_checked = attempt.number, False
        silent, again = self._watch.look()
        for names, is_silent in ((silent, True), (again, False)):
            if names:
                shown = sorted(names)[:NAMED_MAX]
                facts = {"attempt": attempt.number, "nodes": shown, "count": len(names)}
                journal.append(EventKind.NODE_SILENT, durable=False, silent=is_silent, **facts)
        problems = self._check_clocks(attempt)
        for text in problems:
            journal.append(EventKind.NOTE, durable=False, attempt=attempt.number, text=text)
        messages = [f"no more heartbeats from {_some(silent)}"] if silent else []
        messages += [f"heartbeats again from {_some(again)}"] if again else []
        return messages + problems

    def _check_clocks(self, attempt: AttemptPaths) -> list[str]:
        """Return problems with the nodes' clocks. Checks once, with the first heartbeats."""
        if self._are_clocks_checked:
            return []
        beats = read_heartbeats(attempt)
        self._are_clocks_checked = bool(beats)
        return clock_problems(beats, time.time())[:NAMED_MAX]


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(sorted(names)[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
