"""Node 0 has pairs of nodes run the all-reduce, and finds the bad ones. The nodes are simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.runs import RunFolder
from tests.unit.test_workers_lead import FakeNode, played

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.spec.sections import Health
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.health.checks import ALLREDUCE, HealthFinding
from holdfast.workers.agent.lead import Lead
from holdfast.workers.agent.leading import build_outcome
from holdfast.workers.agent.node import NodeReport
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox


class CheckedNode(FakeNode):
    """A node that runs no program: its all-reduce fails if it or its partner is bad.

    `fabric` has the nodes of each meeting, by the meeting's file.
    """

    def __init__(self, name: str, bad: set[str], fabric: dict[str, set[str]]) -> None:
        super().__init__(name, {})
        self._bad, self._fabric = bad, fabric
        self.asked: list[tuple[str, ...]] = []
        self._round = 0
        self._checks: tuple[str, ...] = ()
        self._meeting: Any = None

    def check_health(self, checks: Any, round_: int, meeting: Any) -> None:
        self.asked.append(tuple(checks))
        self._round, self._checks, self._meeting = round_, tuple(checks), meeting
        if meeting is not None:
            self._fabric.setdefault(meeting["file"], set()).add(self.name)

    def report(self) -> NodeReport:
        return dataclasses.replace(super().report(), health=self._finding())

    def _finding(self) -> HealthFinding | None:
        if self._round == 0:
            return None
        if self._meeting is None:
            problem = "no link" if "broken" in self.name else ""
            return HealthFinding(round=self._round, check=self._checks[0], problem=problem)
        members = self._fabric[self._meeting["file"]]
        if len(members) < self._meeting["nodes"]:
            return None
        problem = "timed out" if members & self._bad else ""
        return HealthFinding(round=self._round, check=ALLREDUCE, problem=problem)


def lead_with(
    folder: Path, names: Sequence[str], bad: set[str], checks: Sequence[str] = (ALLREDUCE,)
) -> tuple[Any, list[CheckedNode], list[Event]]:
    """Run an attempt of these nodes; return its outcome, the nodes and node 0's journal."""
    attempt = RunFolder(folder, "quick", "1" * 32).submit(1, 1, 0.0)
    given = load_context(attempt.request)
    request = given.request.model_copy(update={"health": Health(before=tuple(checks))})
    context = dataclasses.replace(given, nodes=len(names), request=request)
    fabric: dict[str, set[str]] = {}
    here, *others = nodes = [CheckedNode(name, bad, fabric) for name in names]
    with (
        played(attempt.channel, others) as (host, _),
        JournalWriter(attempt.node_journal(0)) as journal,
    ):
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, here), host)
        lead.run()
        outcome = build_outcome(lead)
        lead.close()
    assert not attempt.health.exists()
    return outcome, nodes, read_journal(attempt.node_journal(0))[0]


def unhealthy(events: list[Event]) -> list[str]:
    return [str(e.data["host"]) for e in events if e.kind is EventKind.NODE_UNHEALTHY]


@pytest.mark.more
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", [{"n3"}, {"n0"}, {"n1", "n2"}])
def test_the_bad_node_of_a_failed_pair_is_found(tmp_path: Path, bad: set[str]) -> None:
    names = [f"n{number}" for number in range(6)]
    outcome, _, events = lead_with(tmp_path, names, bad)
    assert (outcome.state, outcome.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert set(outcome.unhealthy_hosts) == bad
    assert sorted(unhealthy(events)) == sorted(bad)
    assert not any(event.kind is EventKind.LAUNCH_STARTED for event in events)
    for event in events:
        if event.kind is EventKind.NODE_UNHEALTHY:
            assert event.data["check"] == ALLREDUCE
            assert "the all-reduce with" in str(event.data["detail"])
            assert "failed: timed out" in str(event.data["detail"])


@pytest.mark.timeout(60)
def test_healthy_nodes_train(tmp_path: Path) -> None:
    outcome, nodes, events = lead_with(
        tmp_path, ["n0", "n1", "n2"], set(), ["true", ALLREDUCE, "false"]
    )
    assert outcome.unhealthy_hosts == ()
    assert unhealthy(events) == []
    assert any(event.kind is EventKind.LAUNCH_STARTED for event in events)
    # The nodes' own checks come first, on all nodes. With three nodes, one waits in each round.
    assert [node.asked[0] for node in nodes] == [("true", "false")] * 3
    assert sum(len(node.asked) for node in nodes) == 3 + 4


@pytest.mark.timeout(60)
def test_no_pairs_are_tested_after_a_node_failed_its_own_check(tmp_path: Path) -> None:
    names = ["n0", "n1", "broken"]
    outcome, nodes, _ = lead_with(tmp_path, names, {"n1"}, ["true", ALLREDUCE])
    assert outcome.unhealthy_hosts == ("broken",)
    assert [node.asked for node in nodes] == [[("true",)]] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [2, 4])
def test_an_all_reduce_that_fails_everywhere_excludes_nobody(tmp_path: Path, count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    outcome, nodes, _ = lead_with(tmp_path, names, set(names))
    assert (outcome.cause, outcome.unhealthy_hosts) == (Cause.USER_ERROR, ())
    assert f"'allreduce' failed on all {count} nodes" in outcome.evidence[0]
    assert [len(node.asked) for node in nodes] == [1] * count
