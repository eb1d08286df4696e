"""What the agent does that leads an attempt: node 0's, or the one that takes over from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.errors import InterfaceError, SchedulerError
from holdfast.contracts.node.channel import ChannelHost
from holdfast.contracts.records.attempt import Outcome, Submission
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.interface import addresses_of
from holdfast.workers.agent.lead import Lead, Succeeded
from holdfast.workers.agent.outcome import build_outcome, failed_outcome, leave_outcome
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.agent.succession import FIRST, SupersededError, renew
from holdfast.workers.runs.run_folders import with_reserve
from holdfast.workers.schedulers import executor_for


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


def lead_attempt(context: AgentContext, signals: SignalBox, journal: JournalWriter) -> str:
    """Gather the nodes, run the attempt, write its outcome and end the other agents."""
    with contextlib.ExitStack() as stack, _recording_errors(context, journal):
        runtime = NodeRuntime(context)
        stack.callback(runtime.close)
        host = None
        if context.nodes_of_job > 1:
            host = _host(context, FIRST)
            stack.callback(host.close)
        return _run(context, signals, journal, runtime, host)


def take_over(
    context: AgentContext, signals: SignalBox, runtime: NodeRuntime, term: int, lost_host: str
) -> str:
    """Lead an attempt whose lead is lost, from `term` on. The job is ended with the attempt.

    The job's batch shell was on the lost node, so Slurm would keep the other nodes.
    """
    with AgentJournal(context) as journal, _recording_errors(context, journal):
        runtime.lead()
        with contextlib.closing(_host(context, term)) as host:
            ended = _run(context, signals, journal, runtime, host, Succeeded(term, lost_host))
    end_job(context)
    return ended


def end_job(context: AgentContext) -> None:
    """Cancel the job. If the scheduler does not answer, the supervisor or the time limit does.

    A job that Slurm restarts after a node failure is left to Slurm.
    """
    if context.request.expedite:
        return
    job = Submission(
        job_id=context.job_id, executor=context.request.executor, submitted_at=time.time()
    )
    with contextlib.suppress(SchedulerError):
        executor_for(context.request.executor).cancel(context.request, job)


def _run(
    context: AgentContext,
    signals: SignalBox,
    journal: JournalWriter,
    runtime: NodeRuntime,
    host: ChannelHost | None,
    succeeded: Succeeded | None = None,
) -> str:
    """Lead the attempt to its outcome, unless another node leads it by then."""
    lead = None
    try:
        lead = Lead(context, signals, journal, runtime, host)
        lead.group.take_beat = runtime.heartbeat.take
        lead.group.drop_beat = runtime.heartbeat.forget
        lead.group.take_flush = runtime.flusher_supervisor.give_hint
        runtime.flusher_supervisor.report_progress = lead.group.pass_on_flush
        if succeeded is not None:
            lead.take_over(succeeded, runtime)
        else:
            lead.run()
        outcome = build_outcome(lead)
        _close(context, outcome, journal)
        # This must come last: after it, a cloud may take the node.
        lead.acknowledge(outcome)
        lead.group.finish()
    except SupersededError as error:
        runtime.note(str(error))
        if lead is not None:
            lead.group.finish()
        return str(error)
    finally:
        if lead is not None:
            lead.close()
    return f"attempt {context.attempt.number}: {outcome.state}"


@contextlib.contextmanager
def _recording_errors(context: AgentContext, journal: JournalWriter) -> Iterator[None]:
    """Write an outcome whatever the error, so that the attempt's cause is known."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(SupersededError):
            _close(context, failed_outcome(context, error), journal)
        raise


def _close(context: AgentContext, outcome: Outcome, journal: JournalWriter) -> None:
    """Write the outcome. Raises `SupersededError` if another node leads the attempt."""
    if context.nodes_of_job > 1:
        with_reserve(context.run, lambda: renew(context, is_end=True))
    leave_outcome(context, outcome, journal)


def _host(context: AgentContext, term: int) -> ChannelHost:
    return ChannelHost(
        context.attempt.channel_of(term),
        context.nodes_of_job,
        ports=context.request.supervision.port_range,
        addresses=_addresses(context),
    )


def _addresses(context: AgentContext) -> list[str] | None:
    """Return this node's addresses on the interface of the spec; None without one.

    Each node reports an interface that it lacks when it starts the ranks. Until then, they meet at
    the address of the host name.
    """
    interface = context.request.launch.network_interface
    with contextlib.suppress(InterfaceError):
        return addresses_of(interface, context.host) if interface else None
    return None
