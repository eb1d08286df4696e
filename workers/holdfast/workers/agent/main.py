"""The entry point of the agent, which submitit starts on every node of an attempt."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.errors import InterfaceError
from holdfast.contracts.node.channel import ChannelHost
from holdfast.contracts.node.descriptors import raise_descriptor_limit
from holdfast.workers.agent.claim import claim
from holdfast.workers.agent.context import AgentContext, load_context
from holdfast.workers.agent.health.interface import addresses_of
from holdfast.workers.agent.lead import Lead
from holdfast.workers.agent.member import run_member_agent
from holdfast.workers.agent.outcome import build_outcome, failed_outcome, leave_outcome
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.runs.run_folders import with_reserve

# The journal of node 0's agent, which still takes lines when storage is full.


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


def run_agent(request_path: str) -> str:
    """Run this node's part of the attempt whose `request.json` is at `request_path`.

    Returns a description of how it ended, for the job's log.
    """
    signals = SignalBox()
    signals.install()
    # Node 0 needs a descriptor for each other node.
    raise_descriptor_limit()
    context = load_context(Path(request_path))
    if not context.is_lead:
        return run_member_agent(context, signals)
    with AgentJournal(context) as journal:
        if not claim(context, journal):
            return f"attempt {context.attempt.number} belongs to another job"
        try:
            return _lead(context, signals, journal)
        except Exception as error:
            # Whatever the error, write an outcome, so that the attempt's cause is known.
            leave_outcome(context, failed_outcome(context, error), journal)
            raise


def _lead(context: AgentContext, signals: SignalBox, journal: JournalWriter) -> str:
    """Gather the nodes, run the attempt, write its outcome and end the other agents."""
    runtime = NodeRuntime(context)
    host = lead = None
    try:
        if context.nodes_of_job > 1:
            host = ChannelHost(
                context.attempt.channel,
                context.nodes_of_job,
                ports=context.request.supervision.port_range,
                addresses=_addresses(context),
            )
        lead = Lead(context, signals, journal, runtime, host)
        lead.group.take_beat = runtime.heartbeat.take
        lead.group.take_flush = runtime.flusher_supervisor.give_hint
        runtime.flusher_supervisor.report_progress = lead.group.pass_on_flush
        lead.run()
        outcome = build_outcome(lead)
        leave_outcome(context, outcome, journal)
        # This must come last: after it, a cloud may take the node.
        lead.acknowledge(outcome)
        lead.group.finish()
    finally:
        if lead is not None:
            lead.close()
        runtime.close()
        if host is not None:
            host.close()
    return f"attempt {context.attempt.number}: {outcome.state}"


def _addresses(context: AgentContext) -> list[str] | None:
    """Return this node's addresses on the interface of the spec; None without one.

    Each node reports an interface that it lacks when it starts the ranks. Until then, they meet at
    the address of the host name.
    """
    interface = context.request.launch.network_interface
    with contextlib.suppress(InterfaceError):
        return addresses_of(interface, context.host) if interface else None
    return None


if __name__ == "__main__":
    print(run_agent(sys.argv[1]))
