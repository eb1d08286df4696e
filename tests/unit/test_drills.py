"""Drills: which faults are drawn, and that each violated invariant is reported."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.support.runs import DIGEST, RunFolder, build_sample_runs

from holdfast.contracts.account.goodput import account
from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.errors import ServiceError, SpecError
from holdfast.contracts.records.documents import Claim, Submission, write_document
from holdfast.contracts.records.history import load_events, load_history
from holdfast.contracts.records.tally import LaunchSpan, Span
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.nodes.processes import name_process
from holdfast_bench.drills import rehearsal
from holdfast_bench.drills.campaign import Campaign, Plan, steps_for
from holdfast_bench.drills.ettr import Calibration, Costs, Trained, calibrate, compare, mean_of
from holdfast_bench.drills.node_rehearsal import SCENARIOS, NodeJob
from holdfast_bench.drills.rehearsal import Comparison
from holdfast_bench.drills.replica_memory import damage_copies, pages_of
from holdfast_bench.drills.report import OWN_JOBS, read_result, render_report, spread
from holdfast_bench.drills.steps import Cut, RecordedRun, Records, Reference, Step, difference, gaps
from holdfast_bench.live_drills import faults as live_faults
from holdfast_bench.live_drills import invariants
from holdfast_bench.live_drills.faults import FaultContext
from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import KINDS, Recovery, draw_faults, select_kinds
from holdfast_bench.live_drills.lost_nodes import plan_without
from holdfast_bench.live_drills.process_list import LaunchPlace
from holdfast_bench.live_drills.results import DrillResult, FaultResult
from holdfast_bench.live_drills.runner import chance_of
from holdfast_bench.live_drills.target_run import TargetRun

NEWEST = "step-00000200.a0003.l01"


@pytest.fixture
def scripted_run(tmp_path: Path) -> RunFolder:
    """A run with a preemption, a crash, a lost node, a rollback and a deletion."""
    (tmp_path / "runs").mkdir()
    return next(run for run in list(build_sample_runs(tmp_path / "runs")) if run.name == "gpt")


def find_violations(run: RunFolder) -> list[Broken]:
    """The violations that the checks on disk find."""
    paths, events = run.paths, load_events(run.paths)
    return [
        *invariants.check_checkpoints(paths, events),
        *invariants.check_resumes(paths, events),
        *invariants.check_submissions(paths, events),
        *invariants.check_endings(load_history(paths).attempts, events),
        *invariants.check_commands(events),
    ]


def test_a_sound_run_violates_no_invariant(scripted_run: RunFolder) -> None:
    assert find_violations(scripted_run) == []


def test_a_checkpoint_may_be_deleted_while_it_is_checked(scripted_run: RunFolder) -> None:
    events = load_events(scripted_run.paths)
    scripted_run.delete(NEWEST, "not among the last 4")
    assert invariants.check_checkpoints(scripted_run.paths, events) == []


def lose_manifest(run: RunFolder) -> None:
    (run.paths.checkpoint(NEWEST) / "manifest.json").unlink()


def lose_directory(run: RunFolder) -> None:
    shutil.rmtree(run.paths.checkpoint(NEWEST))


def flip_a_byte(run: RunFolder) -> None:
    path = run.paths.checkpoint(NEWEST) / "__0_0.distcp"
    path.write_bytes(path.read_bytes().swapcase())


def delete_without_an_event(run: RunFolder) -> None:
    directory = run.paths.checkpoint(NEWEST)
    shutil.copy(directory / "manifest.json", run.paths.tombstone(NEWEST))
    shutil.rmtree(directory)


def resume_from_an_uncommitted_one(run: RunFolder) -> None:
    run.launch(3, 2, 200, "gpt:step-00000110.a0001.l02")


def resume_from_an_older_one(run: RunFolder) -> None:
    run.launch(3, 2, 100, "gpt:step-00000100.a0001.l01")


def resume_from_nothing(run: RunFolder) -> None:
    run.launch(3, 2, 0, None)


def submit_twice(run: RunFolder) -> None:
    run.tell("cli", EventKind.ATTEMPT_SUBMITTED, attempt=2, job_id="999")


def claim_twice(run: RunFolder) -> None:
    for writer in ("one", "two"):
        run.tell(writer, EventKind.CLAIMED, attempt=2, job_id="102")


def submit_to_two_jobs(run: RunFolder) -> None:
    logs = run.paths.attempt(1).logs
    logs.mkdir()
    for job in (101, 102):
        (logs / f"{job}_submitted.pkl").touch()


def share_a_job(run: RunFolder) -> None:
    job = Submission(job_id="101", executor="local", submitted_at=0.0)
    write_document(run.paths.attempt(2).submission, job)


def claim_another_job(run: RunFolder) -> None:
    job = Submission(job_id="777", executor="slurm", submitted_at=0.0)
    write_document(run.paths.attempt(2).submission, job)


def skip_a_number(run: RunFolder) -> None:
    run.submit(7, 2, 0.0)


def end_unexplained(run: RunFolder) -> None:
    run.submit(4, 2, 0.0)
    run.record_attempt_end(4, AttemptState.FAILED, Cause.UNKNOWN, 210, 0.0)


def end_twice(run: RunFolder) -> None:
    run.record_attempt_end(1, AttemptState.PREEMPTED, Cause.PREEMPTION, 120, 0.0)


def change_the_command(run: RunFolder) -> None:
    with JournalWriter(run.paths.attempt(3).journal / "rank0.jsonl") as journal:
        journal.append(EventKind.RESUMED, attempt=3, launch=2, step=200, command_digest="e" * 64)


@pytest.mark.parametrize(
    ("harm", "invariant"),
    [
        (lose_manifest, invariants.COMMITTED_STAYS),
        (lose_directory, invariants.COMMITTED_STAYS),
        (flip_a_byte, invariants.COMMITTED_STAYS),
        (delete_without_an_event, invariants.COMMITTED_STAYS),
        (resume_from_an_uncommitted_one, invariants.BELIEVED_IS_WHOLE),
        (resume_from_an_older_one, invariants.RESUME_IS_RIGHT),
        (resume_from_nothing, invariants.RESUME_IS_RIGHT),
        (submit_twice, invariants.ONE_SUBMISSION),
        (claim_twice, invariants.ONE_SUBMISSION),
        (submit_to_two_jobs, invariants.ONE_SUBMISSION),
        (share_a_job, invariants.ONE_SUBMISSION),
        (claim_another_job, invariants.ONE_SUBMISSION),
        (skip_a_number, invariants.ONE_SUBMISSION),
        (end_unexplained, invariants.ENDINGS_EXPLAINED),
        (end_twice, invariants.ENDINGS_EXPLAINED),
        (change_the_command, invariants.ONE_COMMAND),
    ],
)
def test_each_violation_is_reported_under_its_invariant(
    scripted_run: RunFolder, harm: Callable[[RunFolder], None], invariant: str
) -> None:
    harm(scripted_run)
    assert {one.invariant for one in find_violations(scripted_run)} == {invariant}


def test_an_index_row_that_differs_from_disk_is_reported(
    scripted_run: RunFolder, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/index.db"
    assert invariants.check_index(url, scripted_run.paths) == []
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("update attempts set cause = 'hang' where number = 2")
    broken, *_ = invariants.check_index(url, scripted_run.paths)
    assert broken.invariant == invariants.INDEX_IS_DISK
    assert "the index has hang at .attempts[1].cause, disk node_failure" in broken.detail


@pytest.mark.parametrize("leader_ends", [False, True])
def test_a_job_without_a_recorded_process_is_controlled_by_the_first_of_its_session(
    scripted_run: RunFolder, leader_ends: bool
) -> None:
    target, attempt = TargetRun(scripted_run.paths), scripted_run.paths.list_attempts()[-1]
    # In a new session: /proc may not show the leader of this process's own session.
    with _processes_of_a_session(leader_ends) as (first, pid):
        agent = name_process(pid)
        assert agent is not None
        claim = Claim(
            job_id="9",
            pid=agent.pid,
            process_start_s=agent.start_s,
            boot_id=agent.boot_id,
            host="here",
            claimed_at=0.0,
        )
        write_document(attempt.claim, claim)
        # A submission that an executor finds by the claim has no process id.
        submission = Submission(job_id="9", executor="local", submitted_at=0.0)
        write_document(attempt.submission, submission)
        found = target.controller()
        assert found is not None
        assert found.pid == first
        write_document(attempt.claim, claim.model_copy(update={"process_start_s": 1.0}))
        assert target.controller() is None


@contextlib.contextmanager
def _processes_of_a_session(leader_ends: bool) -> Iterator[tuple[int, int]]:
    """Yield the process ids of a job's first process and of its child.

    The first process leads the session, or was started by a leader that has ended.
    """
    job = "sleep 300 & echo $$ $!; wait"
    command = ["sh", "-c", 'sh -c "$0" &', job] if leader_ends else ["sh", "-c", job]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        try:
            first, child = map(int, leader.stdout.readline().split())
            if leader_ends:
                leader.wait(10)
            yield first, child
        finally:
            os.killpg(leader.pid, signal.SIGKILL)


STEP = Step(
    place=LaunchPlace(1, 1), rank=0, step=5, time=0.0, loss=0.5, ids="a" * 32, weights="b" * 32
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"place": LaunchPlace(2, 1), "time": 9.0}, None),
        ({"step": 6}, None),
        ({"ids": "c" * 32}, "samples differ from"),
        ({"loss": 0.6}, "loss 0.6, expected 0.5"),
        ({"weights": "c" * 32}, "weights differ"),
    ],
)
def test_a_step_is_compared_with_that_of_the_uninterrupted_run(
    changed: dict[str, object], words: str | None
) -> None:
    found = difference(replace(STEP, **changed), {(0, 5): STEP})  # type: ignore[arg-type]
    assert (found is None) if words is None else (found is not None and words in found)


def test_gaps_in_the_steps_of_a_launch_are_reported() -> None:
    later = replace(STEP, step=6)
    assert gaps([STEP, later, replace(STEP, place=LaunchPlace(1, 2))]) == []
    assert gaps([STEP, replace(STEP, step=7)]) == ["a0001.l01 rank 0: step 7 after 5"]
    assert gaps([later, later]) == ["a0001.l01 rank 0: step 6 after 6"]


def changed(kind: EventKind, place: LaunchPlace, skip: list[list[int]]) -> Event:
    """The event of a rank about a loss that was not finite."""
    data = {"attempt": place.attempt, "launch": place.launch, "skip": skip}
    return Event(writer="rank0", opening=1, sequence=0, time=0.0, kind=kind, data=data)


def compare_steps(steps: Sequence[Step], events: Sequence[Event]) -> tuple[list[str], int]:
    """What is wrong with steps of a run, the reference of which has weights `b`, and weights `w`
    where windows were given; and how many were compared with nothing."""
    asked: list[tuple[int, list[tuple[int, int]]]] = []

    def train(count: int, windows: list[tuple[int, int]]) -> Reference:
        asked.append((count, windows))
        return {(0, step): replace(STEP, step=step, weights="w" * 32) for step in range(1, 40)}

    reference = {(0, step): replace(STEP, step=step) for step in range(1, 40)}
    comparison = Comparison(reference)
    found = [*comparison.look(steps, events), *comparison.finish(events, train)]
    assert len(asked) <= 1
    return found, comparison.uncompared


def steps_of(place: LaunchPlace, first: int, last: int, weights: str) -> list[Step]:
    return [
        replace(STEP, place=place, step=step, weights=weights * 32)
        for step in range(first, last + 1)
    ]


def test_steps_after_a_rollback_match_a_run_with_the_same_skip_window() -> None:
    event = changed(EventKind.ROLLED_BACK, LaunchPlace(1, 1), [[8, 10]])
    before = steps_of(LaunchPlace(1, 1), 1, 12, "b")
    right = [*steps_of(LaunchPlace(1, 2), 5, 7, "b"), *steps_of(LaunchPlace(1, 2), 8, 15, "w")]
    assert compare_steps([*before, *right], [event]) == ([], 0)
    found, _ = compare_steps([*before, *steps_of(LaunchPlace(1, 2), 5, 8, "b")], [event])
    assert found == ["a0001.l02 rank 0 step 8: weights differ from the uninterrupted run's"]


def test_a_skip_applies_in_its_own_launch() -> None:
    event = changed(EventKind.NUMERICS, LaunchPlace(1, 1), [[8, 10]])
    right = [*steps_of(LaunchPlace(1, 1), 1, 7, "b"), *steps_of(LaunchPlace(1, 1), 8, 12, "w")]
    assert compare_steps(right, [event]) == ([], 0)


def test_steps_discarded_by_a_second_rollback_are_not_compared() -> None:
    events = [
        changed(EventKind.ROLLED_BACK, LaunchPlace(1, 1), [[8, 10]]),
        changed(EventKind.ROLLED_BACK, LaunchPlace(1, 2), [[20, 10]]),
    ]
    steps = [
        *steps_of(LaunchPlace(1, 1), 1, 12, "b"),
        *steps_of(LaunchPlace(1, 2), 8, 22, "w"),
        *steps_of(LaunchPlace(1, 3), 18, 25, "w"),
    ]
    # Steps 20 to 22 were done with the first window alone.
    assert compare_steps(steps, events) == ([], 3)


def test_fault_kinds_are_drawn_equally_often_and_by_the_seed() -> None:
    kinds = list(KINDS.values())
    drawn = draw_faults(kinds, 3 * len(kinds), seed=5)
    assert {sum(one is kind for one in drawn) for kind in kinds} == {3}
    assert drawn == draw_faults(kinds, 3 * len(kinds), seed=5)
    assert drawn != draw_faults(kinds, 3 * len(kinds), seed=6)


def test_each_fault_kind_has_an_implementation() -> None:
    assert rehearsal.FAULTS.keys() | SCENARIOS.keys() == set(KINDS)
    assert {name for name, kind in KINDS.items() if kind.has_own_job} == SCENARIOS.keys()
    live = {kind.name for kind in KINDS.values() if kind.is_for_live}
    assert set(live_faults.FAULTS) == live


def test_unknown_or_unavailable_fault_kinds_are_refused_by_name() -> None:
    assert {k.name for k in select_kinds((), is_live=True, missing=())} == {
        kind.name for kind in KINDS.values() if kind.is_for_live
    }
    with pytest.raises(SpecError, match="did you mean kill-rank"):
        select_kinds(["kil-rank"], is_live=False, missing=())
    with pytest.raises(SpecError, match="cannot be rehearsed on a live run"):
        select_kinds(["disk-full"], is_live=True, missing=())
    with pytest.raises(SpecError, match="cannot be rehearsed on this machine"):
        select_kinds(["disk-full"], is_live=False, missing={"disk-full"})


COSTS = Costs(step_s=0.05, blocked_s=0.0, flush_s=0.5, start_s=2.0, load_s=0.5)
CALIBRATION = Calibration(costs=COSTS, queued_s=1.0, relaunch_s=1.5, flow_s=3.0)


def trained(*faults: tuple[str, Recovery]) -> Trained:
    """A run of 1000 steps: 50 s of training and 50 s of other time."""
    span = Span(
        gpus=2,
        submitted_at=0.0,
        started_at=0.0,
        ended_at=100.0,
        launches=(
            LaunchSpan(started_at=0.0, trained_from=50.0, trained_until=100.0, last_step=1000),
        ),
    )
    return Trained(goodput=account([span], created_at=0.0, until=100.0), steps=1000, faults=faults)


@pytest.mark.parametrize(
    ("faults", "wall_s"),
    [
        # 50 s of steps, 1 s of queue, 2.5 s of a start, 0.5 s of a last flush.
        ((), 54.0),
        ((("kill-flusher", Recovery.UNDISTURBED),), 54.0),
        # Two steps of 0.04 s in each 0.16 s, for thirty seconds.
        ((("straggler", Recovery.UNDISTURBED),), 54.0 + 15.0),
        ((("sigterm", Recovery.NEW_ATTEMPT),), 54.0 + 0.5 + 1.5 + 2.5),
        ((("kill-flow", Recovery.NEW_ATTEMPT),), 54.0 + 0.5 + 1.5 + 3.0 + 2.5),
        ((("kill-rank", Recovery.IN_PLACE),), 54.0 + 0.5 + 5 / 2 * 0.05 + 2.5),
        ((("hang", Recovery.IN_PLACE),), 54.0 + 6.0 + 5 / 2 * 0.05 + 2.5),
        ((("node-loss", Recovery.NEW_ATTEMPT),), 54.0 + 0.5 + 20 / 2 * 0.05 + 1.5 + 2.5),
    ],
)
def test_the_predicted_ettr_follows_from_the_faults(
    faults: tuple[tuple[str, Recovery], ...], wall_s: float
) -> None:
    found = compare(CALIBRATION, [trained(*faults)])
    assert found.predicted == pytest.approx(50.0 / wall_s)
    assert found.measured == pytest.approx(0.5)
    assert found.paced == pytest.approx(0.5)


def test_calibrations_of_several_runs_are_averaged() -> None:
    slow = replace(CALIBRATION, flow_s=5.0, costs=replace(COSTS, start_s=4.0))
    found = mean_of([CALIBRATION, slow])
    assert (found.flow_s, found.costs.start_s) == (4.0, 3.0)
    assert (found.queued_s, found.costs.step_s) == (1.0, 0.05)


def campaign(count: int, *, within_s: float = 60.0, names: Sequence[str] = ()) -> Campaign:
    """A campaign of two runs at a time that starts no process."""
    kinds = [kind for kind in KINDS.values() if not names or kind.name in names]
    plan = Plan(kinds=kinds, count=count, seed=3, within_s=within_s, at_once=2)
    return Campaign(plan, DrillResult(seed=3), lambda _: None, Path("nowhere"))


def test_each_fault_is_taken_once_and_in_order() -> None:
    one = campaign(20)
    taken = [one.take(0) for _ in range(20)]
    assert [found and found[0] for found in taken] == list(range(20))
    assert one.take(0) is None


@pytest.fixture
def job(tmp_path: Path) -> NodeJob:
    """A job of four nodes and a spare one, whose agents are not started."""
    resources = {"executor": "slurm", "nodes": 4, "gpus_per_node": 1, "spare_nodes": 1}
    elastic = {"choices": [2, 4]}
    spec = RunSpec(name="r", command=("train.py",), resources=resources, elastic=elastic)
    return NodeJob(spec, tmp_path / "runs", tmp_path, {})


def lose_node(job: NodeJob, node: int, nodes: int) -> None:
    with JournalWriter(job.attempt.node_journal(0)) as journal:
        journal.append(EventKind.NODE_LOST, attempt=1, node=node, host=f"n{node}")
        journal.append(EventKind.LAUNCH_STARTED, attempt=1, launch=node, nodes=nodes)


def test_a_run_on_several_nodes_continues_in_place_without_the_lost_ones(job: NodeJob) -> None:
    target = TargetRun(job.paths)
    ways = []
    for node, nodes in ((2, 4), (3, 2), (1, 2)):
        target.look()
        ways.append(plan_without(target, f"n{node}").way)
        lose_node(job, node, nodes)
    # A spare node, then half of the nodes, then the one that the smaller size left over.
    assert ways == ["spare", "shrink", "spare"]
    target.look()
    assert plan_without(target, "n0").way == ""


def test_a_killed_agent_ends_the_attempt_only_if_it_cannot_continue(
    job: NodeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as agent:
        target = TargetRun(job.paths)
        monkeypatch.setattr(target, "agent", lambda: psutil.Process(agent.pid))
        context = FaultContext(target, chance_of(1, 1))
        assert f"process {agent.pid}" in live_faults.kill_agent(context)
    assert agent.returncode == -signal.SIGKILL
    assert context.recovery is Recovery.IN_PLACE
    assert KINDS["kill-agent"].recovery is Recovery.NEW_ATTEMPT, "that of a run on one node"


def test_a_run_leaves_the_faults_with_jobs_of_their_own_for_later() -> None:
    one = campaign(6, names=["kill-rank", "node-loss-spare", "neighbour-loss"])
    in_run = [one.take(0, begun=True) for _ in range(2)]
    assert [found and found[1].name for found in in_run] == ["kill-rank"] * 2
    assert one.take(0, begun=True) is None
    later = [one.take(0) for _ in range(4)]
    assert all(found and found[1].has_own_job for found in later)
    assert len({found[0] for found in later if found}) == 4


def test_a_campaign_of_jobs_alone_needs_no_long_uninterrupted_run() -> None:
    alone = [KINDS["node-loss-spare"], KINDS["neighbour-loss"]]
    both = [*alone, KINDS["kill-rank"]]
    assert steps_for(alone, 1) == steps_for(both, 1) - KINDS["kill-rank"].steps


def test_copies_are_damaged_in_the_memory_of_the_neighbour_alone() -> None:
    """Two processes hold the same bytes, as a flusher and its neighbour do, beside others."""
    program = (
        "import mmap, os, random, sys; "
        "m = mmap.mmap(-1, 8 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); "
        "m[:] = random.Random(1).randbytes(8 * 4096); "
        "print('ready', flush=True); sys.stdin.readline(); "
        "print(m[:] == random.Random(1).randbytes(8 * 4096), flush=True)"
    )
    with contextlib.ExitStack() as stack:
        holders = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        owner, neighbour = (psutil.Process(holder.pid) for holder in holders)
        assert damage_copies(pages_of(owner), neighbour) >= 8
        answers = [holder.communicate("\n", 30)[0] for holder in holders]
    assert answers == ["True\n", "False\n"]


def test_a_fault_that_needs_more_steps_waits_for_another_run() -> None:
    one = campaign(4, names=["prefect-down"])
    room = one.steps_max - KINDS["prefect-down"].steps
    assert room > 0
    assert one.take(room + 1) is None
    taken = one.take(0)
    assert taken is not None
    assert taken[0] == 0


def test_no_fault_starts_after_the_time_limit_too_many_failures_or_a_stop() -> None:
    assert campaign(5, within_s=0.0).take(0) is None
    cut = campaign(5)
    cut.is_cut.set()
    assert cut.take(0) is None
    bad = FaultResult(kind="nan", ok=False, detail="", run="r", step=1)
    wrong = campaign(5)
    wrong.result.faults += [bad] * (wrong.plan.failures_max + 1)
    assert wrong.take(0) is None


def test_an_interrupted_drill_does_not_wait(scripted_run: RunFolder, tmp_path: Path) -> None:
    target = RecordedRun(paths=scripted_run.paths, records=Records(tmp_path), is_cut=lambda: True)
    with pytest.raises(Cut):
        target.wait_for("what never comes", lambda: None, 60.0)


def test_a_run_with_faults_is_refused_for_calibration(scripted_run: RunFolder) -> None:
    with pytest.raises(ServiceError, match="expected two attempts"):
        calibrate(load_history(scripted_run.paths))


def test_the_report_lists_violated_invariants() -> None:
    fault = FaultResult(
        kind="kill-rank",
        ok=False,
        detail="",
        run="r",
        step=3,
        steps_lost=2,
        noticed_s=0.5,
        reported_s=2.5,
        first_step_s=1.5,
    )
    broken = [Broken(invariants.NO_ORPHANS, "process 7 (python)")]
    result = DrillResult(seed=7, faults=[fault], broken=broken)
    result.ettr = compare(CALIBRATION, [trained()]).as_json()
    result.command = "holdfast drill --count 1"
    page = render_report([result], "a machine")
    assert "After 0 of 1 faults, every invariant held." in page
    assert f"| {invariants.NO_ORPHANS} | 1 |" in page
    assert "- no process outlives its attempt: process 7 (python)" in page
    row = next(line for line in page.splitlines() if line.startswith("| kill-rank |"))
    assert row.endswith("| 1 | 0 | 2 (2) | 0.50 (0.50) | 2.50 (2.50) | 1.50 (1.50) |")
    assert "Measured 0.500, predicted 0.926: the ratio is **0.540**" in page
    assert "| from a launch to the load | 2.0000 |" in page
    assert spread([3.0, 1.0, 2.0]) == "2.00 (3.00)"
    assert DIGEST not in page


def test_the_report_combines_several_drills() -> None:
    fault = FaultResult(
        kind="hang", ok=True, detail="", run="r", step=3, recovery=Recovery.IN_PLACE
    )
    result = DrillResult(seed=7, faults=[fault], at_once=3, command="holdfast drill")
    result.ettr = compare(CALIBRATION, [trained()]).as_json()
    again = read_result(json.loads(json.dumps(result.as_json())))
    assert again == result
    page = render_report([again, result], "a machine")
    assert "After 2 of 2 faults, every invariant held." in page
    assert "each of 3 small training runs at a time" in page
    assert "Measured 0.500, predicted 0.926" in page
    assert OWN_JOBS not in page
    result.faults.append(replace(fault, kind="node-loss-spare"))
    assert OWN_JOBS in render_report([result], "a machine")
    with pytest.raises(SpecError, match="not the output of a drill"):
        read_result({"faults": [{"kind": "hang"}]})
