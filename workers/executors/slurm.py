"""Slurm: submission through submitit, everything else through our own bounded questions."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from holdfast.contracts.attempt import Request, Submission
from holdfast.contracts.durable import make_directory
from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.paths import AttemptPaths
from holdfast.contracts.spec import Resources
from holdfast.contracts.states import AttemptState
from holdfast.workers import slurm_client
from holdfast.workers.executors.base import Executor, JobStatus
from holdfast.workers.request import NO_GRES
from holdfast.workers.slurm_client import JobLine, gpus_of
from holdfast.workers.slurm_states import bare_word, translate

SBATCH_TIMEOUT_S: Final = 60
# A job just taken may not be in the accounts yet; within this time an absence says nothing.
ABSENCE_MATURES_S: Final = 60.0
_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "MAINT", "RESERVED", "NO_RESPOND", "NOT_RESPONDING")


class _BoundedSlurmExecutor(submitit.SlurmExecutor):
    """submitit's executor with a bound on sbatch, which by itself may wait for minutes."""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        bound = ["timeout", "--kill-after=5", str(SBATCH_TIMEOUT_S)]
        return [*bound, "sbatch", str(submission_file_path)]


class SlurmExecutor(Executor):
    """Jobs of a Slurm cluster whose commands work on this host."""

    kind = "slurm"

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        from holdfast.workers.agent.main import run_agent

        make_directory(paths.logs)
        python = shlex.quote(request.launch.python or sys.executable)
        executor = _BoundedSlurmExecutor(folder=paths.logs, python=python)
        try:
            executor.update_parameters(**request.scheduler)
            job = executor.submit(run_agent, str(paths.request))
        except (FailedJobError, FailedSubmissionError) as error:
            words = " ".join(str(error).split())[:1000]
            if "sbatch: error: Batch job submission failed" in words and slurm_client.is_refusal(
                words
            ):
                raise SchedulerError(f"Slurm refused {request.job_name}: {words}") from error
            raise SchedulerUnavailableError(
                f"nobody knows whether Slurm took {request.job_name}: {words}; it will be looked "
                "up by name before it is submitted again"
            ) from error
        return Submission(job_id=job.job_id, executor=self.kind, submitted_at=time.time())

    def find(self, request: Request) -> Submission | None:
        jobs = slurm_client.queued_jobs(request.job_name) or slurm_client.recorded_jobs(
            name=request.job_name, since=request.created_at
        )
        if not jobs:
            return None
        return Submission(
            job_id=jobs[0].job_id, executor=self.kind, submitted_at=request.created_at
        )

    def status(self, request: Request, submission: Submission | None) -> JobStatus:
        submission = submission or self.find(request)
        if submission is None:
            return self._absent(request.created_at, request.job_name)
        line = slurm_client.show_job(submission.job_id)
        # Slurm uses numbers again: a job of another name is another job.
        if line is not None and line.name == request.job_name:
            return _status_of(line)
        recorded = slurm_client.recorded_jobs(
            job_id=submission.job_id, since=submission.submitted_at
        )
        mine = [job for job in recorded if job.name == request.job_name]
        if mine:
            return _status_of(mine[-1])
        return self._absent(submission.submitted_at, request.job_name)

    def cancel(self, request: Request, submission: Submission) -> None:
        with contextlib.suppress(SchedulerError):
            line = slurm_client.show_job(submission.job_id)
            if line is not None and line.name != request.job_name:
                return
        try:
            slurm_client.call(["scancel", submission.job_id])
        except SchedulerUnavailableError:
            raise
        except SchedulerError as error:
            if "invalid job id" not in str(error).lower():
                raise

    def capacity(self, resources: Resources, held: Mapping[str, int] | None = None) -> int | None:
        try:
            nodes = slurm_client.show_nodes()
        except SchedulerError:
            return None
        held = held or {}
        free = [
            _free_gpus(node, resources, held.get(node.get("NodeName", ""), 0)) for node in nodes
        ]
        return ranks_that_fit(free, resources)

    def _absent(self, since: float, name: str) -> JobStatus:
        if slurm_client.now() - since < ABSENCE_MATURES_S:
            return JobStatus(state=None, detail="Slurm does not show the job yet")
        words = f"neither squeue nor sacct knows {name}"
        return JobStatus(state=AttemptState.LOST, detail=words, evidence=(words,))


def _status_of(line: JobLine) -> JobStatus:
    state = translate(line.state)
    has_ended = state is not None and state.is_terminal
    reason = "" if line.reason in {"None", "(null)"} else line.reason
    evidence = [f"Slurm: job {line.job_id} is {line.state}"]
    if has_ended and reason:
        evidence.append(f"Slurm: reason {reason}")
    for key in ("PreemptTime", "ExitCode"):
        value = (line.fields or {}).get(key, "")
        if value not in {"", "None", "N/A", "0:0", "Unknown"}:
            evidence.append(f"Slurm: {key} {value}")
    nodes = slurm_client.expand_hosts(line.nodes)
    batch_host = (line.fields or {}).get("BatchHost", "")
    # With --no-kill Slurm takes a lost node out of the job and lets the job be.
    is_leaderless = state is AttemptState.RUNNING and batch_host not in {"", *nodes}
    if is_leaderless:
        evidence.append(f"Slurm: {batch_host}, which led the job, is no longer among its nodes")
    return JobStatus(
        state=state,
        raw=bare_word(line.state),
        detail=reason or line.state,
        nodes=nodes,
        is_leaderless=is_leaderless,
        started_at=line.started_at,
        ended_at=line.ended_at if has_ended else None,
        evidence=tuple(evidence),
    )


def ranks_that_fit(free: Sequence[int], resources: Resources) -> int | None:
    """The most ranks that nodes with `free` GPUs each can start now; None where GPUs do not tell.

    A job of several nodes needs all that the spec asks for on each of them; one of a single node
    is content with a part, unless the spec's GRES says what a node must give.
    """
    if resources.gres == NO_GRES:
        return None
    wanted = gpus_of(resources.gres) if resources.gres else resources.gpus_per_node
    whole = sum(1 for count in free if count >= wanted)
    if whole or resources.gres:
        return whole * resources.gpus_per_node
    return max(free, default=0)


def _free_gpus(node: dict[str, str], resources: Resources, held: int) -> int:
    """GPUs of one node that a job with these resources could have now, `held` ones among them."""
    state = node.get("State", "").upper()
    if any(word in state for word in _UNUSABLE):
        return 0
    if resources.partition:
        wanted = set(resources.partition.split(","))
        if not wanted & set(node.get("Partitions", "").split(",")):
            return 0
    free = gpus_of(node.get("Gres", "")) - gpus_of(node.get("GresUsed", "")) + held
    return max(free, 0)
