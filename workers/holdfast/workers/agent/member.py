"""The agents of the other nodes, which do what node 0's agent asks over the channel."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node.agreement import answer_from_status_table
from holdfast.contracts.node.channel import ChannelMember, DismissedError
from holdfast.contracts.node.clocks import Timeout
from holdfast.contracts.records import documents
from holdfast.workers.agent import claim, leading, losses
from holdfast.workers.agent.context import AgentContext, NodePlace
from holdfast.workers.agent.node import NodeReport
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.agent.succession import StillLeadsError, next_lead

POLL_S: Final = 0.05
LISTEN_S: Final = 0.2
REPORT_S: Final = 0.25
ORPHAN_DRAIN_S: Final = 60.0
# The lead of a later term listens when its term is known.
REJOIN_S: Final = 30.0
# Node 0 asks for a report every few seconds. Only while it waits for a flush is it silent.
SILENCE_MARGIN_S: Final = 300.0


def run_member_agent(context: AgentContext, signals: SignalBox) -> str:
    """Run the agent of a node other than 0: join, serve, leave. Return a description of the end."""
    if not claim.wait_for_claim(context):
        holder = documents.read_claim(context.attempt)
        return f"node {context.node} exits: the attempt belongs to job {holder and holder.job_id}"
    try:
        # Join before changing anything on the node, because another agent may be in charge of it.
        member = _join(context, context.attempt.channel)
    except AgreementError as error:
        with JournalWriter(context.attempt.node_journal(context.node)) as journal:
            journal.append(EventKind.NOTE, attempt=context.attempt.number, text=str(error))
        return f"node {context.node} exits: {error}"
    runtime = NodeRuntime(context)
    lead, term = 0, 0
    try:
        while True:
            try:
                if term:
                    member, term = _rejoin(context, runtime, term), 0
                _serve(context, runtime, member, signals)
                return f"node {context.node} finished"
            except DismissedError as error:
                # The lead is alive. It ends the job itself or continues without this node.
                runtime.note(str(error))
                runtime.kill()
                runtime.drain(ORPHAN_DRAIN_S)
                return f"node {context.node} exits: {error}"
            except ConnectionError as error:
                member.close()
                found, lost_host = _without_lead(context, runtime, lead, error)
                if found is None:
                    return f"node {context.node} exits: {error}"
                if found.node == context.node:
                    return leading.take_over(context, signals, runtime, found.number, lost_host)
                lead, term = found.node, found.number
    except AgreementError as error:
        runtime.note(str(error))
        return f"node {context.node} exits: {error}"
    finally:
        member.close()
        runtime.close()


def _join(
    context: AgentContext, channel: Path, runtime: NodeRuntime | None = None
) -> ChannelMember:
    """Join the lead. Raises `AgreementError`. `runtime` is given when another lead was lost."""
    hello: dict[str, Any] = {
        "node": context.node,
        "host": context.host,
        "job_id": context.job_id,
        "pid": os.getpid(),
        "switch": context.switch,
    }
    timeout_s = context.request.supervision.join_timeout_s
    if runtime is not None:
        hello |= {"place": runtime.place.node, "launch": runtime.heartbeat.launch}
        timeout_s = min(timeout_s, REJOIN_S)
    return ChannelMember(channel, hello, timeout_s)


def _rejoin(context: AgentContext, runtime: NodeRuntime, term: int) -> ChannelMember:
    """Join the lead of a later term. Raises `ConnectionError` if that one is lost, too."""
    try:
        return _join(context, context.attempt.channel_of(term), runtime)
    except AgreementError as error:
        raise ConnectionError(str(error)) from error


def _serve(
    context: AgentContext, runtime: NodeRuntime, member: ChannelMember, signals: SignalBox
) -> None:
    runtime.flusher_supervisor.report_progress = partial(_report_flush, member)
    runtime.heartbeat.send = lambda beat: member.tell(beat=beat)
    silence_s = context.request.supervision.flush_timeout_s + SILENCE_MARGIN_S
    run_member(runtime, member, signals, silence_s)


def run_member(
    runtime: NodeRuntime, member: ChannelMember, signals: SignalBox, silence_s: float
) -> None:
    """Answer node 0's requests until it sends `finish`.

    Raises `ConnectionError` if node 0 is lost or sends nothing for `silence_s` seconds. Time in
    which this process could not run does not count.
    """
    silence, reporter = Timeout(silence_s), Reporter(runtime, member)
    with _forwarding(signals, member):
        while not silence.is_over:
            question = member.receive(POLL_S)
            if question is None:
                reporter.look()
                continue
            member.reply(**_reply(runtime, reporter, question))
            silence.restart()
            if question["kind"] == "finish":
                return
    raise ConnectionError(f"node 0 sent nothing for {silence_s:.0f} s")


def _report_flush(member: ChannelMember, kind: str) -> None:
    """Tell node 0 that this node has written its part of a step, or has failed to."""
    if kind != "committed":
        # The agent's own loop finds out when node 0 is gone.
        with contextlib.suppress(ConnectionError):
            member.tell(flushed=kind)


@contextlib.contextmanager
def _forwarding(signals: SignalBox, member: ChannelMember) -> Iterator[None]:
    """Tell node 0 every signal at once, whatever this agent does meanwhile."""
    is_over = threading.Event()

    def forward() -> None:
        # The agent's own loop finds out when node 0 is gone.
        with contextlib.suppress(ConnectionError):
            # The lead before may not have acted on them.
            if heard := list(signals.heard):
                member.tell(signals=heard)
            while not is_over.is_set():
                if names := signals.wait(LISTEN_S):
                    member.tell(signals=names)

    thread = threading.Thread(target=forward, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Reporter:
    """This node's reports to node 0: those that it asks for, and urgent ones unasked.

    With many nodes, node 0 asks for a report only every few seconds. The end of the ranks, a notice
    or a finished sample of stacks does not wait for that.
    """

    def __init__(self, runtime: NodeRuntime, member: ChannelMember) -> None:
        self._runtime, self._member = runtime, member
        self._known: tuple[object, ...] = ()
        self._looked_at = 0.0

    def look(self) -> None:
        """Send a report if something urgent has changed since the last one."""
        if time.monotonic() - self._looked_at < REPORT_S:
            return
        self._looked_at = time.monotonic()
        report = self._runtime.report()
        if report.notices or _urgent(report) != self._known:
            self._member.tell(report=self._tell(report))

    def answer(self) -> dict[str, Any]:
        """Return a report as node 0 asked for it."""
        return self._tell(self._runtime.report())

    def _tell(self, report: NodeReport) -> dict[str, Any]:
        self._known = _urgent(report)
        return {**report.to_json(), "host_address": self._member.host_address}


def _urgent(report: NodeReport) -> tuple[object, ...]:
    """Return the parts of a report whose change must not wait."""
    sample = report.sample
    return (
        report.exit_code,
        report.has_left,
        report.asked,
        report.health,
        (sample.dump, sample.number) if sample else None,
    )


def _reply(runtime: NodeRuntime, reporter: Reporter, question: dict[str, Any]) -> dict[str, Any]:
    """Do what node 0 requests, and return the answer."""
    kind = question["kind"]
    if kind == "start":
        # A node 0 without places does not send one.
        place = NodePlace(**question["place"]) if question.get("place") else None
        here = question["address"], question["port"]
        is_alone = bool(question.get("is_alone"))
        runtime.start(question["launch"], *here, place, is_alone=is_alone)
    elif kind == "prepare":
        runtime.prepare(question["launch"], question["address"], question["port"])
    elif kind == "report":
        return reporter.answer()
    elif kind == "stacks":
        runtime.take_stacks(question["dump"], question["number"])
    elif kind == "root":
        problems = runtime.check_root(question["place"], question["shared"], question["token"])
        return {"problems": [asdict(one) for one in problems]}
    elif kind == "race":
        return {"won": runtime.race(question["shared"], question["number"])}
    elif kind == "health":
        runtime.check_health(question["checks"], question["round"], question["meeting"])
    elif kind == "expect":
        runtime.expect(question["term"])
    elif kind == "protect":
        runtime.protect(question["launch"], question["node"], question["holder"])
    elif kind == "copy":
        runtime.copy(question["launch"], question["round"], question["keep"])
    elif kind == "hint":
        runtime.flusher_supervisor.give_hint()
    elif kind == "kill":
        runtime.kill()
    elif kind == "drain":
        done = runtime.drain(question["drain_s"], question["lost"], mirror=question["mirror"])
        return {"done": done}
    elif kind == "crash_report":
        return runtime.crash_report().to_json()
    elif kind == "acknowledge":
        runtime.acknowledge()
    else:
        if kind == "announce":
            runtime.tell_program()
        return answer_from_status_table(runtime.status_table, question) or {}
    return {}


def _without_lead(
    context: AgentContext, runtime: NodeRuntime, lead: int, error: ConnectionError
) -> tuple[documents.Term | None, str]:
    """End what is left of a launch whose lead is lost; return the next lead's term, and its host.

    A step of which the lead had written its part is committed by the lowest remaining node. If the
    attempt cannot continue, the job is cancelled: its batch shell was on node 0, and with
    `--no-kill` Slurm would keep the other nodes until the time limit.
    """
    newest = documents.newest_term(context.attempt)
    holder = newest or documents.read_claim(context.attempt)
    host = holder.host if holder else ""
    runtime.kill()
    runtime.drain(ORPHAN_DRAIN_S, lost=(0,), mirror=True)
    if context.attempt.outcome.exists():
        return None, host
    nodes = runtime.place.nodes
    try:
        found = next_lead(
            context, runtime, lead, lambda: losses.may_continue_without(context, nodes, host)
        )
    except StillLeadsError as alive:
        runtime.note(str(alive))
        return None, host
    if found is None or found.node == context.node:
        with JournalWriter(context.attempt.node_journal(context.node)) as journal:
            journal.append(
                EventKind.NODE_LOST,
                attempt=context.attempt.number,
                node=lead,
                host=host,
                detail=str(error),
            )
    if found is None and not context.attempt.outcome.exists() and _ends_job(context, runtime):
        leading.end_job(context)
    return found, host


def _ends_job(context: AgentContext, runtime: NodeRuntime) -> bool:
    """Return False if another node leads the attempt, or has found that it ends and so ends it."""
    newest, ends = documents.read_terms(context.attempt)
    number = runtime.place.term
    if newest is not None and newest.number > number:
        return False
    found = (
        documents.read_document(documents.Term, context.attempt.term_end(number))
        if number in ends
        else None
    )
    return found is None or found.node == context.node
