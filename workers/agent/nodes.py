"""The other nodes: node 0's agent leads, and the member agents do what it requests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from holdfast.contracts.agreement import answer_from_status_table
from holdfast.contracts.attempt import Submission, read_claim
from holdfast.contracts.channel import CALL_TIMEOUT_S, ChannelMember, DismissedError, Peer
from holdfast.contracts.errors import AgreementError, SchedulerError
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.rank_status import Proposal
from holdfast.contracts.timeouts import Timeout
from holdfast.workers.agent.claim import wait_for_claim
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.signals import SignalBox
from holdfast.workers.agent.torchrun import KILL_WAIT_S
from holdfast.workers.executors import executor_for

POLL_S: Final = 0.05
FINISH_TIMEOUT_S: Final = 30.0
ORPHAN_DRAIN_S: Final = 60.0
# Node 0 polls several times a second. Only while it waits for a flush is it silent.
SILENCE_MARGIN_S: Final = 300.0


class RemoteNode:
    """Another node, led over the channel. Every call may raise `ConnectionError`.

    Messages that need no answer are sent by `post`.
    """

    def __init__(self, peer: Peer, post: Callable[[Callable[[], object]], None]) -> None:
        self._peer, self._post = peer, post
        self.number = int(peer.hello["node"])
        self.name = str(peer.hello["host"])

    @property
    def waiting_s(self) -> float:
        """How many seconds the open question has been waiting for its answer."""
        return self._peer.waiting_s

    def start(self, launch: int, address: str, port: int) -> None:
        self._peer.call("start", launch=launch, address=address, port=port)

    def prepare(self, launch: int, address: str, port: int) -> None:
        call = partial(self._peer.call, "prepare", launch=launch)
        self._post(partial(call, address=address, port=port))

    def report(self) -> NodeReport:
        return NodeReport.from_json(self._peer.call("report"))

    def announce(self, deadline: float | None) -> None:
        self._post(lambda: self._peer.call("announce", deadline=deadline))

    def take_stacks(self, dump: int, number: int) -> None:
        self._post(lambda: self._peer.call("stacks", dump=dump, number=number))

    def kill(self) -> None:
        self._peer.call("kill", timeout_s=KILL_WAIT_S + CALL_TIMEOUT_S)

    def drain(self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False) -> bool:
        answer = self._peer.call(
            "drain",
            timeout_s=timeout_s + CALL_TIMEOUT_S,
            drain_s=timeout_s,
            lost=sorted(lost),
            mirror=mirror,
        )
        return bool(answer["done"])

    def crash_report(self) -> CrashReport:
        return CrashReport.from_json(self._peer.call("crash_report"))

    def acknowledge(self) -> None:
        self._peer.call("acknowledge")

    def finish(self) -> None:
        """Tell the node's agent to exit."""
        self._peer.call("finish", timeout_s=FINISH_TIMEOUT_S)

    def newest_entered(self) -> int:
        return self._peer.newest_entered()

    def propose(self, serial: int, step: int) -> bool:
        return self._peer.propose(serial, step)

    def answer(self, serial: int, state: Proposal) -> None:
        self._peer.answer(serial, state)


def run_member_agent(context: AgentContext, signals: SignalBox) -> str:
    """Run the agent of a node other than 0: join, serve, leave. Return a description of the end."""
    if not wait_for_claim(context):
        holder = read_claim(context.attempt)
        return f"node {context.node} exits: the attempt belongs to job {holder and holder.job_id}"
    hello = {
        "node": context.node,
        "host": context.host,
        "job_id": context.job_id,
        "pid": os.getpid(),
    }
    try:
        # Join before changing anything on the node, because another agent may be in charge of it.
        member = ChannelMember(
            context.attempt.channel, hello, context.request.supervision.join_timeout_s
        )
    except AgreementError as error:
        with JournalWriter(context.attempt.node_journal(context.node)) as journal:
            journal.append(EventKind.NOTE, attempt=context.attempt.number, text=str(error))
        return f"node {context.node} exits: {error}"
    runtime = NodeRuntime(context)
    silence_s = context.request.supervision.flush_timeout_s + SILENCE_MARGIN_S
    try:
        run_member(runtime, member, signals, silence_s)
    except DismissedError as error:
        # Node 0 is alive. It ends the job itself or continues without this node.
        runtime.note(str(error))
        runtime.kill()
        runtime.drain(ORPHAN_DRAIN_S)
        return f"node {context.node} exits: {error}"
    except ConnectionError as error:
        _leave_without_lead(context, runtime, error)
        return f"node {context.node} exits: {error}"
    finally:
        member.close()
        runtime.close()
    return f"node {context.node} finished"


def run_member(
    runtime: NodeRuntime, member: ChannelMember, signals: SignalBox, silence_s: float
) -> None:
    """Answer node 0's requests until it sends `finish`.

    Raises `ConnectionError` if node 0 is lost or sends nothing for `silence_s` seconds. Time in
    which this process could not run does not count.
    """
    silence = Timeout(silence_s)
    while not silence.is_over:
        for name in signals.wait(0.0):
            runtime.hear(name)
        question = member.receive(POLL_S)
        if question is None:
            continue
        member.reply(**_reply(runtime, member, question))
        silence.restart()
        if question["kind"] == "finish":
            return
    raise ConnectionError(f"node 0 sent nothing for {silence_s:.0f} s")


def _reply(runtime: NodeRuntime, member: ChannelMember, question: dict[str, Any]) -> dict[str, Any]:
    """Do what node 0 requests, and return the answer."""
    kind = question["kind"]
    if kind in {"start", "prepare"}:
        act = runtime.start if kind == "start" else runtime.prepare
        act(question["launch"], question["address"], question["port"])
    elif kind == "report":
        return {**runtime.report().to_json(), "host_address": member.host_address}
    elif kind == "stacks":
        runtime.take_stacks(question["dump"], question["number"])
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
        return answer_from_status_table(runtime.status_table, question) or {}
    return {}


def _leave_without_lead(
    context: AgentContext, runtime: NodeRuntime, error: ConnectionError
) -> None:
    """End what is left of the attempt after the loss of node 0, which alone starts launches.

    A step of which node 0 had written its part is committed by the lowest remaining node. The job
    is cancelled too: its batch shell was on node 0, and with `--no-kill` Slurm would keep the other
    nodes until the time limit.
    """
    holder = read_claim(context.attempt)
    if not context.attempt.outcome.exists():
        with JournalWriter(context.attempt.node_journal(context.node)) as journal:
            journal.append(
                EventKind.NODE_LOST,
                attempt=context.attempt.number,
                node=0,
                host=holder.host if holder else "",
                detail=str(error),
            )
    runtime.kill()
    runtime.drain(ORPHAN_DRAIN_S, lost=(0,), mirror=True)
    if not context.attempt.outcome.exists():
        job = Submission(
            job_id=context.job_id, executor=context.request.executor, submitted_at=time.time()
        )
        # If the controller does not answer, the supervisor cancels the job or its time limit ends
        # it.
        with contextlib.suppress(SchedulerError):
            executor_for(context.request.executor).cancel(context.request, job)
