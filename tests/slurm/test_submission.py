"""Attempts on a real Slurm cluster: several nodes, preemption, cancellation, a lost node."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until
from tests.support.agent_ranks import ranks_of, waiting_ranks
from tests.support.metadata_server import AzureService, serving
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.errors import PreflightError, SchedulerUnavailableError
from holdfast.contracts.records.documents import Submission, read_document
from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.records.orders import OrderState, orders_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.decisions.grace import warnings_of
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator, preflight
from holdfast.workers.schedulers import executor_for, slurm_client
from holdfast.workers.schedulers.slurm_client import SLURM_STATES

Make = Callable[..., LocalRun]
TWO_NODES = {"executor": "slurm", "nodes": 2, "gpus_per_node": 2, "partition": "spot"}


def _spec(grace_s: float) -> RunSpec:
    supervision = {"grace_s": grace_s}
    fields = {"command": ["train.py"], "resources": TWO_NODES, "supervision": supervision}
    return RunSpec.model_validate({"name": "short", **fields})


def ended(view: AttemptView) -> tuple[AttemptState, Cause | None]:
    return view.state, view.cause


@pytest.mark.more
def test_two_node_job_trains_to_completion(make: Make) -> None:
    run = make(steps=20)
    attempt = run.submit()
    view = run.wait_for_end()
    assert ended(view) == (AttemptState.COMPLETED, None)
    assert (view.first_step, view.last_step) == (1, 20)
    assert len(set(view.hosts)) == 2
    assert set(view.hosts) <= {"n1", "n2", "n3", "n4"}
    ranks = {rank.rank for beat in run.beats(attempt) for rank in beat.ranks}
    assert ranks == {0, 1, 2, 3}
    assert "rank 3 ends after step 20" in attempt.rank_log(1, 1, 3).read_text()
    assert executor_for("slurm").find(_request(view)) is not None


@pytest.mark.slow
def test_preempted_job_commits_within_the_grace_period_and_records_why(
    slurm: SlurmCluster, make: Make
) -> None:
    """Without a flow; test_main_job.py tests preemption with one by default."""
    run = make(steps=4000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    rival = slurm.run(
        "sbatch", "--parsable", "-p", "prod", "-N4", "--gpus-per-node=4", "--no-requeue",
        "--output=/dev/null", "--wrap", "sleep 30",
    ).strip()  # fmt: skip
    try:
        view = run.wait_for_end()
    finally:
        slurm.run("scancel", rival)
    assert ended(view) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    outcome = run.outcome(attempt)
    assert any("PreemptTime=2" in line for line in outcome.evidence)
    assert outcome.committed_step == outcome.last_step
    assert outcome.last_step is not None
    assert decide(run.history(), None, now=time.time()).action == "relaunch"


@pytest.mark.slow
def test_scancel_counts_as_operator_request_and_commits(slurm: SlurmCluster, make: Make) -> None:
    """Without a flow; test_main_job.py tests scancel with one by default."""
    run = make(steps=4000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    slurm.run("scancel", run.history().attempts[0].job_id or "")
    view = run.wait_for_end()
    assert ended(view) == (AttemptState.CANCELLED, Cause.OPERATOR)
    outcome = run.outcome(attempt)
    assert outcome.committed_step == outcome.last_step
    assert decide(run.history(), None, now=time.time()).action == "stop"


@pytest.mark.more
def test_killed_rank_on_another_node_restarts_the_ranks_of_all_nodes(make: Make) -> None:
    run = make(steps=120, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 5)
    beat = next(b for b in run.beats(attempt) if b.node == 1)
    subprocess.run(["kill", "-KILL", str(beat.ranks[0].pid)], check=True, timeout=10)
    view = run.wait_for_end()
    assert ended(view) == (AttemptState.COMPLETED, None)
    assert [i.ending for i in run.outcome(attempt).launches] == ["crashed", "completed"]


@pytest.mark.slow
def test_warm_standbys_of_both_nodes_are_used_together(make: Make) -> None:
    run = make(steps=100_000, sleep_s=0.05, supervision={"standby_after_s": 0})
    attempt = run.submit()
    run.wait_for_step(attempt, 5)
    # These restarts begin before the other node's state is checked again.
    ranks = ranks_of(run, attempt, 1)
    for number in (2, 3, 4):
        training = {pid for pids in ranks.values() for pid in pids}
        look = partial(waiting_ranks, run, training)
        standbys = wait_until(look, "ranks that wait on both nodes")
        subprocess.run(["kill", "-KILL", str(ranks[1][0])], check=True, timeout=10)
        ranks = ranks_of(run, attempt, number)
        assert {pid for pids in ranks.values() for pid in pids} == standbys
    operator.request(run.paths, "cancel", by="tester")
    run.wait_for_end()
    assert [i.ending for i in run.outcome(attempt).launches] == [*["crashed"] * 3, "stopped"]


@pytest.mark.parametrize("node", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_lost_node_is_named_and_excluded_from_the_relaunch(
    slurm: SlurmCluster, make: Make, node: int
) -> None:
    # Node 0 leads and runs the batch shell. If it is lost, the other node has to end the job.
    # Without restarts in place, the attempt does not continue without the node.
    run = make(
        steps=4000,
        sleep_s=0.05,
        checkpoint={"interval": 10_000, "snapshots": 1},
        supervision={"restarts_in_place": 0},
    )
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    lost = next(b.host for b in run.beats(attempt) if b.node == node)
    slurm.kill_node(lost)
    try:
        view = run.wait_for_end()
        assert ended(view) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
        assert view.facts["lost_hosts"] == [lost]
        # The other node had the newest step in memory and reports which tensors are lost. Without
        # node 0, Slurm may end it before it can report.
        problems = {str(event.data["error"]) for event in run.events(EventKind.SAVE_FAILED)}
        assert len(problems) == 1 or (node == 0 and not problems)
        for problem in problems:
            assert f"nodes [{node}] are lost, together with " in problem
            for rank in (2 * node, 2 * node + 1):
                # The first rank also writes the files that exist only once.
                assert re.search(rf"__{rank}_0\.distcp(, \S+)* with ", problem)
                assert f"rng.rank{rank:05d}." in problem
        decision = decide(run.history(), None, now=time.time())
        assert (decision.action, decision.exclude) == ("relaunch", (lost,))
    finally:
        slurm.start_node(lost)


def test_queued_job_is_pending_and_can_be_cancelled(slurm: SlurmCluster, make: Make) -> None:
    executor = executor_for("slurm")
    run = make(resources={"nodes": 4, "gpus_per_node": 4, "extra": {"begin": "now+1hour"}})
    assert executor.capacity(run.spec.resources) == 16
    attempt = run.submit()
    view = run.history().attempts[0]
    assert view.state is AttemptState.PENDING
    assert "pending: BeginTime; the scheduler expects it to start at 2" in view.waits_for
    submission = read_document(Submission, attempt.submission)
    found = executor.find(_request(view))
    assert submission is not None
    assert found is not None
    assert found.job_id == submission.job_id
    assert "still queued and is cancelled" in operator.request(run.paths, "cancel", by="tester")
    assert ended(run.wait_for_end()) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert run.history().state == "cancelled"


@pytest.mark.slow
def test_job_is_not_lost_while_the_slurm_controller_is_unreachable(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make(steps=4000, sleep_s=0.05)
    attempt = run.submit()
    view = run.history().attempts[0]
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text("ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\n")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(elsewhere))
        with pytest.raises(SchedulerUnavailableError):
            executor_for("slurm").find(_request(view))
        assert not run.history().attempts[0].state.is_terminal
    run.wait_for_step(attempt, 1)
    operator.request(run.paths, "stop", by="tester")
    assert ended(run.wait_for_end()) == (AttemptState.CANCELLED, Cause.OPERATOR)


@pytest.mark.slow
def test_a_supervisor_repeats_a_cancel_that_the_controller_did_not_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make(resources={"nodes": 1, "extra": {"begin": "now+1hour"}}, supervision={"poll_s": 0.5})
    run.submit()
    job = run.history().attempts[0].job_id
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text("ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\n")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(elsewhere))
        message = operator.request(run.paths, "cancel", by="tester")
    assert "is pending, because the scheduler does not answer" in message
    assert slurm_client.queued_jobs(_request(run.history().attempts[0]).job_name)[0].job_id == job
    with Index() as index:
        log = logging.getLogger("holdfast.test")
        history = Supervisor(paths=run.paths, index=index, log=log, submit=submit_next).run()
    assert (history.state, len(history.attempts)) == (RunState.CANCELLED, 1)
    assert history.attempts[0].started_at is None
    (order,) = orders_of(history)
    assert order.state is OrderState.DONE


def test_preflight_names_unknown_slurm_settings_before_submission(
    make: Make, tmp_path: Path
) -> None:
    asked = {"partition": "night", "gpus_per_node": 4, "account": "nobody", "qos": "gold"}
    run = make(resources=asked)
    with pytest.raises(PreflightError) as caught:
        preflight.check(run.spec, tmp_path)
    text = "\n".join(caught.value.problems)
    assert "'night': no such partition; choose from prod, spot" in text
    assert "resources.account 'nobody': Slurm has no such account; choose from" in text
    assert "resources.qos 'gold': Slurm has no such qos; choose from" in text
    large = make(resources={"gpus_per_node": 8})
    with pytest.raises(
        PreflightError, match=r"has more than 4 GPUs; on CPU nodes set resources\.gpus_per_node = 0"
    ):
        preflight.check(large.spec, tmp_path)
    preflight.check(make().spec, tmp_path)


def test_every_job_state_of_this_slurm_version_is_known(slurm: SlurmCluster) -> None:
    # For an unknown state squeue prints the list of all valid states, newer versions in lower case.
    done = subprocess.run(
        ["squeue", "--states=nonsense"], capture_output=True, text=True, timeout=30, check=False
    )
    _, marker, listed = done.stderr.partition("states include: ")
    assert marker, done.stderr
    words = {word.strip().upper() for word in listed.splitlines()[0].split(",")}
    assert "PREEMPTED" in words
    assert words <= set(SLURM_STATES)


def test_partition_with_too_short_a_grace_time_gives_a_warning(slurm: SlurmCluster) -> None:
    assert slurm.spec.grace_time_s == 10
    found = {seconds: warnings_of(_spec(grace_s=seconds), None) for seconds in (8.0, 30.0)}
    assert found[8.0] == []
    (warning,) = found[30.0]
    assert "partition spot gives a preempted job 10 s" in warning
    assert slurm_client.preemption_type() == "preempt/partition_prio"
    assert slurm_client.list_qos()["normal"] == ("00:00:00", "")


@pytest.mark.more
def test_notice_on_one_node_stops_both_and_is_acknowledged_after_commit(make: Make) -> None:
    service = AzureService()
    service.is_hit = lambda asked: _node_of(asked.port) == 1
    with serving(service):
        notices = {"notices": "azure", "notices_url": service.url}
        run = make(steps=4000, sleep_s=0.05, supervision=notices)
        attempt = run.submit()
        run.wait_for_step(attempt, 3)
        service.preempt("the-event", name=service.name)
        view = run.wait_for_end()
        assert ended(view) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
        outcome = run.outcome(attempt)
        assert outcome.committed_step == outcome.last_step
        (notice,) = run.events(EventKind.NOTICE)
        assert notice.data["host"] == next(b.host for b in run.beats(attempt) if b.node == 1)
        ((event, asked),) = service.started
        assert event == "the-event"
        committed = committed_checkpoints(run.paths)[-1]
        assert committed.step == outcome.last_step
        assert committed.committed_at < outcome.ended_at < asked.time
        assert decide(run.history(), None, now=time.time()).action == "relaunch"


def _node_of(port: int) -> int | None:
    """The Slurm node number of the agent that uses a local port."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            if any(c.laddr.port == port for c in process.net_connections("tcp")):
                number = process.environ().get("SLURM_PROCID")
                if number is not None:
                    return int(number)
    return None


def _request(view: AttemptView) -> Any:
    assert view.request is not None
    return view.request


@pytest.mark.more
def test_init_writes_a_spec_that_this_cluster_accepts(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    done = CliRunner().invoke(app, ["init", str(place), "--partition", "spot"])
    assert done.exit_code == 0, done.output
    spec = load_spec(str(place / "run.toml"), ())
    assert (spec.resources.partition, spec.resources.gpus_per_node) == ("spot", 4)
    assert "jobs are preempted by REQUEUE" in (place / "run.toml").read_text()
    preflight.check(spec, tmp_path / "root")
    done = CliRunner().invoke(app, ["init", str(tmp_path / "other"), "--partition", "none"])
    assert done.exit_code != 0
    assert not (tmp_path / "other").exists()


@pytest.mark.more
def test_a_failed_setup_line_ends_the_run_and_is_named(make: Make) -> None:
    module = 'module() { [ "$2" = cuda ] || { echo "no module $2" >&2; return 1; }; }'
    for setup in (["false || true", module, "module load cuda"], [module, "module load cudaa"]):
        run = make(steps=3, launch={"setup": setup})
        run.submit()
        view = run.wait_for_end()
        if "cudaa" not in setup[-1]:
            assert ended(view) == (AttemptState.COMPLETED, None), view.evidence
            continue
        assert ended(view) == (AttemptState.FAILED, Cause.USER_ERROR), view.evidence
        failed = "launch.setup line 2 failed with exit status 1: module load cudaa"
        assert view.evidence[0].startswith(failed)
        assert view.evidence[1] == "no module cudaa"


@pytest.mark.more
def test_memory_per_cpu_is_what_slurm_gives(make: Make) -> None:
    resources = {**TWO_NODES, "nodes": 1, "cpus_per_gpu": 1, "memory_gb_per_cpu": 0.25}
    run = make(resources, steps=3)
    attempt = run.submit()
    submission = read_document(Submission, attempt.submission)
    assert submission is not None
    shown = slurm_client.call(["scontrol", "show", "job", submission.job_id])
    assert "MinMemoryCPU=256M" in shown
    assert run.wait_for_end().state is AttemptState.COMPLETED
