"""The journal of node 0's agent, which still takes lines when storage is full."""

from __future__ import annotations

from typing import Any

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.runs.run_folders import with_reserve


class AgentJournal(JournalWriter):
    """Appends lines, on full storage into the space of the run's reserve.

    A line that cannot be written would end the agent, and with it the attempt.
    """

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context.attempt.node_journal(context.node))
        self._run = context.run

    def append(self, kind: EventKind, *, durable: bool = True, **data: Any) -> Event:
        """Write one line, see `JournalWriter.append`."""
        append = super().append
        return with_reserve(self._run, lambda: append(kind, durable=durable, **data))
