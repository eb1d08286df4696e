"""A paired test meets a loss, a killed rank, a pause, a drain, a stop, a save or another size.

Each moment is held by a file that a rank waits for. Only the suspicion of the test is played.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, wait_until
from tests.process.test_drained_nodes import REASON, PlayedController
from tests.process.test_lost_nodes import (
    assert_equal_bits,
    events,
    launches,
    ranks_of,
    uninterrupted,
)
from tests.support.agent_ranks import committed
from tests.support.played_nodes import PlayedJob

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.documents import Outcome
from holdfast.contracts.states import AttemptState, Cause
from holdfast.trainer.ranks.paired_test import LINKS_S
from holdfast.workers.runs import operator

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

STEPS = 90
EVERY = 30
# With three nodes, a node's two links can be compared with the third one.
NODES = 3
END_S = 300.0
# A test is measured for less than this once nothing holds it, and the ranks then train on.
BOUND_S = 60.0
# Steps are suspiciously long in the first launch, while the file is there.
CUSTOMIZE = """
import os, sys
if "holdfast.workers.agent.main" in sys.orig_argv:
    from holdfast.workers.agent.watch import hangs
    from holdfast.workers.agent.watch.step_times import LongSteps

    def suspected(watch):
        is_now = watch._launch == 1 and os.path.exists({suspect!r})
        return (LongSteps(excess=0.5, all_wait=True), 0.0) if is_now else None

    hangs.HangWatch.long_steps = property(suspected, lambda watch, found: None)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """The run of as many ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    return uninterrupted(folder, NODES, steps=STEPS, batch=2 * NODES, checkpoint=saves())


def saves() -> dict[str, Any]:
    return {"interval": EVERY, "snapshots": "off"}


class TestedJob(PlayedJob):
    """An attempt on three nodes and a spare one, whose paired tests `suspect` starts."""

    __test__ = False

    def __init__(self, folder: Path, *, slowdown: str = "act", **settings: Any) -> None:
        self.holds, self._suspect = folder / "holds", folder / "suspect"
        self._hurry = folder / "hurry"
        customized = folder / "customized"
        for made in (self.holds, customized):
            made.mkdir()
        text = CUSTOMIZE.format(suspect=str(self._suspect))
        (customized / "sitecustomize.py").write_text(text)
        given = {"steps": STEPS, "sleep_s": 0.1, "noise": 0.1, "batch": 2 * NODES, **settings}
        super().__init__(
            folder,
            nodes=NODES,
            spares=1,
            enter=lambda node: ["env", f"PYTHONPATH={customized}"],
            program=Path(__file__).with_name("tested_program.py"),
            health={"slowdown": slowdown},
            checkpoint=saves(),
            holds=str(self.holds),
            hurry=str(self._hurry),
            **given,
        )

    def suspect(self) -> None:
        """Let node 0 ask for a test."""
        self._suspect.touch()

    def hold(self, place: str) -> None:
        (self.holds / place).touch()

    def wait_at(self, place: str, rank: int) -> None:
        """Wait until a rank is at a place that is held."""
        wait_until((self.holds / f"{place}.{rank}").exists, f"rank {rank} at {place}")

    def hold_test(self, place: str, rank: int) -> None:
        """Have a test asked for, and hold a rank in it."""
        self.hold(f"{place}-{rank}")
        self.run.wait_for_step(self.attempt, 5)
        self.suspect()
        self.wait_at(f"{place}-{rank}", rank)

    def release(self, place: str) -> None:
        (self.holds / place).unlink()

    def end(self, *lost: int) -> Outcome:
        """Let the attempt end on the nodes that are left."""
        self._hurry.touch()
        for node in range(len(self.agents)):
            if node not in lost:
                assert self.wait(node, END_S) == 0, f"node {node}"
        return self.run.outcome(self.attempt)

    def agreed_step(self) -> int:
        """The step after which the ranks agree to test, once they have agreed."""

        def look() -> list[str]:
            notes = [str(one.data["text"]) for one in events(self, EventKind.NOTE)]
            return [note for note in notes if note.endswith(": a test")]

        (text,) = wait_until(look, "the agreement on a test", BOUND_S)
        return int(text.split(":")[0].split()[-1])

    def hold_step_of_test(self, step: int) -> None:
        """Hold all ranks in a step, after which they have agreed to test."""
        self.hold(f"step-{step}")
        for rank in range(NODES):
            self.wait_at(f"step-{step}", rank)
        self.suspect()
        assert self.agreed_step() == step

    def tested_steps(self) -> list[int]:
        return [int(one.data["step"]) for one in events(self, EventKind.SLOWDOWN_TESTED)]


def assert_blames_nobody(job: TestedJob, outcome: Outcome) -> None:
    """No node or link was called slow, and later attempts exclude none."""
    assert events(job, EventKind.NODE_SLOW) == []
    assert events(job, EventKind.LINK_SLOW) == []
    assert outcome.unhealthy_hosts == ()


@pytest.mark.parametrize(
    ("lost", "place", "held"),
    [(1, "work", 1), (1, "links", 2), (0, "links", 1)],
    ids=["before the links", "in the links", "lead"],
)
def test_a_node_is_lost_in_a_test(
    tmp_path: Path, whole: LocalRun, lost: int, place: str, held: int
) -> None:
    with TestedJob(tmp_path) as job:
        job.hold_test(place, held)
        job.kill_node(lost)
        job.release(f"{place}-{held}")
        wait_until(lambda: ranks_of(job, 2), "the second launch", BOUND_S)
        outcome = job.end(lost)
        begun = launches(job)
        assert job.tested_steps() == [], "a test without all nodes has no results"
        assert_blames_nobody(job, outcome)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one.ending for one in outcome.launches] == ["crashed", "completed"]
    assert outcome.launches[0].cause is Cause.NODE_FAILURE
    assert (begun[1]["way"], begun[1]["lost"]) == ("spare", [f"n{lost}"])
    assert_equal_bits(job.run, whole, STEPS)


@pytest.mark.parametrize(("killed", "place", "held"), [(1, "work", 1), (0, "links", 2)])
def test_a_rank_is_killed_in_a_test(
    tmp_path: Path, whole: LocalRun, killed: int, place: str, held: int
) -> None:
    with TestedJob(tmp_path) as job:
        job.hold_test(place, held)
        ranks = ranks_of(job, 1)
        assert ranks is not None
        os.kill(ranks[killed], signal.SIGKILL)
        job.release(f"{place}-{held}")
        wait_until(lambda: ranks_of(job, 2), "the second launch", BOUND_S)
        outcome = job.end()
        ended = events(job, EventKind.LAUNCH_ENDED)[0].data
        assert job.tested_steps() == []
        assert_blames_nobody(job, outcome)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one.ending for one in outcome.launches] == ["crashed", "completed"]
    assert (ended["rank"], ended["rank_exit_code"]) == (killed, -signal.SIGKILL)
    assert "lost" not in launches(job)[1]
    assert_equal_bits(job.run, whole, STEPS)


def test_a_node_pauses_in_a_test(tmp_path: Path, whole: LocalRun) -> None:
    """Its links have no rates. Its processor may be found slow on a busy machine."""
    with TestedJob(tmp_path, slowdown="ask") as job:
        job.hold_test("links", 1)
        time.sleep(2 * LINKS_S)
        job.release("links-1")
        outcome = job.end()
        (tested,) = events(job, EventKind.SLOWDOWN_TESTED)
        found = [*events(job, EventKind.NODE_SLOW), *events(job, EventKind.LINK_SLOW)]
    assert tested.data["pair_rates"][:2] == [0.0, 0.0]
    assert tested.data["pair_rates"][2] > 0.0
    assert [text for one in found if " MB/s" in (text := str(one.data["text"]))] == []
    assert (outcome.state, len(outcome.launches)) == (AttemptState.COMPLETED, 1)
    assert_equal_bits(job.run, whole, STEPS)


def test_a_node_is_drained_in_a_test(
    tmp_path: Path, whole: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestedJob(tmp_path) as job:
        slurm = PlayedController(tmp_path / "slurm", job, monkeypatch)
        job.hold_test("work", 2)
        slurm.drain("n1")
        job.release("work-2")
        wait_until(lambda: ranks_of(job, 2), "the second launch", BOUND_S)
        outcome = job.end()
        begun, tested = launches(job)[1], job.tested_steps()
        assert_blames_nobody(job, outcome)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    first, second = outcome.launches
    assert (first.ending, second.ending) == ("drained", "completed")
    assert second.first_step == (first.last_step or 0) + 1, "steps were lost"
    assert (begun["way"], begun["drained"]) == ("spare", ["n1"])
    assert begun["reason"] == f"n1 ({REASON})"
    assert tested[0] <= (first.last_step or 0)
    assert_equal_bits(job.run, whole, STEPS)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TestedJob]:
    with TestedJob(tmp_path, grace_s=60.0) as made:
        yield made


def assert_stops_after(job: TestedJob, step: int, cause: Cause) -> Outcome:
    """The attempt ends after a step at or behind `step`, with a checkpoint of it."""
    began = time.monotonic()
    for node in range(NODES + 1):
        assert job.wait(node, BOUND_S) == 0
    assert time.monotonic() - began < BOUND_S
    outcome = job.run.outcome(job.attempt)
    assert (outcome.cause, len(launches(job))) == (cause, 1)
    (agreed,) = events(job, EventKind.STOP_AGREED)
    assert int(agreed.data["step"]) >= step
    assert outcome.last_step == outcome.committed_step == agreed.data["step"]
    assert job.tested_steps() == [step]
    assert_blames_nobody(job, outcome)
    return outcome


def assert_continues(job: TestedJob, whole: LocalRun, before: Outcome) -> None:
    """The next attempt continues after the last step, with the same bits."""
    job.start_attempt(2)
    outcome = job.end()
    assert outcome.first_step == (before.last_step or 0) + 1
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert_equal_bits(job.run, whole, STEPS)


@pytest.mark.parametrize("signalled", [0, 1], ids=["lead", "other"])
def test_a_preemption_comes_in_a_test(job: TestedJob, whole: LocalRun, signalled: int) -> None:
    job.hold_test("links", 1)
    job.agents[signalled].send_signal(signal.SIGTERM)
    wait_until(lambda: events(job, EventKind.SIGNAL), "the stop request")
    job.release("links-1")
    outcome = assert_stops_after(job, job.agreed_step(), Cause.PREEMPTION)
    assert outcome.state is AttemptState.PREEMPTED
    assert_continues(job, whole, outcome)


def test_a_preemption_comes_in_the_step_of_a_test(job: TestedJob, whole: LocalRun) -> None:
    """The test is agreed, and all ranks are still in its step when the stop is asked for."""
    job.hold_step_of_test(10)
    job.agents[1].send_signal(signal.SIGTERM)
    wait_until(lambda: events(job, EventKind.SIGNAL), "the stop request")
    job.release("step-10")
    outcome = assert_stops_after(job, 10, Cause.PREEMPTION)
    assert_continues(job, whole, outcome)


def test_a_save_is_due_at_the_step_of_a_test(tmp_path: Path, whole: LocalRun) -> None:
    with TestedJob(tmp_path, slowdown="ask") as job:
        job.hold_step_of_test(EVERY)
        job.release(f"step-{EVERY}")
        outcome = job.end()
        assert job.tested_steps() == [EVERY]
    assert (outcome.state, len(outcome.launches)) == (AttemptState.COMPLETED, 1)
    assert EVERY in committed(job.run)
    assert_equal_bits(job.run, whole, EVERY)
    assert_equal_bits(job.run, whole, STEPS)


def test_another_size_is_ordered_in_a_test(tmp_path: Path) -> None:
    with TestedJob(tmp_path, elastic={"choices": [2, 3]}) as job:
        job.hold_test("links", 2)
        operator.request(job.run.paths, "relaunch", by="tester", gpus=2)
        job.release("links-2")
        assert_stops_after(job, job.agreed_step(), Cause.OPERATOR)
