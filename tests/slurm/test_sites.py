"""What sites set up differently: each way to preempt, and each way to restrict a job.

All cases use the one cluster of this folder, whose configuration they change. The cases that train
are slow, except for the first. `docs/measurements.md` lists them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from slurm_errors import DaemonError
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import (
    PreflightError,
    SchedulerUnavailableError,
    SubmissionRefusedError,
)
from holdfast.contracts.records.documents import Request, Submission, read_document
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator, preflight
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.schedulers import executor_for, slurm_client

Make = Callable[..., LocalRun]
NOBODY = 65534
# The partitions of all cases. A job of `prod` stops jobs of `gang` and ends those of `cancelled`.
SITE = (
    "PreemptMode=SUSPEND,GANG",
    "PartitionName=gang Nodes=ALL PriorityTier=1 PreemptMode=SUSPEND OverSubscribe=FORCE:1",
    "PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=10",
    "PartitionName=whole Nodes=ALL PriorityTier=1 OverSubscribe=EXCLUSIVE PreemptMode=REQUEUE",
    "PartitionName=secret Nodes=ALL PriorityTier=1 Hidden=YES PreemptMode=REQUEUE",
)
BY_QOS = ("PreemptType=preempt/qos", "AccountingStorageEnforce=limits,qos")
WITH_KEYS = ("TrackWCKey=yes", "AccountingStorageEnforce=wckeys")
# What operators copy into slurm.conf, and the GraceTime of its partition `spot`.
PREEMPTION_CONF = Path(__file__).parents[2] / "infra" / "slurm" / "preemption.conf"
GRACE_OF_SITES_S = 120.0
# Longer than `poll`s and heartbeats of agents: three heartbeats, and the answer to a report.
SUSPENDED_S = 40.0


@pytest.fixture
def configured(slurm: SlurmCluster) -> Iterator[Callable[..., None]]:
    """A function that changes the cluster's configuration until the end of the test."""
    yield slurm.configure
    slurm.configure()


@contextmanager
def rival(slurm: SlurmCluster, *options: str, command: str = "sleep 600") -> Iterator[str]:
    """A job that takes what it needs from others."""
    words = ["sbatch", "--parsable", "--no-requeue", "--output=/dev/null", *options]
    job = slurm.run(*words, "--wrap", command).strip()
    try:
        yield job
    finally:
        slurm.run("scancel", job)


def state_of(slurm: SlurmCluster, job: str) -> str:
    return slurm.run("squeue", "-h", "-a", "-j", job, "-o", "%T").strip()


def saved_and_relaunches(run: LocalRun, attempt: AttemptPaths) -> bool:
    """True if the ended attempt lost no step and the run continues."""
    outcome = run.outcome(attempt)
    assert outcome.committed_step == outcome.last_step
    assert outcome.last_step is not None
    return decide(run.history(), None, now=time.time()).action == "relaunch"


@pytest.mark.slow
def test_suspended_job_continues_when_slurm_resumes_it(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    configured(*SITE)
    run = make(resources={"partition": "gang"}, steps=100_000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    job = run.history().attempts[0].job_id or ""
    with rival(slurm, "-p", "prod", "-N4", "--ntasks-per-node=1", "--cpus-per-task=16"):
        wait_until(lambda: state_of(slurm, job) == "SUSPENDED", "the suspension")
        began, steps = time.monotonic(), max(_steps(run, attempt))
        while time.monotonic() - began < SUSPENDED_S:
            assert run.history().attempts[0].state is AttemptState.RUNNING
            time.sleep(2)
        assert max(_steps(run, attempt)) <= steps + 20, "the ranks were suspended too"
    wait_until(lambda: state_of(slurm, job) == "RUNNING", "the resumption")
    run.wait_for_step(attempt, max(_steps(run, attempt)) + 50)
    assert not run.events(EventKind.NODE_LOST)
    assert not run.events(EventKind.LAUNCH_ENDED), "nothing was restarted"
    operator.request(run.paths, "stop", by="tester")
    run.wait_for_end()
    assert run.outcome(attempt).committed_step == run.outcome(attempt).last_step


def _steps(run: LocalRun, attempt: AttemptPaths) -> list[int]:
    return [rank.step for beat in run.beats(attempt) for rank in beat.ranks]


@pytest.mark.slow
def test_job_of_a_partition_with_preempt_mode_cancel_saves_and_relaunches(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    configured(*SITE)
    run = make(resources={"partition": "cancelled"}, steps=100_000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    with rival(slurm, "-p", "prod", "-N4", "--gpus-per-node=4"):
        view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert saved_and_relaunches(run, attempt)


def lines_for_sites() -> list[str]:
    """The lines of infra/slurm/preemption.conf, with partitions beside those of the test cluster.

    The line on cgroups is left out: they belong to the whole machine.
    """
    lines = [one.strip() for one in PREEMPTION_CONF.read_text().splitlines()]
    given = [one for one in lines if one and not one.startswith(("#", "ProctrackType="))]
    return [one.replace("PartitionName=", "PartitionName=team-") for one in given]


@pytest.mark.slow
def test_lines_for_a_sites_configuration_preempt_with_their_grace(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    configured(*lines_for_sites())
    # Slurm gives a preempted job an end only if the job has a time limit.
    resources = {"partition": "team-spot", "time_limit_min": 60}
    run = make(resources=resources, steps=100_000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    with rival(slurm, "-p", "team-prod", "-N4", "--gpus-per-node=4"):
        view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert saved_and_relaunches(run, attempt)
    (stop,) = (one for one in run.events(EventKind.SIGNAL) if one.data.get("cause"))
    assert GRACE_OF_SITES_S / 2 < stop.data["deadline"] - stop.time <= GRACE_OF_SITES_S + 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["requeue", "cancel"])
def test_job_of_a_preempted_qos_saves_and_relaunches(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None], mode: str
) -> None:
    settings = ("GraceTime=10", f"PreemptMode={mode}")
    with qos(slurm, "cheap", *settings), qos(slurm, "urgent", "Preempt=cheap"):
        configured(*BY_QOS)
        run = make(resources={"qos": "cheap"}, steps=100_000, sleep_s=0.05)
        attempt = run.submit()
        run.wait_for_step(attempt, 3)
        with rival(slurm, "-p", "spot", "--qos=urgent", "-N4", "--gpus-per-node=4"):
            view = run.wait_for_end()
        assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
        assert saved_and_relaunches(run, attempt)


@contextmanager
def qos(slurm: SlurmCluster, name: str, *settings: str) -> Iterator[None]:
    """A QOS that root may use."""
    slurm.run("sacctmgr", "-i", "add", "qos", name, *settings)
    slurm.run("sacctmgr", "-i", "modify", "user", "root", "set", f"qos+={name}")
    try:
        yield
    finally:
        # From 26.05 on, Slurm refuses this until its database knows that the last job has ended.
        wait_until(lambda: _is_removed(slurm, name), f"the end of QOS {name}", 60)


def _is_removed(slurm: SlurmCluster, name: str) -> bool:
    try:
        slurm.run("sacctmgr", "-i", "delete", "qos", name)
    except DaemonError as error:
        if "Job(s) active" in str(error):
            return False
        raise
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_signal_that_a_site_sends_long_before_the_limit_counts_as_preemption(
    slurm: SlurmCluster, make: Make, name: str
) -> None:
    # A job_submit plugin may set --signal whatever Holdfast requests.
    run = make(resources={"time_limit_min": 60}, steps=100_000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    slurm.run("scancel", f"--signal={name}", run.history().attempts[0].job_id or "")
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert saved_and_relaunches(run, attempt)


@pytest.mark.more
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("signal", one) for one in ("USR1@60", "B:USR1@60", "R:TERM@60")),
        *(("array", "0-3"), ("hetjob", True), ("packjob", True), ("het-group", "0")),
    ],
)
def test_option_that_holdfast_could_not_follow_is_refused_before_anything_is_queued(
    option: str, value: Any
) -> None:
    resources = {"executor": "slurm", "extra": {option: value}}
    with pytest.raises(ValueError, match=f"option '{option}' is not for extra: "):
        RunSpec.model_validate({"name": "x", "command": ["x.py"], "resources": resources})


@pytest.mark.more
@pytest.mark.parametrize("line", ["#SBATCH --array=0-3", " #SBATCH hetjob", "a\n#SBATCH hetjob"])
def test_setup_line_cannot_hold_an_option(line: str) -> None:
    launch = {"setup": [line]}
    with pytest.raises(ValueError, match=r"set resources\.extra"):
        RunSpec.model_validate({"name": "x", "command": ["x.py"], "launch": launch})


@pytest.mark.slow
def test_run_trains_in_the_reservation_that_it_names(slurm: SlurmCluster, make: Make) -> None:
    slurm.run(
        *("scontrol", "create", "reservation", "ReservationName=mine", "Users=root"),
        *("StartTime=now", "Duration=60", "Nodes=n3,n4"),
    )
    try:
        outside = make()
        inside = make(resources={"extra": {"reservation": "mine"}}, steps=20)
        executor = executor_for("slurm")
        # A reservation begins at the next turn of the controller.
        wait_until(lambda: executor.capacity(outside.spec.resources) == 4, "the reservation", 60)
        assert executor.capacity(inside.spec.resources) == 4
        inside.submit()
        view = inside.wait_for_end()
        assert view.state is AttemptState.COMPLETED
        assert set(view.hosts) == {"n3", "n4"}
    finally:
        wait_until(lambda: _forget_reservation(slurm), "the end of the reservation", 60)


def _forget_reservation(slurm: SlurmCluster) -> bool:
    words = ["scontrol", "delete", "ReservationName=mine"]
    return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.mark.more
def test_capacity_counts_only_whole_nodes_for_exclusive_jobs(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    configured(*SITE)
    executor = executor_for("slurm")
    by_option = make(resources={"extra": {"exclusive": True}}).spec.resources
    by_site = make(resources={"partition": "whole"}).spec.resources
    shared = make().spec.resources
    with rival(slurm, "-p", "prod", "-w", "n1", "--gpus-per-node=2") as job:
        wait_until(lambda: state_of(slurm, job) == "RUNNING", "the other job")
        found = [executor.capacity(one) for one in (shared, by_option, by_site)]
        assert found == [8, 6, 6]
        # A node that the run itself has becomes free.
        assert executor.capacity(by_site, {"n1": 2}) == 8


@pytest.mark.slow
def test_run_trains_on_nodes_of_its_own(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    configured(*SITE)
    run = make(resources={"partition": "whole"}, steps=100_000, sleep_s=0.05)
    attempt = run.submit()
    run.wait_for_step(attempt, 3)
    node = run.beats(attempt)[0].host
    with rival(slurm, "-p", "whole", "-w", node) as job:
        assert "CPUAlloc=16" in slurm.run("scontrol", "show", "node", node)
        assert state_of(slurm, job) == "PENDING"
        operator.request(run.paths, "stop", by="tester")
        run.wait_for_end()
    outcome = run.outcome(attempt)
    assert outcome.world_size == 4
    assert outcome.committed_step == outcome.last_step


# Runs as another user. Slurm hides nothing from root.
LOOK = """
import json, subprocess, sys
from holdfast.workers.schedulers import slurm_client
words = ["sbatch", "--parsable", "-p", "secret", "-J", "unseen", "--hold", "--wrap", "true"]
job = subprocess.run([*words, "-o/dev/null"], capture_output=True, text=True).stdout.strip()
shown = slurm_client.show_job(job)
print(json.dumps([
    [one.job_id for one in slurm_client.queued_jobs("unseen")] == [job],
    job in slurm_client.listed_jobs(),
    shown is not None and shown.name == "unseen",
    any(one["PartitionName"] == "secret" for one in slurm_client.partitions()),
    any("secret" in one["Partitions"] for one in slurm_client.show_nodes()),
]))
subprocess.run(["scancel", job])
"""


@pytest.mark.more
def test_jobs_of_hidden_partitions_are_found(
    slurm: SlurmCluster, configured: Callable[..., None], tmp_path: Path
) -> None:
    configured(*SITE)
    # The user may still reach the files of this test.
    rights = "+dac_override,+dac_read_search"
    become = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", f"--inh-caps={rights}"]
    done = subprocess.run(
        [*become, f"--ambient-caps={rights}", sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/tmp",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True] * 5


@pytest.mark.more
def test_full_qos_refuses_for_now_and_the_text_is_shown(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    with qos(slurm, "few", "MaxSubmitJobsPerUser=1"):
        configured("AccountingStorageEnforce=limits,qos")
        with rival(slurm, "--qos=few", "--hold"):
            run = make(resources={"qos": "few"})
            with pytest.raises(SubmissionRefusedError) as caught:
                run.submit()
            assert caught.value.may_pass
            history = run.history()
            assert history.state == "waiting"
            assert "QOSMaxSubmitJobPerUserLimit" in history.attempts[0].waits_for


@pytest.mark.slow
def test_enforced_wckey_is_passed_on_and_an_unknown_one_is_refused_for_good(
    slurm: SlurmCluster, make: Make, configured: Callable[..., None]
) -> None:
    slurm.run("sacctmgr", "-i", "add", "user", "root", "wckey=physics")
    configured(*WITH_KEYS)
    try:
        extra = {"begin": "now+1hour", "wckey": "physics"}
        run = make(resources={"extra": extra})
        run.submit()
        line = slurm_client.show_job(run.history().attempts[0].job_id or "")
        assert line is not None
        assert (line.fields or {})["WCKey"] == "physics"
        operator.request(run.paths, "cancel", by="tester")
        run.wait_for_end()
        other = make(resources={"extra": {**extra, "wckey": "alchemy"}})
        with pytest.raises(SubmissionRefusedError, match=r"(?i)wckey") as caught:
            other.submit()
        assert not caught.value.may_pass
    finally:
        slurm.configure()
        slurm.run("sacctmgr", "-i", "delete", "user", "root", "wckey=physics")


def test_cluster_without_slurmdbd_is_refused_by_the_preflight(
    make: Make, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slurm's sockets need a short path.
    place, spec = tmp_path_factory.mktemp("slurm"), make().spec
    with SlurmCluster(place / "own", ClusterSpec(nodes=1, accounting=False)) as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        assert cluster.run("squeue", "-h") == ""
        assert slurm_client.recorded_jobs(name="any", since=time.time()) == []
        with pytest.raises(PreflightError, match="keeps no records of ended jobs"):
            preflight.check(spec, place)


def test_another_cluster_with_the_same_root_never_counts_a_job_as_lost(
    slurm: SlurmCluster,
    make: Make,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path_factory.mktemp("slurm")
    with rival(slurm, "-p", "prod", "-N4", "--gpus-per-node=4"):
        run = make()
        attempt = run.submit()
        submission = read_document(Submission, attempt.submission)
        assert submission is not None
        wait_until(lambda: slurm_client.show_job(submission.job_id), "the queued job", 30)
        spec = ClusterSpec(nodes=1, accounting=False, name="other")
        with SlurmCluster(place / "own", spec) as other, monkeypatch.context() as patch:
            for name, value in other.env.items():
                patch.setenv(name, value)
            # Its first job has the id of the run's job, perhaps, and must not be cancelled.
            while int(job := other.run("sbatch", "--parsable", "--wrap", "sleep 99").strip()) < int(
                submission.job_id
            ):
                other.run("scancel", job)
            request = read_document(Request, attempt.request)
            assert request is not None
            executor = executor_for("slurm")
            for ask in (executor.status, executor.cancel, executor.withdraw, executor.is_pending):
                with pytest.raises(SchedulerUnavailableError, match=r"'holdfast', but .* 'other'"):
                    ask(request, submission)
            for look in (executor.find, executor.live_jobs):
                with pytest.raises(SchedulerUnavailableError, match="run the command on a host"):
                    look(request)
            assert not reconcile(run.paths, writer="cli").attempts[-1].state.is_terminal
            assert other.run("squeue", "-h", "-j", job, "-o", "%T").strip()
        line = slurm_client.show_job(submission.job_id)
        assert line is not None
        assert line.state == "PENDING"
        executor.cancel(request, submission)


def test_federation_is_refused_by_the_preflight(
    slurm: SlurmCluster, make: Make, tmp_path: Path
) -> None:
    slurm.run("sacctmgr", "-i", "add", "federation", "east", "clusters=holdfast")
    try:
        wait_until(lambda: slurm_client.federation() == "east", "the federation", 30)
        with pytest.raises(PreflightError, match="in the federation 'east'"):
            preflight.check(make().spec, tmp_path)
    finally:
        slurm.run("sacctmgr", "-i", "delete", "federation", "east")
        wait_until(lambda: not slurm_client.federation(), "the end of the federation", 30)
