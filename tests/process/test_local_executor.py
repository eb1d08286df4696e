"""Local jobs: submitted once, outlive their submitter, are found again, can be cancelled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun, processes_of, wait_until

from holdfast.contracts.account.timeline import spans_of
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.records.documents import Claim, Request, Submission, read_document
from holdfast.contracts.records.saving import saves_by_holdfast, trained_in
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.attempt_costs import measured_costs
from holdfast.workers.runs import attempts
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.run_folders import read_record
from holdfast.workers.schedulers import executor_for
from holdfast.workers.schedulers.local import CONTROLLER

# Submits like a flow, in a process that is then killed with its process group.
SUBMITTER = """
import sys, time
from pathlib import Path
from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs import attempts, run_folders
paths = RunPaths(Path(sys.argv[1]))
record = run_folders.read_record(paths)
spec = RunSpec.model_validate(record.spec)
with JournalWriter(paths.journal_of("flow")) as journal:
    attempts.submit_attempt(paths, spec, record, gpus=1, reason="x", journal=journal)
print("submitted", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    """A run whose program only sleeps, without torch.distributed."""
    one = LocalRun(tmp_path, gpus=1, session=False, sleep_s=3)
    yield one
    one.end_all()


def request_of(run: LocalRun) -> Request:
    request = read_document(Request, run.paths.attempt(1).request)
    assert request is not None
    return request


@pytest.mark.more
def test_job_outlives_the_process_group_that_submitted_it(run: LocalRun) -> None:
    flow = subprocess.Popen(
        [sys.executable, "-c", SUBMITTER, str(run.paths.directory)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"submitted\n"
    os.killpg(flow.pid, signal.SIGKILL)
    flow.wait(10)
    claim = run.claim(run.paths.attempt(1))
    found = executor_for("local").find(request_of(run))
    assert found is not None
    assert found.job_id == claim.job_id
    assert run.history().attempts[0].state is AttemptState.RUNNING
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED


@pytest.mark.more
def test_two_ranks_train_on_a_node_without_gpus(tmp_path: Path) -> None:
    resources = {"gpus_per_node": 0, "nproc_per_node": 2}
    run = LocalRun(tmp_path, resources=resources, steps=5)
    attempt = run.submit()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED, view.evidence
    assert view.outcome is not None
    assert (view.outcome.world_size, view.gpus, view.last_step) == (2, 2, 5)
    assert [span.gpus for span in spans_of(run.history())] == [0]
    assert attempt.rank_log(0, 1, 1, "stdout").exists(), "the second rank has a log of its own"
    costs = measured_costs(run.history())
    assert 0.02 <= costs.step_s < 20.0
    assert 0.0 < costs.start_s < (view.ended_at or 0.0) - run.history().record.created_at


def test_a_job_gets_the_gpus_that_its_submitter_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "show.py"
    program.write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c,MIG-41b36fb4/1/0,2")
    own = {"checkpoints": "ck-{step}", "launcher": "none"}
    run = LocalRun(tmp_path, gpus=2, program=program, own=own)
    run.submit()
    assert run.wait_for_end().state is AttemptState.COMPLETED
    (log,) = run.paths.attempt(1).directory.glob("logs/**/stdout.log")
    assert log.read_text() == "GPU-8932f937-d72c,MIG-41b36fb4/1/0\n"


@pytest.mark.more
def test_a_failed_setup_line_ends_the_run_and_is_named(tmp_path: Path) -> None:
    setup = ["source /etc/profile", "module load cudaa", "export A=1"]
    run = LocalRun(tmp_path, gpus=1, steps=3, launch={"setup": setup})
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR), view.evidence
    failed = "launch.setup line 2 failed with exit status 127: module load cudaa"
    assert view.evidence[0].startswith(failed)
    assert "module: command not found" in view.evidence[1]


@pytest.mark.more
def test_setup_lines_of_bash_reach_an_opaque_program(tmp_path: Path) -> None:
    (tmp_path / "site.sh").write_text("module() { export LOADED=$2; }\nfalse\ntrue\n")
    program = tmp_path / "show.py"
    program.write_text("import os\nprint(os.environ['LOADED'])\n")
    setup = [f"source {tmp_path}/site.sh", "if true; then", "module load cuda", "fi"]
    own = {"checkpoints": "ck-{step}", "launcher": "none"}
    run = LocalRun(tmp_path, gpus=1, program=program, own=own, launch={"setup": setup})
    run.submit()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED, view.evidence
    (log,) = run.paths.attempt(1).directory.glob("logs/**/stdout.log")
    assert log.read_text() == "cuda\n"


@pytest.mark.more
@pytest.mark.parametrize("session", [False, True])
def test_a_run_without_a_session_is_known_to_save_nothing(tmp_path: Path, session: bool) -> None:
    run = LocalRun(tmp_path, gpus=1, session=session, sleep_s=0.1, steps=3)
    run.submit()
    assert run.wait_for_end().state is AttemptState.COMPLETED
    assert saves_by_holdfast(trained_in(run.history())) is session


@pytest.mark.more
def test_ranks_meet_on_the_interface_of_the_spec(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, steps=3, launch={"network_interface": "lo"})
    run.submit()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED, view.evidence


def test_node_without_the_interface_fails_as_a_user_error_that_names_it(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, steps=3, launch={"network_interface": "nosuch0"})
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR), view.evidence
    assert f"node {socket.gethostname()}: launch.network_interface 'nosuch0'" in view.evidence[0]
    assert "lo" in view.evidence[0].partition("it has ")[2].split(", ")


@pytest.mark.more
def test_job_is_found_before_its_claim_and_not_submitted_twice(run: LocalRun) -> None:
    attempt = run.submit()
    written = read_document(Submission, attempt.submission)
    assert written is not None
    # The state after a crash between the job's start and the write of the submission.
    attempt.submission.unlink()
    with JournalWriter(run.paths.journal_of("flow")) as journal:
        resumed = attempts.resume_submission(run.paths, journal)
    assert resumed == attempt
    again = read_document(Submission, attempt.submission)
    assert again is not None
    assert again.job_id == written.job_id
    run.wait_for_end()
    assert len(run.events(EventKind.CLAIMED)) == 1


@pytest.mark.more
def test_second_job_of_an_attempt_exits_before_training(run: LocalRun) -> None:
    attempt = run.submit()
    first = run.claim(attempt)
    second = executor_for("local").submit(attempt, request_of(run))
    assert second.job_id != first.job_id
    notes = wait_until(
        lambda: [e for e in run.events(EventKind.NOTE) if "belongs to job" in e.data["text"]],
        "the second job's note",
    )
    assert f"job {second.job_id}" in notes[0].data["text"]
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED
    assert len(run.events(EventKind.CLAIMED)) == 1
    assert len(run.events(EventKind.LAUNCH_STARTED)) == 1
    assert read_document(Claim, attempt.claim) == first


@pytest.mark.more
def test_forced_cancel_leaves_no_process(run: LocalRun) -> None:
    attempt = run.submit()
    run.claim(attempt)
    executor = executor_for("local")
    submission = read_document(Submission, attempt.submission)
    assert submission is not None
    executor.cancel(request_of(run), submission)
    wait_until(lambda: not processes_of(run.paths), "the end of every process")
    executor.cancel(request_of(run), submission)
    view = run.wait_for_end()
    assert view.state in {AttemptState.LOST, AttemptState.PREEMPTED}
    assert view.cause in {Cause.UNKNOWN, Cause.PREEMPTION}


def test_job_is_not_lost_if_the_recorded_pid_is_its_launcher(run: LocalRun) -> None:
    """A flow killed while the launcher runs may have recorded the launcher's pid."""
    attempt, executor = run.paths.attempt(1), executor_for("local")
    record = read_record(run.paths)
    request = build_request(record, run.spec, attempt=1, gpus=1, reason="a test")
    launcher = Submission(job_id="1", executor="local", submitted_at=0.0, pid=2**22 + 1, boot_id="")
    command = [sys.executable, "-c", "input()", CONTROLLER, str(attempt.logs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as controller:
        found = executor.find(request)
        assert found is not None
        assert found.pid == controller.pid
        assert executor.status(request, launcher).state is AttemptState.PENDING
        controller.communicate(b"\n")
    assert executor.status(request, launcher).has_ended


@pytest.mark.more
def test_reused_pid_is_not_taken_for_the_job(run: LocalRun) -> None:
    attempt = run.submit()
    run.wait_for_end()
    submission = read_document(Submission, attempt.submission)
    assert submission is not None
    wait_until(lambda: not processes_of(run.paths), "the end of every process")
    other = submission.model_copy(update={"pid": os.getpid(), "process_start_s": 1.0})
    executor = executor_for("local")
    assert executor.status(request_of(run), other).has_ended
    # If this cancelled the reused pid, it would kill the test process.
    executor.cancel(request_of(run), other)
    assert read_document(Submission, attempt.submission) == submission
