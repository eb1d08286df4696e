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
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node.agreement import ask_together
from holdfast.contracts.node.channel import ChannelHost, ChannelMember
from holdfast.contracts.node.rank_status import Proposal
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.lead import Ended, Lead
from holdfast.workers.agent.leading import build_outcome, judge_ending
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.agent.node_group import AGREE_WAIT_S, RemoteNode
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.nodes.root_probe import RootProblem

STEPS_GAINED = 7
LOOKS = 3
WAIT_S = 30.0


class FakeNode:
    """A node with one rank that trains for some reports, then ends with the launch's exit code."""

    step_s = 1.0
    program = None

    def __init__(self, name: str, ends: dict[int, int]) -> None:
        self.name, self._ends = name, ends
        self.problems: list[RootProblem] = []
        self.wins_races = False
        self._launch, self._looks, self._killed = 0, 0, False

    def check_root(self, place: str, shared: str, token: str) -> list[RootProblem]:
        return self.problems

    def race(self, shared: str, number: int) -> bool:
        return self.wins_races

    def start(self, launch: int, address: str, port: int, *, is_alone: bool = False) -> None:
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

    def check_health(self, checks: Any, round_: int, meeting: Any) -> None:
        raise AssertionError("a run without checks asks for none")

    def prepare(self, launch: int, address: str, port: int) -> None:
        raise AssertionError("a launch as short as this prepares no standby")

    def drain(self, timeout_s: float, lost: Any = (), *, mirror: bool = False) -> bool:
        return True

    def crash_report(self) -> CrashReport:
        return CrashReport()

    def announce(self, deadline: float | None) -> None:
        """Nothing to stop."""

    def newest_entered(self) -> int:
        return 5

    def propose(self, serial: int, step: int) -> bool:
        return True

    def answer(self, serial: int, state: Proposal) -> None:
        """No rank waits."""


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

    def __init__(
        self, path: Path, node: FakeNode, number: int, silent_after: float = math.inf
    ) -> None:
        self.silent_after, self.answers_again = silent_after, threading.Event()
        self._node, self.member = node, ChannelMember(path, {"node": number, "host": node.name})
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self.answers_again.set()
        self._thread.join(WAIT_S)
        self.member.close()

    def _serve(self) -> None:
        with contextlib.suppress(ConnectionError):
            while not self._is_over.is_set():
                question = self.member.receive(0.05)
                if question is None:
                    continue
                if question["kind"] == "race":
                    self.silent_after += 1
                if self.silent_after <= 0:
                    self.answers_again.wait(WAIT_S)
                self.silent_after -= 1
                self.member.reply(**self._answer(question.pop("kind"), question))

    def _answer(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        node = self._node
        if kind == "root":
            return {"problems": [asdict(one) for one in node.check_root(**given)]}
        if kind == "race":
            return {"won": node.race(**given)}
        if kind == "report":
            return node.report().to_json()
        if kind == "crash_report":
            return node.crash_report().to_json()
        if kind == "newest":
            return {"step": node.newest_entered()}
        if kind == "propose":
            return {"accepted": node.propose(**given)}
        if kind == "answer":
            node.answer(given["serial"], Proposal(given["state"]))
        elif kind == "drain":
            return {"done": node.drain(given["drain_s"])}
        elif kind == "health":
            node.check_health(given["checks"], given["round"], given["meeting"])
        elif kind in {"start", "kill", "announce", "prepare"}:
            getattr(node, kind)(**given)
        return {}


@contextlib.contextmanager
def played(
    path: Path, nodes: Sequence[FakeNode]
) -> Iterator[tuple[ChannelHost, list[MemberAgent]]]:
    """A channel whose other nodes have all joined."""
    host = ChannelHost(path, len(nodes) + 1)
    members = [MemberAgent(path, node, number) for number, node in enumerate(nodes, 1)]
    host.wait_for_peers(WAIT_S)
    try:
        yield host, members
    finally:
        for member in members:
            member.close()
        host.close()


@pytest.mark.more
@pytest.mark.timeout(60)
def test_a_node_report_from_before_a_restart_does_not_end_the_next_launch(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=2)
    here, there = (FakeNode(name, {1: 1, 2: 0}) for name in ("n0", "n1"))
    with (
        played(attempt.channel, [there]) as (host, _),
        JournalWriter(attempt.node_journal(0)) as journal,
    ):
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, here), host)
        # The last report of the other node is from just before the restart.
        lead.run()
        lead.close()
    assert [one.ending for one in lead.launches] == ["crashed", "completed"]


def test_ranks_that_stop_without_a_request_end_for_an_unknown_cause(tmp_path: Path) -> None:
    class Leaver(FakeNode):
        def report(self) -> NodeReport:
            return dataclasses.replace(super().report(), phases=("STOP",))

    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    with JournalWriter(attempt.node_journal(0)) as journal:
        node = cast(NodeRuntime, Leaver("n0", {1: 0}))
        lead = Lead(load_context(attempt.request), SignalBox(), journal, node, None)
        lead.run()
        lead.close()
        ending, _ = judge_ending(lead)
    assert (ending.state, ending.cause) == (AttemptState.FAILED, Cause.UNKNOWN)
    assert "stopped early without a stop request" in ending.evidence[0]


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


@pytest.mark.more
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


@pytest.mark.more
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
    spec = {"resources": {"executor": "slurm"}, "supervision": {"join_timeout_s": 0.3}}
    run = RunFolder(tmp_path, "quick", "1" * 32, spec)
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


@pytest.mark.timeout(60)
def test_slow_nodes_are_drained_in_parallel(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=4)
    everybody = threading.Barrier(4)
    here, *there = (SlowDrain(f"n{i}", everybody) for i in range(4))
    with (
        played(attempt.channel, there) as (host, _),
        JournalWriter(attempt.node_journal(0)) as journal,
    ):
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, here), host)
        lead.run()
        lead.close()
    assert [one.ending for one in lead.launches] == ["completed"]
    assert not everybody.broken
    assert lead.group.lost == []


@pytest.mark.timeout(20)
def test_a_warm_standby_is_requested_without_waiting_for_it(tmp_path: Path) -> None:
    nodes = [StandbyNode(f"n{i}", {}) for i in (1, 2)]
    with played(tmp_path / "channel.json", nodes) as (host, _):
        for peer in host.peers.values():
            asked = RemoteNode(peer, lambda *_: None).prepare(2, "127.0.0.1", 1)
            assert not asked.done()
        assert all(node.was_asked.wait(WAIT_S) for node in nodes)
        for node in nodes:
            node.may_answer.set()


class StandbyNode(FakeNode):
    """A node that starts a standby only when the test lets it."""

    def __init__(self, name: str, ends: dict[int, int]) -> None:
        super().__init__(name, ends)
        self.was_asked, self.may_answer = threading.Event(), threading.Event()

    def prepare(self, launch: int, address: str, port: int) -> None:
        self.was_asked.set()
        assert self.may_answer.wait(WAIT_S)


class SlowNode(SteadyNode):
    """A node whose answer takes a while; a lost one closes the connection instead."""

    def newest_entered(self) -> int:
        time.sleep(0.2)
        return 5


@pytest.mark.more
@pytest.mark.timeout(60)
def test_nodes_are_asked_in_parallel(tmp_path: Path) -> None:
    with played(tmp_path / "channel.json", [SlowNode(f"n{i}") for i in range(64)]) as (host, all_):
        peers = list(host.peers.values())
        began = time.monotonic()
        assert ask_together(peers, lambda peer: peer.newest_entered()) == [5] * 64
        assert time.monotonic() - began < 64 * 0.1
        with pytest.raises(AgreementError, match=r"64 of 64 nodes did not answer within 0\.0 s"):
            ask_together(peers, lambda peer: peer.newest_entered(), wait_s=0.0)
        all_[7].member.close()
        with pytest.raises(ConnectionError, match="node 8 is lost"):
            ask_together(peers, lambda peer: peer.newest_entered())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "answer", [{}, {"step": "many"}, {"step": None}, {"step": 1, "answers": [1]}, {"step": [1]}]
)
def test_a_node_that_answers_garbage_is_lost_and_named(
    tmp_path: Path, answer: dict[str, Any]
) -> None:
    path = tmp_path / "channel.json"
    host, member = ChannelHost(path, 2), ChannelMember(path, {"node": 1, "host": "n1"})
    asked = host.peers[1].newest_entered()
    question = member.receive(WAIT_S)
    assert question == {"kind": "newest"}
    member.tell(**{"answers": 1, **answer})
    problem = "unhashable" if "answers" in answer else "its answer to newest cannot be read"
    with pytest.raises(ConnectionError, match=f"node 1 is lost: {problem}"):
        asked.result(WAIT_S)
    assert host.peers[1].is_lost
    member.close()
    host.close()


@pytest.mark.timeout(60)
def test_answers_twice_late_and_out_of_order_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host, member = ChannelHost(path, 2), ChannelMember(path, {"node": 1, "host": "n1"})
    asked = [host.peers[1].newest_entered() for _ in range(3)]
    for _ in range(3):
        assert member.receive(WAIT_S) == {"kind": "newest"}
    for number in (3, 1, 1, 99, 2, 3):
        member.tell(answers=number, step=number)
    assert [one.result(WAIT_S) for one in asked] == [1, 2, 3]
    assert not host.peers[1].is_lost
    member.close()
    host.close()


@pytest.mark.timeout(60)
def test_a_signal_to_another_node_reaches_node_0_at_once(tmp_path: Path) -> None:
    with running_lead(tmp_path, [math.inf], grace_s=30.0) as (_, members, _, events):
        wait_for(EventKind.LAUNCH_STARTED, events, WAIT_S)
        members[0].member.tell(signals=["SIGTERM"])
        assert wait_for(EventKind.SIGNAL, events, WAIT_S) < 2.0
        wait_for(EventKind.STOP_AGREED, events, WAIT_S)


@pytest.mark.more
def test_an_agent_raises_its_descriptor_limit_to_the_maximum() -> None:
    code = (
        "import resource as r; from holdfast.workers.agent.main import raise_descriptor_limit;"
        "most = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, most));"
        "raise_descriptor_limit(); print(r.getrlimit(r.RLIMIT_NOFILE) == (most, most))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_hangs_of_earlier_attempts_count_against_the_budget(tmp_path: Path) -> None:
    """Five hangs are allowed, so the sixth is not restarted in place."""
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    given = load_context(attempt.request)
    for before, may_restart in ((4, True), (5, False)):
        request = given.request.model_copy(update={"hangs_before": before})
        context = dataclasses.replace(given, request=request)
        with JournalWriter(attempt.node_journal(0)) as journal:
            node = cast(NodeRuntime, SteadyNode("n0"))
            lead = Lead(context, SignalBox(), journal, node, None)
            ended = Ended(
                ending="hung",
                exit_code=None,
                reports=(node.report(),),
                crash_report=CrashReport(),
                hang=("every rank is silent",),
            )
            lead.launches.append(ended.record(1, 0.0))
            assert lead._may_restart(ended) is may_restart
            assert lead.launches[-1].cause is Cause.HANG
            lead.close()
    assert "hung 6 times, 5 allowed" in lead.verdict
