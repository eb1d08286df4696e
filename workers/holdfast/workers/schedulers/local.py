"""The local executor: one node, no queue, and jobs that outlive their submitter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.records.documents import Claim, Request, Submission, read_claim
from holdfast.contracts.states import AttemptState
from holdfast.workers.nodes import processes
from holdfast.workers.schedulers.base import GONE, REBOOTED, Executor, JobStatus

LAUNCH_TIMEOUT_S: Final = 120.0
LAUNCHER: Final = "holdfast.workers.executors.local_launch"
# submitit's process above the agent.
CONTROLLER: Final = "submitit.local._local"
# The kernel lists processes without delay, but a process that was just forked briefly has its
# parent's command line.
ABSENCE_S: Final = 1.0
# When a job is cancelled by force, its flusher may still have a sealed step to write.
CANCEL_TERM_WAIT_S: Final = 2.0


class LocalExecutor(Executor):
    """Jobs are process trees of this machine, found by documents and process names."""

    kind = "local"
    absence_s = ABSENCE_S

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        make_directory(paths.logs)
        python = request.launch.python or sys.executable
        command = [*request.launch.wrapper, python, "-m", LAUNCHER, str(paths.request)]
        log = paths.logs / "launch.log"
        try:
            with log.open("ab") as stream:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    timeout=LAUNCH_TIMEOUT_S,
                    start_new_session=True,
                    cwd="/",
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise SchedulerUnavailableError(
                f"the local job of attempt {request.attempt} was not started within "
                f"{LAUNCH_TIMEOUT_S:.0f} s; see {log}"
            ) from None
        except OSError as error:
            raise SchedulerError(f"cannot start {command[0]}: {error}") from error
        if done.returncode != 0:
            raise SchedulerError(
                f"the local job of attempt {request.attempt} was not started: "
                f"{_last_line(log)}; see {log}"
            )
        started = json.loads(done.stdout.splitlines()[-1])
        return Submission(executor=self.kind, submitted_at=time.time(), **started)

    def find(self, request: Request) -> Submission | None:
        paths = _paths(request)
        claim = _claim_here(paths)
        if claim is not None:
            return Submission(
                job_id=claim.job_id, executor=self.kind, submitted_at=claim.claimed_at
            )
        process = _find_job(paths)
        name = processes.name_process(process.pid) if process else None
        if process is None or name is None:
            return None
        return Submission(
            job_id=str(process.pid),
            executor=self.kind,
            submitted_at=process.create_time(),
            pid=process.pid,
            process_start_s=name.start_s,
            boot_id=name.boot_id,
        )

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        paths = _paths(request)
        claim = _claim_here(paths)
        if submission is not None:
            _check_host(submission.host, paths)
        names = _names(submission, claim)
        if any(processes.is_alive(name) for name in names):
            state = AttemptState.RUNNING if claim else AttemptState.PENDING
            return JobStatus(state=state, raw="running", nodes=(socket.gethostname(),))
        if claim is None:
            # An interrupted submission may name the launcher, which has ended since.
            if self.find(request) is not None:
                return JobStatus(state=AttemptState.PENDING, raw="running")
            if submission is None:
                return JobStatus(state=None, detail="the job has not started yet")
        gone = [f"process {name.pid} of the local job is gone" for name in names]
        if any(name.boot_id != processes.boot_id() for name in names):
            gone.append("this machine has rebooted since")
            return JobStatus(state=AttemptState.LOST, raw=REBOOTED, evidence=tuple(gone))
        return JobStatus(state=AttemptState.LOST, raw=GONE, evidence=tuple(gone))

    def cancel(self, request: Request, submission: Submission) -> None:
        paths = _paths(request)
        names = _names(submission, _claim_here(paths))
        roots = [p for p in (processes.find_process(name) for name in names) if p is not None]
        tree = {p.pid: p for root in roots for p in (root, *processes.descendants(root))}
        left = processes.end_processes(tree.values(), term_wait_s=CANCEL_TERM_WAIT_S)
        if left:
            raise SchedulerError(
                f"processes {left} of attempt {request.attempt} did not end; they may wait for "
                "a device or a file system"
            )


def _paths(request: Request) -> AttemptPaths:
    return RunPaths(Path(request.run_directory)).attempt(request.attempt)


def _claim_here(paths: AttemptPaths) -> Claim | None:
    """Return the attempt's claim; raise if another machine made it, whose processes are unseen."""
    claim = read_claim(paths)
    _check_host(claim.host if claim else None, paths)
    return claim


def _check_host(host: str | None, paths: AttemptPaths) -> None:
    if host not in {None, socket.gethostname()}:
        raise SchedulerUnavailableError(
            f"attempt {paths.number} runs on {host} with the local executor; run the command there"
        )


def _names(submission: Submission | None, claim: Claim | None) -> list[processes.ProcessName]:
    names = []
    if submission is not None and submission.pid is not None:
        started = submission.process_start_s or 0.0
        names.append(processes.ProcessName(submission.pid, started, submission.boot_id or ""))
    if claim is not None:
        names.append(processes.ProcessName(claim.pid, claim.process_start_s, claim.boot_id))
    return names


def _find_job(paths: AttemptPaths) -> psutil.Process | None:
    """Return the first process of the job, or its launcher, which exits once it has started it."""
    for module in (CONTROLLER, LAUNCHER):
        found = [p for p in psutil.process_iter() if _is_of(p, module, paths)]
        if found:
            return min(found, key=lambda one: (one.create_time(), one.pid))
    return None


def _is_of(process: psutil.Process, module: str, paths: AttemptPaths) -> bool:
    """Return True for a process that runs `module` for this attempt."""
    if process.pid == os.getpid():
        return False
    try:
        arguments: list[str] = process.cmdline()
    except psutil.Error:
        return False
    own = {str(paths.logs), str(paths.request)}
    return module in arguments and bool(own & set(arguments))


def _last_line(log: Path) -> str:
    lines: list[Any] = [line for line in log.read_text(errors="replace").splitlines() if line]
    return str(lines[-1]) if lines else "it printed no error"
