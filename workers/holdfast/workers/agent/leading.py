"""What the agent does that leads an attempt: node 0's, or the one that takes over from it.

At the end it writes `outcome.json`: what it knows about the attempt.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from holdfast.contracts.disk.durable import STORAGE_FULL
from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.disk.manifest import Manifest, newest_committed
from holdfast.contracts.errors import InterfaceError, SchedulerError
from holdfast.contracts.node.channel import ChannelHost
from holdfast.contracts.records.documents import LaunchRecord, Outcome, Submission, create_document
from holdfast.contracts.spec.run_spec import steps_total
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.claim import quarantine_stale_outcome
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.interface import addresses_of
from holdfast.workers.agent.lead import Lead, Succeeded
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.agent.stops.sources import StopRequest
from holdfast.workers.agent.succession import FIRST, SupersededError, leads, renew
from holdfast.workers.decisions.causes import STATE_OF_CAUSE, Ending, RankFailure
from holdfast.workers.runs.run_folders import with_reserve
from holdfast.workers.schedulers import executor_for

# Judge whether a program that ended with exit status 0 is complete.
#
# The spec may declare the number of steps. Rank 0 journals what the program loops over, and why
# it left: after the last step, when all ranks agreed to stop, or when the program closed its
# session.

_LOOPS: Final = {"promised", "has_left"}


def judge_completion(
    events: Iterable[Event],
    *,
    launch: int,
    step: int,
    steps_total: int | None = None,
    allow_early_exit: bool = False,
) -> Ending:
    """Return how a launch ended whose ranks all exited with status 0 without a stop request.

    `events` are the attempt's, and `step` is the last one that a rank completed. `steps_total` is
    the last step by the spec, None without one. An end before the last step is incomplete, which
    is a failure, and `relaunch` continues the run. It is complete if `allow_early_exit` is set, or
    if the program declared it by closing its session and the spec has no number of steps.
    """
    mine = [event for event in events if event.data.get("launch") == launch]
    promises = [str(e.data["text"]) for e in mine if e.data.get("promised")]
    # A program may loop again. Then the end of the loop before says nothing about the last one.
    newest = next((e.data for e in reversed(mine) if _LOOPS & e.data.keys()), {})
    left = newest if newest.get("has_left") else None
    begun = [event.data for event in mine if event.kind is EventKind.RESUMED]
    if not any(data.get("counts_steps", True) for data in begun):
        return _completed("the program ended without a Session: no steps were counted or compared")
    if expected := _unmet(step, steps_total, promises, left):
        how = ", without session.close()" if left is None else ""
        message = f"the program ended with exit status 0 after step {step}{how}, {expected}"
        return _completed(f"accepted: {message}") if allow_early_exit else _incomplete(message)
    if left is not None:
        is_short = left.get("is_whole") is False
        evidence = (f"the program closed its Session: {left['text']}",) if is_short else ()
        return _completed(*evidence)
    if not promises and steps_total is None:
        return _completed(
            f"the program ended after step {step}; it had not declared how many steps there are"
        )
    return _completed()


def judge_own_completion(
    step: int, steps_total: int | None, *, counts_steps: bool, allow_early_exit: bool = False
) -> Ending:
    """Return how a launch of a program ended that writes its own checkpoints, with exit status 0.

    `step` is the last one that its output or its checkpoints show. Without `counts_steps`, only
    its checkpoints show steps, so later ones are unknown.
    """
    if steps_total is None:
        return _completed(
            f"the program ended after step {step}; the spec's [config] does not set its last step"
        )
    if step >= steps_total:
        return _completed()
    message = f"after step {step}, although the spec's [config] sets {steps_total} steps"
    if not counts_steps:
        return _completed(
            f"the program's newest checkpoint is {message}; without program.progress no later step "
            "is known"
        )
    message = f"the program ended with exit status 0 {message}"
    return _completed(f"accepted: {message}") if allow_early_exit else _incomplete(message)


def _unmet(
    step: int,
    steps_total: int | None,
    promises: list[str],
    left: Mapping[str, Any] | None,
) -> str:
    """Return the number of steps that the program did not reach, as text; empty if it did."""
    if steps_total is not None and step < steps_total:
        return f"although the spec's [config] sets {steps_total} steps"
    is_declared = left is not None and left.get("is_declared") is not False
    is_whole = left is not None and left.get("is_whole") is not False
    return f"although {promises[-1]}" if promises and not (is_whole or is_declared) else ""


def _completed(*evidence: str) -> Ending:
    return Ending(state=AttemptState.COMPLETED, cause=None, evidence=evidence)


def _incomplete(message: str) -> Ending:
    advice = (
        "continue from the newest checkpoint with `holdfast relaunch`, or accept such an end with "
        "`holdfast submit --allow-early-exit`"
    )
    evidence = (f"incomplete: {message}; {advice}",)
    return Ending(state=AttemptState.FAILED, cause=Cause.USER_ERROR, evidence=evidence)


def build_outcome(lead: Lead) -> Outcome:
    """Return the outcome of an attempt that the agent led to its end."""
    context, last = lead.context, lead.last
    ending, first = judge_ending(lead)
    if lead.program is not None:
        ending = replace(ending, evidence=(*ending.evidence, *lead.program.problems))
    resumes = _resumes(context)
    launches = tuple(_with_resume(r, resumes.get(r.number)) for r in lead.launches)
    committed = newest_committed(context.run, context.attempt.number)
    steps = [i.last_step for i in launches if i.last_step is not None]
    digests = [i.command_digest for i in launches if i.command_digest]
    stop_request = lead.stop_request
    return Outcome(
        attempt=context.attempt.number,
        state=ending.state,
        cause=ending.cause,
        evidence=ending.evidence,
        job_id=context.job_id,
        hosts=lead.group.hosts,
        world_size=lead.world_size,
        command_digest=digests[-1] if digests else None,
        resumed_from=launches[0].resumed_from if launches else None,
        first_step=launches[0].first_step if launches else None,
        last_step=max(steps, default=None),
        committed_step=committed.step if committed else None,
        started_at=context.started_at,
        stop_requested_at=stop_request.requested_at if stop_request else None,
        stop_committed_at=_committed_at(lead, committed),
        ended_at=time.time(),
        traceback=first.text or None if first else None,
        failed_rank=first.rank if first else None,
        failed_host=first.host or None if first else None,
        unhealthy_hosts=(*lead.root.hosts, *lead.health.hosts, *lead.gpus.hosts, *lead.slow.hosts),
        launches=launches if last else (),
    )


def judge_ending(lead: Lead) -> tuple[Ending, RankFailure | None]:
    """Return the attempt's ending, and the rank that failed first, if one did."""
    last, stop_request = lead.last, lead.stop_request
    if refused := lead.root.ending or lead.health.ending:
        return refused, None
    if stop_request is not None and last is not None and last.ending in {"crashed", "hung"}:
        lost = (
            f"nodes {', '.join(lead.group.lost)} were lost while stopping"
            if lead.group.lost
            else ""
        )
        return _stopped(stop_request, lost or "requested while training was restarting"), None
    if stop_request is not None and last is None:
        return _stopped(stop_request, "requested before training started"), None
    assert last is not None
    if last.ending == "completed":
        ending = _judge_exit(lead, last.completed)
        is_proven = ending.state is AttemptState.COMPLETED and not ending.evidence
        if stop_request is not None and not is_proven:
            # Its own handler of the signal may have ended it.
            return _stopped(stop_request, f"then {ending.evidence[0]}"), None
        return ending, None
    if stop_request is None and last.ending == "stopped":
        message = "the ranks stopped early without a stop request to this agent"
        return Ending(state=AttemptState.FAILED, cause=Cause.UNKNOWN, evidence=(message,)), None
    if last.ending == "drained" and stop_request is None and not lead.group.lost:
        # It has left nodes, and the others are too few to continue.
        cause = Cause.NODE_FAILURE
        return Ending(state=STATE_OF_CAUSE[cause], cause=cause, evidence=(lead.verdict,)), None
    if last.ending in {"crashed", "hung"} or stop_request is None:
        ending, first = lead.bad_ending(last)
        evidence = (*ending.evidence, *([lead.verdict] if lead.verdict else []))
        return replace(ending, evidence=evidence), first
    if last.ending == "killed":
        killed = "training had not ended by the deadline and was killed"
        hang = f"training hung: {'; '.join(last.hang)}" if last.hang else ""
        return _stopped(stop_request, hang or killed), None
    _, first = last.crash_report.classify()
    if first is not None and last.exit_code:
        return _stopped(stop_request, f"rank {first.rank} failed while stopping"), first
    return _stopped(stop_request), None


def _judge_exit(lead: Lead, step: int) -> Ending:
    """Return how the last launch ended, whose ranks all exited with status 0 after `step`."""
    request = lead.context.request
    total = steps_total(request.config)
    if lead.program is not None:
        return judge_own_completion(
            step,
            total,
            counts_steps=bool(request.program.progress),
            allow_early_exit=request.supervision.allow_early_exit,
        )
    return judge_completion(
        _events(lead.context),
        launch=lead.launches[-1].number,
        step=step,
        steps_total=total,
        allow_early_exit=request.supervision.allow_early_exit,
    )


def failed_outcome(context: AgentContext, error: Exception) -> Outcome:
    """Return the outcome for a failure of the agent itself."""
    committed = newest_committed(context.run, context.attempt.number)
    is_full = isinstance(error, OSError) and error.errno in STORAGE_FULL
    last = "".join(traceback.format_exception_only(error)).strip()
    return Outcome(
        attempt=context.attempt.number,
        state=AttemptState.FAILED,
        cause=Cause.STORAGE_FULL if is_full else Cause.INFRASTRUCTURE,
        evidence=(f"the agent of node 0 failed: {last}",),
        job_id=context.job_id,
        hosts=(context.host,),
        world_size=context.request.world_size,
        committed_step=committed.step if committed else None,
        started_at=context.started_at,
        ended_at=time.time(),
        traceback="".join(traceback.format_exception(error)),
    )


def leave_outcome(context: AgentContext, outcome: Outcome, journal: JournalWriter) -> None:
    """Write `outcome.json` once; an outcome of another attempt is renamed first.

    On full storage it takes the run's reserve, because nothing else says why the attempt ended.
    """
    quarantine_stale_outcome(context.attempt, journal)
    with_reserve(context.run, lambda: create_document(context.attempt.outcome, outcome))


def _stopped(stop_request: StopRequest, detail: str = "") -> Ending:
    what = f"{stop_request.source}: {stop_request.name}" + (
        f" ({stop_request.detail})" if stop_request.detail else ""
    )
    if stop_request.source == "stop_file":
        # The detail names the action and who asked for it.
        what = stop_request.detail
    evidence = (what, detail) if detail else (what,)
    return Ending(
        state=STATE_OF_CAUSE[stop_request.cause], cause=stop_request.cause, evidence=evidence
    )


def _committed_at(lead: Lead, committed: Manifest | None) -> float | None:
    """Return when the last step was durable, if the attempt was stopped and lost no step.

    A step that was durable before the request counts as durable at the time of the request.
    """
    stop_request, last = lead.stop_request, lead.last
    if stop_request is None or last is None or committed is None:
        return None
    is_newest = committed.step >= last.completed
    return max(committed.committed_at, stop_request.requested_at) if is_newest else None


def _resumes(context: AgentContext) -> dict[int, Event]:
    """Return each launch's `resumed` line, from any journal of the attempt."""
    found: dict[int, Event] = {}
    for event in _events(context):
        if event.kind is EventKind.RESUMED:
            found[int(event.data.get("launch", 0))] = event
    return found


def _events(context: AgentContext) -> list[Event]:
    """Return all events in the attempt's journals, file by file."""
    paths = sorted(context.attempt.journal.glob("*.jsonl"))
    return [event for path in paths for event in read_journal(path)[0]]


def _with_resume(record: LaunchRecord, event: Event | None) -> LaunchRecord:
    if event is None:
        return record
    data, step = event.data, event.data.get("step")
    return record.model_copy(
        update={
            "resumed_from": data.get("checkpoint"),
            "command_digest": data.get("command_digest"),
            "first_step": record.first_step or (step + 1 if step is not None else None),
        }
    )


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


class Led(NamedTuple):
    """How an attempt ended, as text, and whether its last launch lost nodes."""

    text: str
    has_lost: bool = False


def lead_attempt(context: AgentContext, signals: SignalBox, journal: JournalWriter) -> str:
    """Gather the nodes, run the attempt, write its outcome and end the other agents.

    Slurm would keep the job and its other nodes until it notices that a node is lost.
    """
    with contextlib.ExitStack() as stack, _recording_errors(context, journal):
        runtime = NodeRuntime(context)
        stack.callback(runtime.close)
        host = None
        if context.nodes_of_job > 1:
            host = _host(context, FIRST)
            stack.callback(host.close)
        ended = _run(context, signals, journal, runtime, host)
    if ended.has_lost:
        end_job(context)
    return ended.text


def take_over(
    context: AgentContext, signals: SignalBox, runtime: NodeRuntime, term: int, lost_host: str
) -> str:
    """Lead an attempt whose lead is lost, from `term` on. Then end the job, unless another leads.

    The job's batch shell was on the lost node, so Slurm would keep the other nodes.
    """
    with AgentJournal(context) as journal, _recording_errors(context, journal):
        runtime.lead()
        with contextlib.closing(_host(context, term)) as host:
            ended = _run(context, signals, journal, runtime, host, Succeeded(term, lost_host))
    if leads(context):
        end_job(context)
    return ended.text


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
) -> Led:
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
        return Led(str(error))
    finally:
        if lead is not None:
            lead.close()
    return Led(f"attempt {context.attempt.number}: {outcome.state}", bool(lead.group.lost))


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
