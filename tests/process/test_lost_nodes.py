"""An attempt of several nodes loses some of them, and continues in the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process.local_runs import LocalRun, wait_until
from tests.support.agent_ranks import waiting_ranks
from tests.support.played_nodes import PlayedJob, tensors_at

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.states import AttemptState, Cause

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

STEPS = 120
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "sleep_s": 0.05,
    "noise": 0.1,
    "checkpoint": {"interval": 20, "snapshots": "off"},
}


def events(job: PlayedJob, kind: EventKind) -> list[Event]:
    found = [e for path in job.run.paths.list_journals() for e in read_journal(path)[0]]
    return [event for event in found if event.kind is kind]


def launches(job: PlayedJob) -> list[dict[str, Any]]:
    return [event.data for event in events(job, EventKind.LAUNCH_STARTED)]


def ranks_of(job: PlayedJob, launch: int) -> dict[int, int] | None:
    """The process of each node's rank by node, once all train."""
    beats = [beat for beat in job.run.beats(job.attempt) if beat.launch == launch]
    found = {b.node: rank.pid for b in beats for rank in b.ranks if rank.phase == "train"}
    return found if len(found) == job.run.spec.resources.nodes else None


def uninterrupted(folder: Path, ranks: int, **settings: Any) -> LocalRun:
    """A run of as many ranks that loses nothing."""
    run = LocalRun(folder / "whole", gpus=ranks, **{**SETTINGS, "sleep_s": 0.0, **settings})
    run.submit()
    assert run.wait_for_end().state is AttemptState.COMPLETED
    return run


def assert_equal_bits(one: LocalRun, other: LocalRun, step: int) -> None:
    first, second = tensors_at(one, step), tensors_at(other, step)
    assert first.keys() == second.keys()
    # The program does not seed these generators.
    seeded = [name for name in first if not name.endswith((".python", ".numpy"))]
    assert [name for name in seeded if not torch.equal(first[name], second[name])] == []


def test_a_spare_node_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    with PlayedJob(tmp_path, nodes=2, spares=1, **SETTINGS) as job:
        job.run.wait_for_step(job.attempt, 30)
        job.kill_node(1)
        assert (job.wait(0), job.wait(2)) == (0, 0)
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one.ending for one in outcome.launches] == ["crashed", "completed"]
    assert outcome.launches[0].cause is Cause.NODE_FAILURE
    assert (outcome.world_size, outcome.hosts) == (2, ("n0", "n2", "n1"))
    first, second = launches(job)
    assert (first["world_size"], second["world_size"]) == (2, 2)
    assert (second["way"], second["lost"], second["joined"]) == ("spare", ["n1"], ["n2"])
    (used,) = events(job, EventKind.PROTECTION)
    assert (used.data["launch"], used.data["lacks"]) == (2, "spares")
    assert used.data["unprotected"] == "no spare node is left; lost or left: n1"
    assert_equal_bits(job.run, uninterrupted(tmp_path, 2), STEPS)


def test_the_ranks_that_continue_were_loaded_while_they_waited(tmp_path: Path) -> None:
    settings = {**SETTINGS, "steps": 100_000, "supervision": {"standby_after_s": 0}}
    with PlayedJob(tmp_path, nodes=2, spares=1, **settings) as job:
        job.run.wait_for_step(job.attempt, 30)
        standbys = wait_until(lambda: waiting_ranks(job.run, count=3), "a standby on each node")
        job.kill_node(0)
        found = wait_until(lambda: ranks_of(job, 2), "the ranks of the second launch")
    assert found.keys() == {1, 2}, "the node that is left, and the spare one"
    assert set(found.values()) < standbys


def test_an_elastic_run_continues_on_fewer_nodes(tmp_path: Path) -> None:
    elastic = {"choices": [1, 2, 4]}
    with PlayedJob(tmp_path, nodes=4, elastic=elastic, **SETTINGS) as job:
        job.run.wait_for_step(job.attempt, 30)
        job.kill_node(2)
        assert [job.wait(node) for node in (0, 1, 3)] == [0, 0, 0]
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert (outcome.world_size, outcome.hosts) == (2, ("n0", "n1", "n2", "n3"))
    _, second = launches(job)
    assert (second["way"], second["lost"], second["world_size"]) == ("shrink", ["n2"], 2)


def test_a_run_of_one_size_ends_with_its_node(tmp_path: Path) -> None:
    elastic = {"min_gpus": 2, "max_gpus": 2}
    with PlayedJob(tmp_path, nodes=2, elastic=elastic, **SETTINGS) as job:
        job.run.wait_for_step(job.attempt, 5)
        job.kill_node(1)
        assert job.wait(0) == 0
    outcome = job.run.outcome(job.attempt)
    assert outcome.cause is Cause.NODE_FAILURE
    assert "no size of elastic fits 1 node" in outcome.evidence[-1]


def test_a_lost_spare_node_ends_nothing(tmp_path: Path) -> None:
    with PlayedJob(tmp_path, nodes=2, spares=1, **SETTINGS) as job:
        job.run.wait_for_step(job.attempt, 5)
        job.kill_node(2)
        assert (job.wait(0), job.wait(1)) == (0, 0)
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, len(outcome.launches)) == (AttemptState.COMPLETED, 1)
    (lost,) = events(job, EventKind.NODE_LOST)
    assert (lost.data["host"], lost.data["is_spare"]) == ("n2", True)


@pytest.mark.parametrize("spares", [0, 1])
def test_another_node_leads_when_node_0_is_lost(tmp_path: Path, spares: int) -> None:
    elastic = {"choices": [1, 2]}
    with PlayedJob(tmp_path, nodes=2, spares=spares, elastic=elastic, **SETTINGS) as job:
        job.run.wait_for_step(job.attempt, 30)
        job.kill_node(0)
        assert [job.wait(node) for node in range(1, 2 + spares)] == [0] * (1 + spares)
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert (outcome.world_size, outcome.hosts[0]) == (1 + spares, "n1")
    assert [one.ending for one in outcome.launches] == ["crashed", "completed"]
    _, second = launches(job)
    assert (second["way"], second["lost"]) == ("spare" if spares else "shrink", ["n0"])
    if spares:
        assert_equal_bits(job.run, uninterrupted(tmp_path, 2), STEPS)


@pytest.mark.parametrize("is_later", [False, True])
def test_two_spare_nodes_replace_two_lost_ones(tmp_path: Path, is_later: bool) -> None:
    """Both are lost at once, or the second right after the first, while the others restart."""
    with PlayedJob(tmp_path, nodes=3, spares=2, batch=6, **SETTINGS) as job:
        job.run.wait_for_step(job.attempt, 30)
        job.kill_node(1)
        if is_later:
            wait_until(lambda: events(job, EventKind.LAUNCH_ENDED), "the end of the launch")
        job.kill_node(2)
        assert [job.wait(node) for node in (0, 3, 4)] == [0, 0, 0]
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    begun = launches(job)[1:]
    # Which of them is noticed first depends on the load. They may be left in one step or in two.
    assert sorted(name for one in begun for name in one["lost"]) == ["n1", "n2"]
    assert {one["world_size"] for one in begun} == {3}
    assert_equal_bits(job.run, uninterrupted(tmp_path, 3, batch=6), STEPS)
