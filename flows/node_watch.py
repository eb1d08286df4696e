"""Nodes whose heartbeats stop: told by the supervisor, without waiting for the scheduler.

What to do about a node is the agents' business, who talk to each other, and the scheduler's. This
is for people, and for the journal.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.paths import AttemptPaths
from holdfast.workers.heartbeats import HeartbeatWatch, clock_problems, read_heartbeats

NAMED_MAX: Final = 16


class NodeWatch:
    """Watches the heartbeats of the live attempt; `look` is called at every turn."""

    def __init__(self) -> None:
        self._number = 0
        self._watch: HeartbeatWatch | None = None
        self._are_clocks_checked = False

    def look(self, attempt: AttemptPaths, heartbeat_s: float, journal: JournalWriter) -> list[str]:
        """Journal which nodes fell silent or are heard again; returns it in words."""
        if self._watch is None or self._number != attempt.number:
            self._watch = HeartbeatWatch(attempt, heartbeat_s)
            self._number, self._are_clocks_checked = attempt.number, False
        silent, again = self._watch.look()
        for names, is_silent in ((silent, True), (again, False)):
            if names:
                told = sorted(names)[:NAMED_MAX]
                facts = {"attempt": attempt.number, "nodes": told, "count": len(names)}
                journal.append(EventKind.NODE_SILENT, durable=False, silent=is_silent, **facts)
        problems = self._look_at_clocks(attempt)
        for text in problems:
            journal.append(EventKind.NOTE, durable=False, attempt=attempt.number, text=text)
        words = [f"no heartbeat any more of {_some(silent)}"] if silent else []
        words += [f"heartbeats again of {_some(again)}"] if again else []
        return words + problems

    def _look_at_clocks(self, attempt: AttemptPaths) -> list[str]:
        """What is wrong with the nodes' clocks; looked at once, when there are heartbeats."""
        if self._are_clocks_checked:
            return []
        beats = read_heartbeats(attempt)
        self._are_clocks_checked = bool(beats)
        return clock_problems(beats, time.time())[:NAMED_MAX]


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(sorted(names)[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
