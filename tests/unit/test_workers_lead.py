"""The agent of node 0 with simulated other nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from tests.runs import RunFolder

from holdfast.contracts.channel import ChannelHost, ChannelMember, Peer
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.rank_status import Proposal
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.crew import AGREE_WAIT_S, Crew
from holdfast.workers.agent.lead import Lead
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.agent.nodes import RemoteNode
from holdfast.workers.agent.outcome import build_outcome, judge_ending
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.signals import SignalBox

STEPS_GAINED = 7
LOOKS = 3
WAIT_S = 30.0


class FakeNode:
    """A node with one rank that trains for some reports, then ends with the launch's exit code."""

    step_s = 1.0

    def __init__(self, name: str, ends: dict[int, int]) -> None:
        self.name, self._ends = name, ends
        self._launch, self._looks, self._killed = 0, 0, False

    def start(self, launch: int, address: str, port: int) -> None:
        self._launch, self._looks, self._killed = launch, 0, False

    def report(self) -> NodeReport:
        self._looks += 1
        ends = self._looks > LOOKS
        code = self._ends.get(self._launch, 0) if ends else None
        return NodeReport(
            exit_code=137 if self._killed and not ends else code,
            phases=("TRAIN",),
            registered=1,
            alive=1,
            completed=STEPS_GAINED * self._launch,
            resumed=STEPS_GAINED * (self._launch - 1),
        )

    def kill(self) -> None:
        self._killed = True

    def prepare(self, launch: int, address: str, port: int) -> None:
        raise AssertionError("a launch as short as this prepares no standby")

    def drain(self, timeout_s: float, lost: Any = (), *, mirror: bool = False) -> bool:
        return True

    def crash_report(self) -> CrashReport:
        return CrashReport()


class FakePeer:
    """The connection to another node's agent."""

    waiting_s = 0.0

    def __init__(self, node: FakeNode) -> None:
        self.hello = {"node": 1, "host": node.name}
        self._node = node

    def call(self, what: str, timeout_s: float = 0.0, **given: Any) -> Any:
        if what == "report":
            return self._node.report().to_json()
        if what == "crash_report":
            return self._node.crash_report().to_json()
        if what == "start":
            return self._node.start(**given)
        return self._node.kill() if what == "kill" else {"done": True}


@dataclasses.dataclass
class FakeHost:
    """A channel host with agents that have already joined."""

    peers: dict[int, FakePeer]

    def wait_for_peers(self, timeout_s: float, *, is_over: Any) -> None:
        """All peers have joined."""


@pytest.mark.timeout(60)
def test_a_node_report_from_before_a_restart_does_not_end_the_next_launch(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=2)
    here, there = (FakeNode(name, {1: 1, 2: 0}) for name in ("n0", "n1"))
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(
            context,
            SignalBox(),
            journal,
            cast(NodeRuntime, here),
            cast(ChannelHost, FakeHost({1: FakePeer(there)})),
        )
        # The last report of the other node is from just before the restart.
        lead.run()
        lead.close()
    assert [one.ending for one in lead.launches] == ["crashed", "completed"]


class SteadyNode(FakeNode):
    """A node whose rank trains until it learns at which step to stop."""

    def __init__(self, name: str) -> None:
        super().__init__(name, {})
        self.announced: list[float | None] = []
        self._leaves = False

    def report(self) -> NodeReport:
        code = 137 if self._killed else 0 if self._leaves else None
        return NodeReport(
            exit_code=code,
            phases=("STOP" if self._leaves else "TRAIN",),
            registered=1,
            alive=0 if self._leaves else 1,
            completed=5,
            resumed=0,
            entered=5,
        )

    def announce(self, deadline: float | None) -> None:
        self.announced.append(deadline)

    def newest_entered(self) -> int:
        return 5

    def propose(self, serial: int, step: int) -> bool:
        return True

    def answer(self, serial: int, state: Proposal) -> None:
        self._leaves = self._leaves or state is Proposal.GO

    def prepare(self, launch: int, address: str, port: int) -> None:
        """No standby."""


class MemberAgent:
    """Another node's agent over a real channel; silent after `silent_after` answers."""

    def __init__(self, path: Path, node: SteadyNode, number: int, silent_after: float) -> None:
        self.silent_after, self.answers_again = silent_after, threading.Event()
        self._node, self._member = node, ChannelMember(path, {"node": number, "host": node.name})
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self.answers_again.set()
        self._thread.join(WAIT_S)
        self._member.close()

    def _serve(self) -> None:
        with contextlib.suppress(ConnectionError):
            while not self._is_over.is_set():
                question = self._member.receive(0.05)
                if question is None:
                    continue
                if self.silent_after <= 0:
                    self.answers_again.wait(WAIT_S)
                self.silent_after -= 1
                self._member.reply(**self._answer(question))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        kind = question["kind"]
        if kind == "report":
            return self._node.report().to_json()
        if kind == "crash_report":
            return self._node.crash_report().to_json()
        if kind == "newest":
            return {"step": self._node.newest_entered()}
        if kind == "propose":
            return {"accepted": True}
        if kind == "answer":
            self._node.answer(1, Proposal(question["state"]))
        if kind == "kill":
            self._node.kill()
        return {"done": True}


@contextlib.contextmanager
def running_lead(
    folder: Path, silent_after: Sequence[float], grace_s: float
) -> Iterator[tuple[Lead, list[MemberAgent], Callable[[], None], Callable[[], list[Event]]]]:
    """Yield a lead in a thread, its members, a function to signal it, and its journal."""
    run = RunFolder(folder, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    given = load_context(attempt.request)
    supervision = given.request.supervision.model_copy(update={"grace_s": grace_s, "hangs": False})
    nodes = len(silent_after) + 1
    request = given.request.model_copy(update={"supervision": supervision, "world_size": nodes})
    context = dataclasses.replace(given, nodes=nodes, request=request)
    host, signals = ChannelHost(attempt.channel, nodes), SignalBox()
    members = [
        MemberAgent(attempt.channel, SteadyNode(f"n{i}"), i, after)
        for i, after in enumerate(silent_after, 1)
    ]
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(context, signals, journal, cast(NodeRuntime, SteadyNode("n0")), host)
        thread = threading.Thread(target=lead.run, daemon=True)
        thread.start()
        yield (
            lead,
            members,
            lambda: void(os.write(signals._write, bytes([signal.SIGTERM]))),
            lambda: read_journal(attempt.node_journal(0))[0],
        )
        thread.join(WAIT_S)
        assert not thread.is_alive()
        lead.close()
    for member in members:
        member.close()
    host.close()


def void(_: object) -> None:
    """For a lambda that returns nothing."""


def wait_for(kind: EventKind, events: Callable[[], list[Event]], timeout_s: float) -> float:
    """Seconds until the journal has a line of this kind."""
    began = time.monotonic()
    while not any(event.kind is kind for event in events()):
        assert time.monotonic() - began < timeout_s, [e.kind for e in events()]
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.timeout(60)
def test_a_signal_is_handled_in_time_while_a_node_is_silent(
    tmp_path: Path,
) -> None:
    # It answers `start` and its first reports, and then becomes silent.
    with running_lead(tmp_path, [4], grace_s=4.0) as (lead, members, send_signal, events):
        wait_for(EventKind.LAUNCH_STARTED, events, WAIT_S)
        while members[0].silent_after > 0:
            time.sleep(0.02)
        time.sleep(0.5)
        sent_at = time.time()
        send_signal()
        assert wait_for(EventKind.SIGNAL, events, WAIT_S) < 1.0
    assert time.time() - sent_at < 4.0
    assert [one.ending for one in lead.launches] == ["killed"]
    assert lead.stop_request is not None
    assert judge_ending(lead)[0].cause is Cause.PREEMPTION


@pytest.mark.timeout(60)
def test_a_silent_node_that_answers_in_time_stops_with_the_others(tmp_path: Path) -> None:
    with running_lead(tmp_path, [math.inf, 6], grace_s=30.0) as (
        lead,
        members,
        send_signal,
        events,
    ):
        wait_for(EventKind.LAUNCH_STARTED, events, WAIT_S)
        while members[1].silent_after > 0:
            time.sleep(0.02)
        send_signal()
        # The proposal is aborted meanwhile, and no rank keeps waiting for it.
        assert wait_for(EventKind.STOP_FAILED, events, WAIT_S) < AGREE_WAIT_S + 2
        members[1].answers_again.set()
        members[1].silent_after = math.inf
        wait_for(EventKind.STOP_AGREED, events, WAIT_S)
    assert [one.ending for one in lead.launches] == ["left"] or lead.group.lost == []
    assert [one.ending for one in lead.launches][-1] in {"stopped", "left"}


@pytest.mark.timeout(60)
def test_a_signal_ends_the_wait_for_nodes_that_do_not_join(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=3)
    host, signals = ChannelHost(attempt.channel, 3), SignalBox()
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(context, signals, journal, cast(NodeRuntime, SteadyNode("n0")), host)
        os.write(signals._write, bytes([signal.SIGTERM]))
        lead.run()
        outcome = build_outcome(lead)
        lead.close()
    host.close()
    assert (outcome.state, outcome.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert outcome.launches == ()


@pytest.mark.timeout(20)
def test_the_join_timeout_of_the_spec_limits_the_wait_for_nodes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32, {"supervision": {"join_timeout_s": 0.3}})
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=2)
    host = ChannelHost(attempt.channel, 2)
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, SteadyNode("n0")), host)
        began = time.monotonic()
        with pytest.raises(AgreementError):
            lead.run()
        assert 0.3 <= time.monotonic() - began < 10.0
        lead.close()
    host.close()


class SlowDrain(FakeNode):
    """A node whose flusher finishes only after all other nodes have been asked too."""

    def __init__(self, name: str, everybody: threading.Barrier) -> None:
        super().__init__(name, {})
        self._everybody = everybody

    def drain(self, timeout_s: float, lost: Any = (), *, mirror: bool = False) -> bool:
        time.sleep(0.3)
        self._everybody.wait(5.0)
        return True


class SlowPeer(FakePeer):
    """The connection to a node whose agent drains slowly."""

    def __init__(self, node: SlowDrain) -> None:
        super().__init__(node)
        self._slow = node

    def call(self, what: str, timeout_s: float = 0.0, **given: Any) -> Any:
        if what == "drain":
            return {"done": self._slow.drain(given["drain_s"])}
        return super().call(what, timeout_s, **given)


@pytest.mark.timeout(60)
def test_slow_nodes_are_drained_in_parallel(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=4)
    everybody = threading.Barrier(4)
    here, *there = (SlowDrain(f"n{i}", everybody) for i in range(4))
    peers: dict[int, FakePeer] = {i: SlowPeer(node) for i, node in enumerate(there, 1)}
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(
            context,
            SignalBox(),
            journal,
            cast(NodeRuntime, here),
            cast(ChannelHost, FakeHost(peers)),
        )
        lead.run()
        lead.close()
    assert [one.ending for one in lead.launches] == ["completed"]
    assert not everybody.broken
    assert lead.group.lost == []


class BusyPeer(FakePeer):
    """The connection to a node whose agent answers only when the test lets it."""

    def __init__(self, node: FakeNode) -> None:
        super().__init__(node)
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def call(self, what: str, timeout_s: float = 0.0, **given: Any) -> Any:
        self.asked.set()
        assert self.may_answer.wait(WAIT_S)
        return {}


@pytest.mark.timeout(20)
def test_a_warm_standby_is_requested_without_waiting_for_it() -> None:
    crew, peers = Crew(3), [BusyPeer(FakeNode(f"n{i}", {})) for i in (1, 2)]
    for peer in peers:
        node = RemoteNode(cast(Peer, peer), crew.post)
        node.prepare(2, "127.0.0.1", 1)
        assert not peer.may_answer.is_set()
    assert all(peer.asked.wait(WAIT_S) for peer in peers)
    for peer in peers:
        peer.may_answer.set()
    crew.close()


@pytest.mark.timeout(60)
def test_nodes_are_asked_in_parallel(tmp_path: Path) -> None:
    crew = Crew(65)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="n7"):
        crew.agree([f"n{i}" for i in range(65)], partial(answer_slowly, lost={"n7"}))
    assert crew.agree(["a", "b"], partial(answer_slowly, lost=set())) == ["A", "B"]
    assert time.monotonic() - began < 64 * 0.1
    crew.close()


def answer_slowly(name: str, lost: set[str]) -> str:
    time.sleep(0.2)
    if name in lost:
        raise ConnectionError(name)
    return name.upper()


def test_an_agent_raises_its_descriptor_limit_to_the_maximum() -> None:
    code = (
        "import resource as r; from holdfast.workers.agent.main import _raise_descriptor_limit;"
        "most = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, most));"
        "_raise_descriptor_limit(); print(r.getrlimit(r.RLIMIT_NOFILE) == (most, most))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
