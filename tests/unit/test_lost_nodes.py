"""Lost nodes: on how many nodes an attempt continues, and which node leads it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.records.documents import LaunchRecord, newest_term
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent import losses, node_group, succession
from holdfast.workers.agent.context import AgentContext, NodePlace, load_context
from holdfast.workers.agent.lead import Ended, Lead
from holdfast.workers.agent.losses import (
    events_of_leads,
    gone_numbers,
    left_of_launch,
    lost_of_launch,
    stop_of,
)
from holdfast.workers.agent.node import CrashReport
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.stops.departure import Departure, SlowNodes
from holdfast.workers.agent.succession import (
    StillLeadsError,
    SupersededError,
    begin_term,
    leads,
    next_lead,
    renew,
    step_back,
    take_term,
)
from holdfast.workers.decisions.causes import Ending
from holdfast.workers.decisions.drained_nodes import DrainPlan, plan_nodes
from holdfast.workers.decisions.growth import observe_capacity
from holdfast.workers.decisions.policy import fits_any
from holdfast.workers.decisions.sizes import without_spares
from holdfast.workers.nodes.heartbeats import HeartbeatWriter

FOUR: dict[str, Any] = {"executor": "slurm", "nodes": 4, "gpus_per_node": 8}


def spec(elastic: dict[str, Any] | None = None, **resources: Any) -> RunSpec:
    return spec_of(resources={**FOUR, **resources}, elastic=elastic or {})


@pytest.mark.parametrize(
    ("elastic", "lost", "spares", "expected"),
    [
        # A spare node comes before any other size.
        ({}, ["n2"], 1, ("spare", 4)),
        ({"min_gpus": 8}, ["n2", "n3"], 2, ("spare", 4)),
        # Spare nodes that are too few fill up a smaller size.
        ({"min_gpus": 8}, ["n2", "n3"], 1, ("shrink", 3)),
        ({"choices": [8, 16, 32]}, ["n2"], 0, ("shrink", 2)),
        ({"choices": [8, 16, 32]}, ["n1", "n2", "n3"], 0, ("shrink", 1)),
        # A run of one size, and sizes that need more than is left.
        ({}, ["n2"], 0, ("", 0)),
        ({"min_gpus": 32, "max_gpus": 32}, ["n2"], 0, ("", 0)),
        ({"choices": [24, 32]}, ["n2", "n3"], 0, ("", 0)),
        # A part of a node is no size for a launch on whole nodes.
        ({"choices": [4, 32]}, ["n1", "n2", "n3"], 0, ("", 0)),
    ],
)
def test_an_attempt_continues_on_spares_or_on_the_next_smaller_size(
    elastic: dict[str, Any], lost: list[str], spares: int, expected: tuple[str, int]
) -> None:
    plan = plan_nodes(
        spec(elastic), nodes=4, lost=lost, spares=spares, restarts_max=3, fits=fits_any
    )
    assert (plan.way, plan.nodes) == expected
    assert plan.reason.startswith(f"lost nodes: {', '.join(lost)}; ")


def test_a_size_that_the_checkpoint_does_not_fit_is_passed_over() -> None:
    given: dict[str, Any] = {"nodes": 4, "lost": ["n2"], "spares": 0, "restarts_max": 3}
    plan = plan_nodes(spec({"min_gpus": 8}), **given, fits=lambda gpus: gpus % 16 == 0)
    assert (plan.way, plan.nodes) == ("shrink", 2)
    plan = plan_nodes(spec({"min_gpus": 8}), **given, fits=lambda gpus: gpus == 32)
    assert plan.way == ""


def test_without_restarts_in_place_the_attempt_ends() -> None:
    plan = plan_nodes(spec(), nodes=4, lost=["n2"], spares=1, restarts_max=0, fits=fits_any)
    assert (plan.way, "restarts_in_place is 0" in plan.reason) == ("", True)


def test_spare_nodes_do_not_count_as_room_for_an_attempt() -> None:
    two = spec(spare_nodes=2)
    assert [without_spares(two, free) for free in (None, 48, 32, 16, 8, 4)] == [
        *(None, 32, 16),
        # An attempt on one node has no spare nodes.
        *(8, 8, 4),
    ]
    assert (two.gpus_held(32), two.gpus_held(8)) == (48, 8)


def test_an_attempt_that_shrank_may_grow_to_its_first_size() -> None:
    growing = spec({"min_gpus": 8, "grow": True, "grow_after_s": 10})
    attempt = attempt_of(growing, 1, None, gpus=32, state=AttemptState.RUNNING)
    assert observe(history_of(growing, attempt)) is None
    shrunk = Event(
        writer="node-0000",
        opening=1,
        sequence=0,
        time=NOW,
        kind=EventKind.LAUNCH_STARTED,
        data={"attempt": 1, "launch": 2, "nodes": 2, "way": "shrink"},
    )
    history = dataclasses.replace(history_of(growing, attempt), events=(shrunk,))
    assert observe(history) == 32


def observe(history: RunHistory) -> int | None:
    seen = observe_capacity(history, 32, None, now=NOW, fits=fits_any)
    return seen.gpus if seen is not None else None


@pytest.fixture
def nodes(tmp_path: Path) -> list[AgentContext]:
    """The contexts of three agents of one attempt."""
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 3, 0.0)
    given = load_context(attempt.request)
    supervision = given.request.supervision.model_copy(update={"heartbeat_s": 0.01})
    request = given.request.model_copy(update={"nodes": 3, "supervision": supervision})
    return [
        dataclasses.replace(given, node=node, nodes=3, host=f"n{node}", request=request)
        for node in range(3)
    ]


def runtime(node: int, *, term: int = 1, is_training: bool = True) -> Any:
    return SimpleNamespace(is_training=is_training, place=NodePlace(node=node, nodes=3, term=term))


def test_only_one_node_takes_a_term(nodes: list[AgentContext]) -> None:
    assert renew(nodes[0]) == 2
    found = next_lead(nodes[1], runtime(1, term=2), 0)
    assert found is not None
    assert (found.number, found.node, found.host) == (3, 1, "n1")
    # Node 0 was only believed to be lost: it neither starts a launch nor writes an outcome.
    for is_end in (False, True):
        with pytest.raises(SupersededError, match="another node leads it, so n0 leaves"):
            renew(nodes[0], is_end=is_end)
    followed = next_lead(nodes[2], runtime(2, term=2), 0)
    assert followed == found
    assert renew(nodes[1], is_end=True) == 4
    assert next_lead(nodes[2], runtime(2, term=3), 1) is None
    newest = newest_term(nodes[0].attempt)
    assert newest is not None
    assert newest.is_end


def test_a_term_that_is_being_written_does_not_count_yet(nodes: list[AgentContext]) -> None:
    attempt = nodes[0].attempt
    attempt.terms.mkdir()
    (attempt.terms / ".0002.json.1a2b").touch()
    assert newest_term(attempt) is None
    assert renew(nodes[0]) == 2
    (attempt.terms / ".0003.json.1a2b").touch()
    newest = newest_term(attempt)
    assert newest is not None
    assert newest.number == 2


@pytest.mark.parametrize("why", ["spare", "left out", "heartbeats"])
def test_a_node_that_a_launch_does_not_need_takes_no_term(
    nodes: list[AgentContext], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "FOLLOW_WAIT_S", 4.0)
    writer, now = HeartbeatWriter(nodes[0].attempt), [time.monotonic()]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if why == "heartbeats":
            writer.write([])

    played = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(succession, "time", played)
    if why == "left out":
        begin_term(nodes[0], renew(nodes[0]))
    if why == "heartbeats":
        with pytest.raises(StillLeadsError, match="node 0 still writes heartbeats"):
            next_lead(nodes[2], runtime(1), 0)
    else:
        assert next_lead(nodes[2], runtime(1, is_training=why != "spare"), 0) is None
    newest = newest_term(nodes[0].attempt)
    assert (newest.node if newest is not None else None) == (0 if why == "left out" else None)


def test_a_term_that_no_node_knew_of_hinders_no_other_node(
    nodes: list[AgentContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead took it to continue without lost nodes, and is lost before it told the others."""
    monkeypatch.setattr(succession, "TURN_S", 0.0)
    assert renew(nodes[0]) == 2
    found = next_lead(nodes[2], runtime(2), 0)
    assert found is not None
    assert (found.number, found.node) == (3, 2)
    # If it was only believed to be lost, it begins no launch.
    with pytest.raises(SupersededError, match="another node continues after term 2, so n0 leaves"):
        begin_term(nodes[0], 2)
    # The next lead is lost before it begins one, too. Node 1 knows neither of its term.
    found = next_lead(nodes[1], runtime(1), 2)
    assert found is not None
    assert (found.number, found.node) == (4, 1)
    for _ in range(2):
        begin_term(nodes[1], 4)
    assert next_lead(nodes[2], runtime(2), 0) == found


def test_a_node_takes_the_term_when_the_heartbeats_stop_late(
    nodes: list[AgentContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead is cut off from all others, and notices that later than they do."""
    writer, began, now = HeartbeatWriter(nodes[0].attempt), time.monotonic(), [time.monotonic()]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] < began + 20.0:
            writer.write([])

    played = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(succession, "time", played)
    found = next_lead(nodes[2], runtime(1), 0)
    assert found is not None
    assert (found.number, found.node) == (2, 2)
    assert now[0] - began > 20.0
    # The lead has stepped back, and returns without a wait.
    step_back(nodes[0], lambda: True)
    assert (leads(nodes[0]), leads(nodes[2])) == (False, True)


@pytest.mark.parametrize("why", ["taken", "cannot continue", "stop", "nobody"])
def test_a_lead_that_is_cut_off_waits_for_another(
    nodes: list[AgentContext], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    attempt, now = nodes[0].attempt, [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 10.0 and why == "taken":
            take_term(nodes[1], 2)
        elif now[0] > 10.0 and why == "cannot continue":
            attempt.terms.mkdir(exist_ok=True)
            attempt.term_end(1).touch()

    played = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(succession, "time", played)
    step_back(nodes[0], lambda: why == "stop" and now[0] > 10.0)
    assert now[0] == pytest.approx(succession.FOLLOW_WAIT_S if why == "nobody" else 10.2, abs=0.3)
    assert leads(nodes[0]) is (why != "taken")


def test_a_new_lead_knows_the_stop_that_the_lost_one_was_asked_for(
    nodes: list[AgentContext],
) -> None:
    attempt = nodes[0].attempt
    facts: dict[str, Any] = {"source": "signal", "cause": "preemption", "detail": "PREEMPTED"}
    with JournalWriter(attempt.node_journal(0)) as journal:
        assert stop_of(events_of_leads(attempt)) is None
        journal.append(EventKind.SIGNAL, name="SIGTERM", deadline=NOW + 30, **facts)
        journal.append(EventKind.SIGNAL, name="SIGUSR2", deadline=NOW + 20, **facts)
    found = stop_of(events_of_leads(attempt))
    assert found is not None
    assert (found.name, found.cause, found.deadline) == ("SIGTERM", Cause.PREEMPTION, NOW + 20)


@pytest.mark.parametrize(
    ("silent", "left", "spares", "expected"),
    [
        # All others have fallen silent: the lead is the one that is cut off.
        (["n1", "n2", "n3"], 0, "", True),
        # One of two: neither can tell.
        (["n1"], 0, "", False),
        (["n1"], 0, "a", False),
        (["n1"], 0, "ss", True),
        (["n1"], 0, "sa", False),
        (["n2", "n3"], 1, "", False),
    ],
)
def test_a_lead_is_cut_off_if_most_nodes_are_silent(
    silent: list[str],
    left: int,
    spares: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spares` has a letter for each spare node, which answers, or is silent."""
    monkeypatch.setattr(node_group, "AGREE_WAIT_S", 0.05)
    here: Any = SimpleNamespace(name="n0")
    nothing: Any = None
    group = NodeGroup(nothing, nothing, nothing, here)

    def node(name: str, *, answers: bool) -> Any:
        answer: Future[None] = Future()
        if answers:
            answer.set_result(None)
        return SimpleNamespace(name=name, report=lambda: answer)

    group._remotes = [node(f"n{7 + number}", answers=True) for number in range(left)]
    group.spares = [node(f"s{n}", answers=letter == "a") for n, letter in enumerate(spares)]
    group._silent = dict.fromkeys(silent, time.monotonic())
    assert group.is_cut_off() is expected
    # Nodes that were lost long before say nothing about the network now.
    group._silent = dict.fromkeys(silent, time.monotonic() - 2 * node_group.SILENT_TOGETHER_S)
    group.spares = []
    assert not group.is_cut_off()


def test_the_lost_nodes_of_a_launch_are_counted_by_those_that_are_left() -> None:
    def lost(host: str, **facts: object) -> Event:
        data = {"host": host, **facts}
        kind = EventKind.NODE_LOST
        return Event(writer="w", opening=0, sequence=0, time=NOW, kind=kind, data=data)

    events = [lost("n9", is_spare=True), lost("n0")]
    # A lead took over from n0, and was lost before its first launch.
    assert lost_of_launch(2, lead="n1", unjoined=[], events=events) == ["n1", "n0"]
    # A spare node that did not join is none of the launch.
    assert lost_of_launch(1, lead="n0", unjoined=["n5"], events=events) == ["n0"]
    assert lost_of_launch(2, lead="n0", unjoined=["n2", "n5"], events=events) == ["n0", "n2"]


class PlayedRemote:
    """Another node of a group, which ends on request."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.has_ended = number, f"n{number}", False

    def finish(self) -> Future[None]:
        self.has_ended = True
        answer: Future[None] = Future()
        answer.set_result(None)
        return answer


@pytest.mark.parametrize(
    ("leave", "lost", "drained", "joined"),
    [
        (("n1",), ["n2"], ["n1"], ["n4", "n5"]),
        # The drained node is the one that is lost.
        (("n1", "n3"), ["n1"], ["n3"], ["n4", "n5"]),
        (("n1",), ["n1"], [], ["n4"]),
    ],
)
def test_lost_nodes_are_told_from_those_that_are_left(
    nodes: list[AgentContext],
    monkeypatch: pytest.MonkeyPatch,
    leave: tuple[str, ...],
    lost: list[str],
    drained: list[str],
    joined: list[str],
) -> None:
    """A loss is noticed when the ranks have stopped to leave a drained node."""
    monkeypatch.setattr(losses, "_sizes", lambda run: (spec(spare_nodes=2), fits_any))
    context, ended = (
        nodes[0],
        Ended(ending="drained", exit_code=0, reports=(), crash_report=CrashReport()),
    )
    journal = JournalWriter(context.attempt.node_journal(0))
    here: Any = SimpleNamespace(name="n0")
    listener: Any = SimpleNamespace(stop_request=None)
    group = NodeGroup(context, journal, listener, here)
    remotes: list[Any] = [PlayedRemote(number) for number in range(1, 6)]
    group._remotes, group.spares, group.lost = remotes[:3], remotes[3:], lost
    lead = object.__new__(Lead)
    lead.context, lead.group, lead._journal, lead.nodes = context, group, journal, 4
    lead.launches, lead._change = [LaunchRecord(number=7, started_at=NOW, ended_at=NOW)], {}
    left: list[list[str]] = []
    lead.slow = cast(
        SlowNodes, SimpleNamespace(have_left=lambda hosts, *_, **__: left.append(hosts))
    )
    plan = DrainPlan(way="spare", nodes=4, leave=leave, why="bad DIMM")
    lead._departure = cast(Departure, SimpleNamespace(plan=plan))
    monkeypatch.setattr(Lead, "bad_ending", lambda *_: crashed_without(group.lost))
    assert lead._depart(ended)
    expected = {"way": "spare", "nodes": 4, "lost": lost, "joined": joined}
    assert lead._change == expected | (
        {"drained": drained, "reason": "bad DIMM"} if drained else {}
    )
    assert [one.name for one in remotes if one.has_ended] == drained
    assert left == [drained]
    noted = read_journal(context.attempt.node_journal(0))[0]
    assert gone_numbers(noted) == {int(host[1:]) for host in drained}
    assert left_of_launch(7, noted) == drained
    assert left_of_launch(6, noted) == []
    text = str(noted[-1].data["text"])
    assert text.startswith(f"spare after a loss: lost nodes: {lost[0]}; ")
    assert (f"nodes to leave: {', '.join(drained)}; " in text) is bool(drained)


def crashed_without(lost: Sequence[str]) -> tuple[Ending, None]:
    assert lost
    return Ending(state=AttemptState.NODE_FAILED, cause=Cause.NODE_FAILURE), None
