"""Slurm that loses nodes, answers or its own state, played by commands as those of Slurm 22.05."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.histories import NOW, attempt_of, history_of, record_of, spec_of

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import SchedulerUnavailableError, SubmissionRefusedError
from holdfast.contracts.records.documents import Outcome, Submission, SubmissionTry, write_document
from holdfast.contracts.records.history import RunHistory, load_history
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor, _due_s
from holdfast.lineage.index import Index
from holdfast.workers.decisions.causes import classify
from holdfast.workers.decisions.policy import Decision, wait_after_refusal
from holdfast.workers.runs import endings, operator, reconcile, run_folders, successors
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.tending import allow_hosts_again, is_overdue
from holdfast.workers.runs.until_capacity import UNTIL_CAPACITY, ready_runs
from holdfast.workers.schedulers.base import FORGOTTEN
from holdfast.workers.schedulers.slurm import SlurmExecutor

ON_SLURM: Final = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, "partition": "spot"}
PARTITION: Final = "PartitionName=spot Default=YES Nodes=n[1-2] State=UP TotalNodes=2"
NODE: Final = (
    "NodeName={} CPUAlloc=0 CPUTot=16 ActiveFeatures=(null) Gres=gpu:4 GresUsed=gpu:0 "
    "State={} Partitions=spot "
)
JOB: Final = "JobId=7 JobName={} JobState=PENDING Reason=Resources ExcNodeList=n2 NodeList=(null)"
SILENCE: Final = "Unable to contact slurm controller (connect failure)"
REFUSAL: Final = "Requested node configuration is not available"


class Played:
    """Slurm's commands in a folder of PATH. Each gives the answer in a file of its name."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("scontrol", "squeue", "sacct", "sacctmgr", "scancel", "sbatch"):
            (folder / name).write_text(
                f'#!/bin/sh\necho "$0 $*" >> {folder}/calls\n'
                f'case "${{0##*/}} $*" in\n'
                f"*silent*) ;;\nesac\n"
                f'if [ -e {folder}/silent ]; then echo "{SILENCE}" >&2; exit 1; fi\n'
                f'case "${{0##*/}} $*" in\n'
                f'"scontrol update"*) exit 0;;\n'
                f'sbatch*) if grep -q -e --exclude= "$1"; then '
                f'echo "sbatch: error: Batch job submission failed: {REFUSAL}" >&2; exit 1; fi; '
                f'echo "Submitted batch job 7"; exit 0;;\n'
                f'*"show node"*) cat {folder}/nodes;;\n'
                f'*"show partition"*) echo "{PARTITION}";;\n'
                f'*"show job"*) if [ -s {folder}/job.out ]; then cat {folder}/job.out; '
                f'else echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi;;\n'
                f'sacctmgr*) echo "slurm_persist_conn_open: {SILENCE}" >&2; exit 1;;\n'
                f"sacct*) cat {folder}/sacct.out;;\n"
                f'*"show config"*) printf "ClusterName = c\\nSlurmdTimeout = 300 sec\\n'
                f'AccountingStorageEnforce = limits,qos\\n";;\n'
                f"esac\n"
            )
            (folder / name).chmod(0o755)
        for name in ("job.out", "sacct.out"):
            (folder / name).write_text("")
        self.set_nodes(n1="IDLE", n2="IDLE")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("HOLDFAST_HOME", str(folder / "home"))

    def set_nodes(self, **states: str) -> None:
        lines = [NODE.format(name, state) for name, state in states.items()]
        (self.folder / "nodes").write_text("\n".join(lines) + "\n")

    def fall_silent(self) -> None:
        (self.folder / "silent").touch()

    def calls(self, words: str) -> list[str]:
        """The calls of a command that contain `words`."""
        return [line for line in (self.folder / "calls").read_text().splitlines() if words in line]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path / "slurm", monkeypatch)


def make_run(root: Path, name: str = "r", **fields: Any) -> RunPaths:
    (root / "t.py").parent.mkdir(exist_ok=True)
    (root / "t.py").touch()
    spec = spec_of(
        resources=fields.pop("resources", ON_SLURM),
        launch={"working_directory": str(root)},
        supervision={"backoff_s": 0},
        **fields,
    )
    spec = spec.model_copy(update={"name": name})
    return run_folders.attach_or_create(spec, root, created_by="ann")[0]


# --- answers -------------------------------------------------------------------------------------


def test_no_answer_of_slurm_is_not_unlimited_capacity(slurm: Played) -> None:
    resources = Resources.model_validate(ON_SLURM)
    assert SlurmExecutor().capacity(resources) == 8
    assert SlurmExecutor().capacity(resources, exclude=("n2",)) == 4
    slurm.fall_silent()
    with pytest.raises(SchedulerUnavailableError, match="cannot reach Slurm"):
        SlurmExecutor().capacity(resources)


def test_unknown_limits_of_a_qos_are_not_unlimited_capacity(slurm: Played) -> None:
    resources = Resources.model_validate({**ON_SLURM, "qos": "low"})
    with pytest.raises(SchedulerUnavailableError, match="the limits of QOS low are unknown"):
        SlurmExecutor().capacity(resources)
    # Where the job can run is known all the same.
    room = SlurmExecutor().room(resources)
    assert room is not None
    assert (room.free_gpus(), room.largest_job(), room.largest_job(("n2",))) == (None, 8, 4)


@pytest.mark.parametrize(
    ("state", "free", "up"),
    [
        ("IDLE", 8, 8),
        ("IDLE*", 4, 4),
        ("MIXED+DRAIN", 4, 4),
        ("DOWN*", 4, 4),
        ("IDLE+PLANNED", 8, 8),
    ],
)
def test_a_node_that_starts_no_job_exists_but_is_not_up(
    state: str, free: int, up: int, slurm: Played
) -> None:
    slurm.set_nodes(n1="IDLE", n2=state)
    room = SlurmExecutor().room(Resources.model_validate(ON_SLURM))
    assert room is not None
    assert (room.free_gpus(), room.largest_job(is_up=True), room.largest_job()) == (free, up, 8)


def test_runs_that_wait_for_capacity_stay_paused_while_slurm_is_silent(
    slurm: Played, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for name in ("a", "b"):
        operator.request(make_run(root, name), "pause", by="me", reason=UNTIL_CAPACITY)
    assert [one.name for one in ready_runs(root)] == ["a"], "two nodes hold one of them"
    slurm.fall_silent()
    (slurm.folder / "calls").unlink()
    with pytest.raises(SchedulerUnavailableError):
        ready_runs(root)
    assert len(slurm.calls("show node")) == 1, "every run waits for the same answer"
    here = make_run(root, "here", resources={"gpus_per_node": 1})
    operator.request(here, "pause", by="me", reason=UNTIL_CAPACITY)
    assert [one.name for one in ready_runs(root)] == ["here"]


# --- refusals ------------------------------------------------------------------------------------


def lose(paths: RunPaths, host: str) -> None:
    """End the first attempt by the loss of a host."""
    with JournalWriter(paths.journal_of("flow")) as journal:
        journal.append(
            EventKind.ATTEMPT_ENDED,
            attempt=1,
            state=AttemptState.NODE_FAILED.value,
            cause=Cause.NODE_FAILURE.value,
            lost_hosts=[host],
            committed_step=5,
            ended_at=time.time() - 1000,
        )


@pytest.mark.usefixtures("slurm")
def test_a_run_goes_on_after_slurm_refused_its_exclusion(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "root")
    submit_next(paths, gpus=8, reason="first", exclude=())
    lose(paths, "n2")
    with pytest.raises(SubmissionRefusedError, match=r"which excludes n2: .*not available"):
        submit_next(paths, gpus=8, reason="second", exclude=("n2",))
    with Index() as index, JournalWriter(paths.journal_of("flow")) as journal:
        supervisor = Supervisor(
            paths=paths,
            index=index,
            log=logging.getLogger(__name__),
            submit=submit_next,
            is_acting=True,
        )
        for _ in range(2):
            supervisor._act(load_history(paths), journal)
    history = load_history(paths)
    _, refused, third = history.attempts
    assert (refused.state, refused.job_id) == (AttemptState.FAILED, None)
    assert refused.evidence[0].startswith("the scheduler refused the job 1 time: Slurm refused")
    assert (third.state, third.job_id) == (AttemptState.SUBMITTED, "7")
    assert third.request is not None
    assert third.request.exclude == ()
    assert "n2 (lost) allowed again, because Slurm refused" in third.request.reason


def test_a_refusal_for_another_reason_is_not_blamed_on_the_exclusion() -> None:
    tried = SubmissionTry(count=1, host="h", tried_at=NOW, refused="Invalid account", refusals=1)
    assert wait_after_refusal(tried, now=NOW) == 0.0


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_clock_that_is_wrong_delays_no_submission(skew_s: float) -> None:
    tried = SubmissionTry(
        count=1, host="h", tried_at=NOW + skew_s, refused="later", may_pass=True, refusals=9
    )
    assert wait_after_refusal(tried, now=NOW) == 0.0


# --- a pending job -------------------------------------------------------------------------------


def test_a_pending_job_may_use_a_host_again_when_others_go_down(
    slurm: Played, tmp_path: Path
) -> None:
    paths = make_run(tmp_path / "root", resources={**ON_SLURM, "nodes": 1})
    submit_next(paths, gpus=4, reason="first", exclude=())
    attempt = submit_second(paths, exclude=("n2",))
    name = load_history(paths).attempts[1].request
    assert name is not None
    (slurm.folder / "job.out").write_text(JOB.format(name.job_name) + "\n")

    def allow() -> str:
        return allow_hosts_again(load_history(paths), now=time.time(), writer="flow")

    assert attempt.number == 2
    assert "the pending job may use n2 again" in allow(), "n2 never failed, so nothing excludes it"
    assert slurm.calls("scontrol update") == [
        f"{slurm.folder}/scontrol update JobId=7 ExcNodeList="
    ]
    changed = JOB.format(name.job_name).replace("ExcNodeList=n2", "ExcNodeList=(null)")
    (slurm.folder / "job.out").write_text(changed + "\n")
    assert allow() == "", "it is said once"
    notes = [e.data["text"] for e in load_history(paths).events if e.kind is EventKind.NOTE]
    assert notes == ["the pending job may use n2 again"]


def test_an_adopted_successor_does_not_wait_for_a_job_that_still_ends(
    slurm: Played, tmp_path: Path
) -> None:
    """Slurm ends a job whose node is lost only after a while."""
    paths = make_run(tmp_path / "root", resources={**ON_SLURM, "standby": "successor"})
    submit_next(paths, gpus=8, reason="first", exclude=())
    request = load_history(paths).attempts[0].request
    assert request is not None
    job = Submission(job_id="7", executor="slurm", submitted_at=NOW)
    waiting = JOB.format(request.job_name) + " Dependency=afterany:6(unfulfilled)"
    for line, changes in (
        (waiting, 1),
        (waiting.replace("PENDING", "RUNNING"), 0),
        (waiting.replace("afterany:6(unfulfilled)", "(null)"), 0),
        (waiting.replace(request.job_name, "another"), 0),
        ("", 0),
    ):
        (slurm.folder / "job.out").write_text(f"{line}\n" if line else "")
        before = len(slurm.calls("scontrol update"))
        successors.let_start(request, job)
        found = slurm.calls("scontrol update")[before:]
        assert found == [f"{slurm.folder}/scontrol update JobId=7 Dependency="] * changes, line
    slurm.fall_silent()
    successors.let_start(request, job)


def submit_second(paths: RunPaths, exclude: tuple[str, ...]) -> AttemptPaths:
    """Write the second attempt as if Slurm had accepted it with its exclusion."""
    with JournalWriter(paths.journal_of("flow")) as journal:
        journal.append(
            EventKind.ATTEMPT_ENDED,
            attempt=1,
            state=AttemptState.PREEMPTED.value,
            cause=Cause.PREEMPTION.value,
            ended_at=time.time(),
        )
    history = load_history(paths)
    attempt = paths.attempt(2)
    attempt.directory.mkdir()
    request = build_request(
        history.record, history.spec, attempt=2, gpus=4, reason="second", exclude=exclude
    )
    write_document(attempt.request, request)
    write_document(
        attempt.submission, Submission(job_id="7", executor="slurm", submitted_at=time.time())
    )
    return attempt


def test_a_job_before_the_last_fallback_is_not_overdue() -> None:
    spec = spec_of(
        resources={**ON_SLURM, "fallbacks": [{"partition": "prod"}]},
        supervision={"pending_timeout_min": 10},
    )
    view = attempt_of(spec, 1, None, state=AttemptState.PENDING)
    assert view.request is not None
    for place, overdue in ((0, False), (1, True)):
        request = view.request.model_copy(update={"place": place})
        waits = replace(view, request=request, submitted_at=NOW - 6000)
        assert is_overdue(spec, waits, now=NOW) is overdue


# --- a controller without its state --------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "raw", "cause"),
    [
        ("CANCELLED", FORGOTTEN, Cause.INFRASTRUCTURE),
        ("RUNNING", FORGOTTEN, Cause.INFRASTRUCTURE),
        ("PENDING", FORGOTTEN, Cause.INFRASTRUCTURE),
        ("CANCELLED by 0", "CANCELLED", Cause.OPERATOR),
        ("CANCELLED by 1000", "CANCELLED", Cause.OPERATOR),
        ("PREEMPTED", "PREEMPTED", Cause.PREEMPTION),
    ],
)
def test_a_job_that_nobody_cancelled_is_no_operators_cancellation(
    state: str, raw: str, cause: Cause, slurm: Played
) -> None:
    spec = spec_of(resources=ON_SLURM)
    request = build_request(record_of(spec), spec, attempt=1, gpus=8, reason="x", created_at=NOW)
    line = f"7|{request.job_name}|{state}|2026-03-01T10:00:00|2026-03-01T10:01:00|n[1-2]|0:0"
    (slurm.folder / "sacct.out").write_text(line + "\n")
    job = Submission(job_id="7", executor="slurm", submitted_at=NOW)
    status = SlurmExecutor().status(request, job)
    assert (status.raw, status.has_ended) == (raw, True)
    for claimed in (False, True):
        ending = classify(outcome=None, status=status, claimed=claimed)
        assert ending.cause is cause
    signalled = Outcome(
        state=AttemptState.PREEMPTED,
        cause=Cause.PREEMPTION,
        evidence=("signal: SIGTERM",),
        job_id="7",
        world_size=8,
        started_at=0,
        ended_at=1,
    )
    corrected = classify(outcome=signalled, status=status)
    assert corrected.cause is cause
    if raw == FORGOTTEN:
        assert "the controller no longer knows it" in corrected.evidence[-1]


# --- clocks of nodes -----------------------------------------------------------------------------


def ended(ended_at: float, **facts: float) -> RunHistory:
    view = attempt_of(spec_of(), 1, Cause.HANG, ended_at=ended_at)
    return history_of(spec_of(), replace(view, facts=facts))


@pytest.mark.parametrize(
    ("history", "waited_s", "due_s"),
    [
        (ended(NOW - 4), 0.0, 6.0),
        (ended(NOW + 3600), 0.0, 10.0),
        # The supervisor counts itself while that clock is in the future.
        (ended(NOW + 3600), 7.0, 3.0),
        (ended(NOW + 3600, noticed_at=NOW - 4), 0.0, 6.0),
        (ended(NOW - 3600, noticed_at=NOW - 4), 0.0, 6.0),
        (ended(NOW - 3600), 0.0, 0.0),
        (ended(NOW + 3600, noticed_at=NOW + 7200), 60.0, 0.0),
    ],
)
def test_a_nodes_clock_neither_prolongs_nor_skips_the_delay(
    history: RunHistory, waited_s: float, due_s: float
) -> None:
    decision = Decision(action="relaunch", reason="r", gpus=4, delay_s=10.0)
    assert _due_s(history, decision, NOW, waited_s) == due_s


@pytest.mark.parametrize("skew_s", [-86_400.0, 0.0, 86_400.0])
def test_slurm_gets_its_time_to_report_whatever_the_nodes_clock_says(
    skew_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Played
) -> None:
    paths = make_run(tmp_path / "root")
    attempt = submit_next(paths, gpus=8, reason="first", exclude=())
    outcome = Outcome(
        state=AttemptState.PREEMPTED,
        cause=Cause.PREEMPTION,
        evidence=("signal: SIGTERM",),
        job_id="7",
        world_size=8,
        started_at=0,
        ended_at=time.time() + skew_s,
    )
    write_document(attempt.outcome, outcome)
    slurm.fall_silent()
    assert not reconcile.reconcile(paths).attempts[0].state.is_terminal
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + endings.VERDICT_WAIT_S + 1)
    assert reconcile.reconcile(paths).attempts[0].state is AttemptState.PREEMPTED


def test_each_host_counts_for_itself_how_long_a_job_is_missing(
    slurm: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_run(tmp_path / "root")
    attempt = submit_next(paths, gpus=8, reason="first", exclude=())
    job = Submission(job_id="7", executor="slurm", submitted_at=time.time() - 1e6)
    write_document(attempt.submission, job)
    now = {"boot-a": 1000.0, "boot-b": 5.0}
    here = ["boot-a"]
    monkeypatch.setattr(endings, "boot_id", lambda: here[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[here[0]])

    def is_over() -> bool:
        return reconcile.reconcile(paths).attempts[0].state.is_terminal

    assert not is_over()
    here[0] = "boot-b"
    assert not is_over(), "this host has just begun to count, whatever its clocks show"
    now["boot-b"] += 299.0
    assert not is_over()
    here[0], now["boot-a"] = "boot-a", now["boot-a"] + 301.0
    assert is_over()
