"""Node 0 refuses to train on a root that nodes cannot use, and names the nodes and the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest
from tests.support.runs import RunFolder
from tests.unit.test_workers_lead import FakeNode, MemberAgent, played

from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.errors import MissingNodesError
from holdfast.contracts.node.channel import ChannelHost
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.health.root_check import root_ending
from holdfast.workers.agent.lead import Lead
from holdfast.workers.agent.leading import build_outcome
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.nodes.root_probe import RACES, RootProblem


@pytest.mark.timeout(60)
def test_a_node_that_cannot_use_the_root_is_excluded_before_a_launch(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "quick", "1" * 32)
    attempt = run.submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=3)
    here, good, bad = (FakeNode(name, {}) for name in ("n0", "n1", "n2"))
    bad.problems = [RootProblem("writing", "/root/run (nfs4): files cannot be written there")]
    with (
        played(attempt.channel, [good, bad]) as (host, _),
        JournalWriter(attempt.node_journal(0)) as journal,
    ):
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, here), host)
        lead.run()
        outcome = build_outcome(lead)
        lead.close()
    assert (outcome.state, outcome.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert outcome.unhealthy_hosts == ("n2",)
    assert outcome.evidence[0].startswith("n2 cannot use the root /root/run (nfs4): files cannot")
    (event,) = read_journal(attempt.node_journal(0))[0]
    assert (event.kind, event.data["check"]) == (EventKind.NODE_UNHEALTHY, "root: writing")
    assert list(attempt.directory.glob(".probe.*")) == []


@pytest.mark.parametrize(
    ("lacks", "of", "cause", "excluded"),
    [
        ("hard links", (0, 1, 2), Cause.USER_ERROR, ()),
        ("hard links", (1, 2), Cause.NODE_FAILURE, ("n1", "n2")),
        ("locks between hosts", (1, 2), Cause.USER_ERROR, ()),
        ("locks between hosts", (2,), Cause.NODE_FAILURE, ("n2",)),
        ("exclusive names between hosts", (0,), Cause.USER_ERROR, ()),
        ("the same files", (1,), Cause.NODE_FAILURE, ("n1",)),
    ],
)
def test_what_no_node_can_do_is_the_fault_of_the_file_system(
    lacks: str, of: tuple[int, ...], cause: Cause, excluded: tuple[str, ...]
) -> None:
    ending, hosts = root_ending([(f"n{i}", RootProblem(lacks, "/r (x): …")) for i in of], 3)
    assert (ending.cause, hosts) == (cause, excluded)
    assert (lacks in ending.evidence[0]) is (cause is Cause.USER_ERROR)


def test_the_only_node_is_excluded_and_another_one_is_tried() -> None:
    found = [("n0", RootProblem("writing", "/r (nfs4): files cannot be written there"))]
    ending, hosts = root_ending(found, 1)
    assert (ending.cause, hosts) == (Cause.NODE_FAILURE, ("n0",))


@pytest.mark.more
@pytest.mark.timeout(60)
@pytest.mark.parametrize("joined", [1, 0])
def test_a_host_that_does_not_join_is_named_and_excluded(tmp_path: Path, joined: int) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    given = load_context(attempt.request)
    supervision = given.request.supervision.model_copy(update={"join_timeout_s": 1.0})
    request = given.request.model_copy(update={"supervision": supervision})
    hosts = ("n0", "n1", "n2")
    context = dataclasses.replace(given, nodes=3, request=request, hosts=hosts)
    host = ChannelHost(attempt.channel, 3)
    members = [MemberAgent(attempt.channel, FakeNode(f"n{i}", {}), i) for i in range(1, joined + 1)]
    with JournalWriter(attempt.node_journal(0)) as journal:
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, FakeNode("n0", {})), host)
        if joined:
            lead.run()
            outcome = build_outcome(lead)
            assert (outcome.cause, outcome.unhealthy_hosts) == (Cause.NODE_FAILURE, ("n2",))
            assert outcome.evidence[0].startswith("n2 did not join")
            assert [node.name for node in lead.group.nodes] == ["n0", "n1"]
        else:
            # Node 0 or the network may be at fault.
            with pytest.raises(MissingNodesError, match=r"nodes \[1, 2\] did not join within 1 s"):
                lead.run()
        lead.close()
    for member in members:
        member.close()
    host.close()


@pytest.mark.timeout(60)
def test_a_root_where_two_nodes_create_the_same_name_stops_the_run(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    context = dataclasses.replace(load_context(attempt.request), nodes=2)
    here, there = (FakeNode(name, {}) for name in ("n0", "n1"))
    here.wins_races = there.wins_races = True
    with (
        played(attempt.channel, [there]) as (host, _),
        JournalWriter(attempt.node_journal(0)) as journal,
    ):
        lead = Lead(context, SignalBox(), journal, cast(NodeRuntime, here), host)
        lead.run()
        outcome = build_outcome(lead)
        lead.close()
    assert (outcome.cause, outcome.unhealthy_hosts) == (Cause.USER_ERROR, ())
    assert "lacks exclusive names between hosts" in outcome.evidence[0]
    assert f"{RACES} times of {RACES}" in outcome.evidence[1]
