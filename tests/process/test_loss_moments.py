"""A node is lost at a moment at which its attempt does something else than train.

Each moment is held by a process that is stopped, and seen in the files of the run, so no test
depends on how fast this machine is.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.process.local_runs import LocalRun, wait_until
from tests.process.test_lost_nodes import events, launches, ranks_of, uninterrupted
from tests.support.played_nodes import PlayedJob, manifest_at, tensors_at

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints, read_manifest
from holdfast.contracts.disk.paths import PARTS, CheckpointName
from holdfast.contracts.records.documents import Outcome, newest_term
from holdfast.contracts.states import AttemptState, Cause
from holdfast.trainer.flusher.commit import part_name

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

STEPS = 120
EVERY = 20
# Ranks start slowly on a loaded machine.
END_S = 400.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """The run of two ranks that loses nothing."""
    return uninterrupted(tmp_path_factory.mktemp("whole"), 2)


@contextlib.contextmanager
def job_of(folder: Path, **settings: Any) -> Iterator[PlayedJob]:
    """Two nodes and two spare ones, which train quickly once the file `hurry` exists."""
    given = {"sleep_s": 0.1, "noise": 0.1, "hurry": str(folder / "hurry"), **settings}
    given = {"checkpoint": {"interval": EVERY, "snapshots": "off"}, "steps": STEPS, **given}
    with PlayedJob(folder, nodes=2, spares=2, **given) as job:
        job.run.wait_for_step(job.attempt, 5)
        yield job


def end(job: PlayedJob, folder: Path, *lost: int) -> Outcome:
    """Let the attempt end on the nodes that are left."""
    (folder / "hurry").touch()
    for node in range(len(job.agents)):
        if node not in lost:
            assert job.wait(node, END_S) == 0, f"node {node}"
    return job.run.outcome(job.attempt)


def assert_same(job: PlayedJob, whole: LocalRun, step: int = STEPS) -> None:
    """The run has the same bits after a step as the one that lost nothing."""
    ours, theirs = tensors_at(job.run, step), tensors_at(whole, step)
    assert ours.keys() == theirs.keys()
    # The program does not seed these generators.
    seeded = [name for name in ours if not name.endswith((".python", ".numpy"))]
    assert [name for name in seeded if not torch.equal(ours[name], theirs[name])] == []


def steps_lost(outcome: Outcome) -> list[int]:
    """The steps that each later launch trains again."""
    found = []
    for before, after in zip(outcome.launches, outcome.launches[1:], strict=False):
        assert after.first_step is not None
        found.append(max(0, (before.last_step or 0) - after.first_step + 1))
    return found


def parts_of(job: PlayedJob, node: int, is_there: Callable[[int], bool]) -> int | None:
    """A step of which a node has written its part, and that is not committed."""
    for folder in sorted(job.run.paths.checkpoints.glob("step-*")):
        name = CheckpointName.parse(folder.name)
        is_written = (folder / PARTS / part_name(node)).exists()
        if name and is_written and is_there(name.step) and read_manifest(folder) is None:
            return name.step
    return None


def part_of_last_save(job: PlayedJob, node: int) -> int | None:
    agreed = [event.data["step"] for event in events(job, EventKind.STOP_AGREED)]
    return parts_of(job, node, agreed.__contains__)


def any_step(step: int) -> bool:
    return True


def stop_flusher(job: PlayedJob, node: int) -> psutil.Process:
    flusher = job.flusher_on(node)
    flusher.suspend()
    return flusher


def test_lost_before_its_part_of_a_save_is_written(tmp_path: Path, whole: LocalRun) -> None:
    with job_of(tmp_path) as job:
        job.run.wait_for_step(job.attempt, EVERY + 5)
        stop_flusher(job, 1)
        step = wait_until(lambda: parts_of(job, 0, any_step), "node 0's part")
        job.kill_node(1)
        outcome = end(job, tmp_path, 1)
        begun = launches(job)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert (begun[1]["way"], begun[1]["lost"]) == ("spare", ["n1"])
    # The step is not committed: the part of the lost node is missing.
    assert outcome.launches[1].first_step == step - EVERY + 1
    assert steps_lost(outcome)[0] >= EVERY
    assert_same(job, whole)


def test_lost_when_only_the_commit_of_a_save_is_missing(tmp_path: Path, whole: LocalRun) -> None:
    """The flusher that would commit is on the lost node, and all parts are written."""
    with job_of(tmp_path) as job:
        job.run.wait_for_step(job.attempt, EVERY + 5)
        other = stop_flusher(job, 1)
        step = wait_until(lambda: parts_of(job, 0, any_step), "node 0's part")
        stop_flusher(job, 0)
        other.resume()
        wait_until(lambda: parts_of(job, 1, lambda one: one == step), "node 1's part")
        job.kill_node(0)
        outcome = end(job, tmp_path, 0)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert outcome.launches[1].first_step == step + 1, "the step is committed after the loss"
    assert_same(job, whole)


@pytest.mark.parametrize("lost", [0, 2], ids=["lead", "other"])
def test_lost_while_ranks_load_a_checkpoint(tmp_path: Path, whole: LocalRun, lost: int) -> None:
    gate = tmp_path / "gate"
    with job_of(tmp_path, gate=str(gate)) as job:
        wait_until(job.run.paths.latest.exists, "a checkpoint")
        gate.touch()
        job.kill_node(1)
        # Rank 1 is on node 2 now.
        wait_until(lambda: loads(job), "a rank that loads")
        newest = committed_checkpoints(job.run.paths)[-1].step
        job.kill_node(lost)
        gate.unlink()
        outcome = end(job, tmp_path, 1, lost)
        begun = launches(job)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one["lost"] for one in begun[1:]] == [["n1"], [f"n{lost}"]]
    assert outcome.launches[2].first_step == newest + 1
    assert_same(job, whole)


def loads(job: PlayedJob) -> bool:
    beats = [beat for beat in job.run.beats(job.attempt) if beat.launch == 2 and beat.node == 0]
    return any(rank.phase.lower() == "load" for beat in beats for rank in beat.ranks)


def ask_to_stop(job: PlayedJob, *nodes: int) -> None:
    """Signal the agents of some nodes, as a preemption does."""
    for node in nodes:
        job.agents[node].send_signal(signal.SIGTERM)


def assert_stopped(job: PlayedJob, whole: LocalRun, folder: Path, evidence: str) -> None:
    """The attempt ended by the stop, without another launch; the next one loses no commit."""
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert len(launches(job)) == 1
    assert evidence in " ".join(outcome.evidence)
    step = committed_checkpoints(job.run.paths)[-1].step
    assert (outcome.committed_step, step % EVERY) == (step, 0)
    assert_same(job, whole, step)
    job.start_attempt(2)
    outcome = end(job, folder)
    assert (outcome.state, outcome.first_step) == (AttemptState.COMPLETED, step + 1)
    assert_same(job, whole)


@pytest.mark.parametrize("is_agreed", [False, True], ids=["agreeing", "last save"])
def test_lost_while_a_stop_is_agreed_or_saved(
    tmp_path: Path, whole: LocalRun, is_agreed: bool
) -> None:
    with job_of(tmp_path, grace_s=60.0) as job:
        wait_until(job.run.paths.latest.exists, "a checkpoint")
        if is_agreed:
            stop_flusher(job, 1)
        else:
            job.freeze(1)
        ask_to_stop(job, 0)
        kind = EventKind.STOP_AGREED if is_agreed else EventKind.SIGNAL
        wait_until(lambda: events(job, kind), f"the line {kind}")
        if is_agreed:
            wait_until(lambda: part_of_last_save(job, 0), "the last save")
        job.kill_node(1)
        for node in (0, 2, 3):
            assert job.wait(node) == 0
        assert_stopped(job, whole, tmp_path, "nodes n1 were lost while stopping")


@pytest.mark.parametrize("when", ["unheard", "announced", "last save"])
def test_the_lead_is_lost_while_it_stops(tmp_path: Path, whole: LocalRun, when: str) -> None:
    """The node that leads next stops, although it never agreed on the stop."""
    with job_of(tmp_path, grace_s=60.0) as job:
        wait_until(job.run.paths.latest.exists, "a checkpoint")
        if when == "unheard":
            # The signal is on its way to a lead that does not read it any more.
            job.freeze(0)
            ask_to_stop(job, 1, 2)
        else:
            stop_flusher(job, 0)
            if when == "announced":
                job.freeze(1)
            ask_to_stop(job, 0)
            wait_until(lambda: events(job, EventKind.SIGNAL), "the stop request")
        if when == "last save":
            wait_until(lambda: part_of_last_save(job, 1), "the last save")
        job.kill_node(0)
        for process in job.processes_on(1):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        for node in (1, 2, 3):
            assert job.wait(node) == 0
        assert_stopped(job, whole, tmp_path, "nodes n0 were lost while stopping")
        term = newest_term(job.run.paths.attempt(1))
        assert term is not None
        assert (term.node, term.is_end) == (1, True)


def test_lost_again_right_after(tmp_path: Path, whole: LocalRun) -> None:
    """The node that took the place of a lost one is lost as soon as it trains."""
    with job_of(tmp_path) as job:
        job.run.wait_for_step(job.attempt, EVERY + 5)
        job.kill_node(1)
        wait_until(lambda: ranks_of(job, 2), "the second launch")
        job.kill_node(2)
        outcome = end(job, tmp_path, 1, 2)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one["lost"] for one in launches(job)[1:]] == [["n1"], ["n2"]]
    assert_same(job, whole)


@pytest.mark.parametrize("lost", [0, 1], ids=["owner", "holder"])
def test_lost_while_a_neighbour_streams(tmp_path: Path, lost: int) -> None:
    """Node 1 keeps the copies of node 0, and takes no more of the one that is being sent."""
    checkpoint = {"interval": 10_000, "snapshots": 1, "neighbour": True}
    padding = 8 << 20
    with job_of(tmp_path, checkpoint=checkpoint, padding=padding, sleep_s=0.3) as job:
        step = job.run.wait_for_step(job.attempt, 20)
        holder = stop_flusher(job, 1)
        # A round takes less time than these steps, and the next one begins by itself.
        job.run.wait_for_step(job.attempt, step + 10)
        job.kill_node(lost)
        if lost == 0:
            holder.resume()
        outcome = end(job, tmp_path, lost)
        kept = [read_manifest(one) for one in job.run.paths.list_checkpoints()]
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    (crash,) = [one for one in kept if one is not None and one.reason == "crash"]
    assert outcome.launches[1].first_step == crash.step + 1
    assert_same(job, uninterrupted(tmp_path, 2, padding=padding), STEPS)
    assert manifest_at(job.run, STEPS).world_size == 2
