"""A node is cut off from the others, and lives on with the run's files.

Its connections are not closed, so the others learn of the cut by silence alone, as they do when a
node loses its power. Both sides can write to the run's folder, and each might take the other for
lost.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.process.local_runs import wait_until
from tests.process.test_lost_nodes import (
    SETTINGS,
    STEPS,
    assert_equal_bits,
    events,
    launches,
    uninterrupted,
)
from tests.support.networks import INTERFACE, network_of
from tests.support.played_nodes import PlayedJob

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.node.channel import CALL_TIMEOUT_S
from holdfast.contracts.records.documents import Term, read_document
from holdfast.contracts.states import AttemptState

pytestmark = [pytest.mark.more, pytest.mark.root, pytest.mark.timeout(600)]

# From the cut to the next launch, on a machine that is busy.
CONTINUED_S = CALL_TIMEOUT_S + 60.0
NET = {"network_interface": INTERFACE}


@pytest.mark.parametrize("cut", [1, 0], ids=["another node", "the lead"])
def test_the_attempt_continues_without_a_node_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    hurry = tmp_path / "hurry"
    settings = {**SETTINGS, "hurry": str(hurry), "launch": NET, "forks": False}
    with (
        network_of(3) as network,
        PlayedJob(tmp_path, nodes=2, spares=1, enter=network.enter, **settings) as job,
    ):
        job.run.wait_for_step(job.attempt, 30)
        network.cut(cut)
        began = time.monotonic()
        wait_until(lambda: len(launches(job)) > 1, "the next launch", CONTINUED_S)
        print(f"{time.monotonic() - began:.1f} s from the cut to the next launch")
        hurry.touch()
        left = {0, 1, 2} - {cut}
        assert [job.wait(node) for node in left] == [0, 0]
        outcome = job.run.outcome(job.attempt)
        # Its agent ends by itself, although it can reach nobody.
        assert job.wait(cut, 150.0) == 0
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    _, second = launches(job)
    assert (second["way"], second["lost"], second["world_size"]) == ("spare", [f"n{cut}"], 2)
    term = read_document(Term, job.attempt.term(2))
    assert term is not None
    assert term.node == (0 if cut else 1)
    assert len(events(job, EventKind.LAUNCH_STARTED)) == 2
    assert_equal_bits(job.run, uninterrupted(tmp_path, 2), STEPS)


def test_a_lead_and_a_node_that_lose_each_other_do_not_both_train(tmp_path: Path) -> None:
    """Neither can tell who is cut off. The lead continues, because nobody outnumbers it."""
    hurry = tmp_path / "hurry"
    settings = {**SETTINGS, "hurry": str(hurry), "launch": NET, "forks": False}
    with (
        network_of(2) as network,
        PlayedJob(
            tmp_path, nodes=2, elastic={"choices": [1, 2]}, enter=network.enter, **settings
        ) as job,
    ):
        job.run.wait_for_step(job.attempt, 30)
        network.cut(1)
        wait_until(lambda: len(launches(job)) > 1, "the next launch", CONTINUED_S)
        network.join(1)
        hurry.touch()
        assert job.wait(0) == 0
        outcome = job.run.outcome(job.attempt)
        assert job.wait(1, 150.0) == 0
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one["world_size"] for one in launches(job)] == [2, 1]
