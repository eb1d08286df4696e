"""The Slurm executor: submitit submits, and bounded calls of `slurm_client` do the rest."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from holdfast.contracts import errors
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.paths import AttemptPaths, ConsumerPaths, SuccessorPaths, account_name
from holdfast.contracts.records.documents import Request, Submission
from holdfast.contracts.spec import part, slurm_options
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.states import AttemptState
from holdfast.workers.nodes.setup_lines import checked_lines
from holdfast.workers.schedulers import base, slurm_capacity, slurm_client, slurm_restarts
from holdfast.workers.schedulers.slurm_client import JobLine, bare_state, translate

SBATCH_TIMEOUT_S: Final = 60
AGENT: Final = "holdfast.workers.agent.main"
SUCCESSOR: Final = "holdfast.workers.agent.successor"
CONSUMER: Final = "holdfast.workers.checkpoints.consumer_process"
RESTARTED: Final = "holdfast.workers.agent.restart"
# How long a job may exist before Slurm lists it. A submission that timed out here may wait for
# minutes in a loaded controller, and accounting lags behind the controller.
ABSENCE_S: Final = 300.0
NO_DEPENDENCY: Final = "(null)"
# Variables by which a site gives its users an account and the like. The spec's keys come first.
SITE_DEFAULTS: Final = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_WCKEY": "wckey",
}


class _BoundedSlurmExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor with a time limit on sbatch, which may otherwise take minutes.

    The jobs start the agent directly. submitit's own start waits for a file named after the job's
    id, so a job whose id never arrived here could not start.
    """

    request: Path
    module: str

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m {self.module} {shlex.quote(str(self.request))}"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        clean = [argument for name in self._variables_to_hide() for argument in ("-u", name)]
        bound = ["timeout", "--kill-after=5", str(SBATCH_TIMEOUT_S)]
        return ["env", *clean, *bound, "sbatch", str(submission_file_path)]

    def _variables_to_hide(self) -> list[str]:
        """Return the variables of this process that would change the job or its environment.

        sbatch prefers its `SBATCH_*` variables to the request. It also passes its environment to
        the job, where the variables of an allocation around this process would contradict the
        job's own.
        """
        given = {**self.parameters, **self.parameters.get("additional_parameters", {})}
        requested = {name for name, value in given.items() if value is not None}
        return [
            name
            for name in os.environ
            if (slurm_client.is_users_default(name) or name.startswith("SUBMITIT_"))
            and (name not in SITE_DEFAULTS or SITE_DEFAULTS[name] in requested)
        ]


def _check_parameters(request: Request) -> None:
    """Raise `SubmissionRefusedError` for values that must not be in an sbatch script.

    A run recorded by an earlier version may have options or line breaks that new specs may not
    have. This refuses those that would end a line of the script or lose the job.
    """
    launch = request.launch
    given = {"launch.python": launch.python, "launch.wrapper": launch.wrapper, **request.scheduler}
    found = {
        key: part.problem_with_value(one, several_lines=key == "setup")
        for key, one in given.items()
    }
    problems = [f"{key}: {problem}" for key, problem in found.items() if problem]
    extra = request.resources.extra
    problems += [
        problem
        for name in extra
        if (problem := slurm_options.problem_with_option(name, slurm_options.LOSES_JOB))
    ]
    if problem := slurm_options.problem_with_setup(request.scheduler.get("setup") or ()):
        problems.append(f"launch.setup: {problem}")
    if problems:
        raise errors.SubmissionRefusedError(
            f"{request.job_name} was not submitted: its recorded spec has values that this version "
            f"refuses: {'; '.join(problems)}. Fork the newest checkpoint with other values "
            f"(`holdfast fork {request.run}:CHECKPOINT --set KEY=VALUE`)",
            may_pass=False,
        )


class SlurmExecutor(base.Executor):
    """Runs jobs on a Slurm cluster whose commands work on this host."""

    kind = "slurm"
    absence_s = ABSENCE_S

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        return self._submit(paths, request, RESTARTED if request.expedite else AGENT)

    def submit_successor(self, paths: SuccessorPaths, request: Request) -> Submission:
        return self._submit(paths, request, SUCCESSOR)

    def submit_consumer(self, paths: ConsumerPaths, request: Request) -> Submission:
        return self._submit(paths, request, CONSUMER)

    def _submit(self, paths: AttemptPaths, request: Request, module: str) -> Submission:
        """Submit a job that starts `module` on each node, with the path of the request."""
        _check_parameters(request)
        make_directory(paths.logs)
        python = shlex.join([*request.launch.wrapper, request.launch.python or sys.executable])
        executor = _BoundedSlurmExecutor(folder=paths.logs, python=python)
        executor.request, executor.module = paths.request, module
        try:
            setup = checked_lines("launch.setup", request.scheduler.get("setup") or ())
            executor.update_parameters(**{**request.scheduler, "setup": setup or None})
            # submitit pickles a call, which nothing reads: the job's command starts the agent.
            job = executor.submit(str, paths.request)
        except (FailedJobError, FailedSubmissionError) as error:
            message = " ".join(str(error).split())[:1000]
            passes = slurm_client.may_pass(message)
            is_answer = "Batch job submission failed" in message or not passes
            if is_answer and slurm_client.is_refusal(message):
                hosts = request.exclude if slurm_client.concerns_nodes(message) else ()
                because = f", {base.BECAUSE_EXCLUDED} {', '.join(hosts)}" if hosts else ""
                raise errors.SubmissionRefusedError(
                    f"Slurm refused {request.job_name}{because}: {message}", may_pass=passes
                ) from error
            raise errors.SchedulerUnavailableError(
                f"it is unknown whether Slurm accepted {request.job_name}: {message}; it is looked "
                "up by name before it is submitted again"
            ) from error
        return Submission(job_id=job.job_id, executor=self.kind, submitted_at=time.time())

    def cluster(self) -> str | None:
        return slurm_client.cluster_name()

    def expedites(self) -> bool:
        ask = partial(slurm_client.shared_call, age_s=slurm_client.CAPACITY_AGE_S)
        return not slurm_restarts.problem_with_cluster(slurm_client.settings(ask))

    def start_of(self, request: Request, submission: Submission) -> base.JobStart | None:
        line = self._show(request, submission)
        return None if line is None else slurm_restarts.start_of(line)

    def end_restarts(self, request: Request, submission: Submission) -> bool:
        start = self.start_of(request, submission)
        if start is not None and start.restarts == submission.restarts and not _is_over(start):
            with contextlib.suppress(errors.SubmissionRefusedError):
                self._forbid_restart(submission)
            # Slurm may have restarted it meanwhile.
            start = self.start_of(request, submission)
        if start is not None and start.restarts > submission.restarts and not _is_over(start):
            self._scancel(submission.job_id)
            start = self.start_of(request, submission)
        return start is None or _is_over(start)

    def _forbid_restart(self, submission: Submission) -> None:
        try:
            slurm_client.call(["scontrol", "update", f"JobId={submission.job_id}", "Requeue=0"])
        except errors.SchedulerUnavailableError:
            raise
        except errors.SchedulerError as error:
            # A job that ends at this moment. Its state is asked for again.
            raise errors.SubmissionRefusedError(str(error)) from error

    def find(self, request: Request) -> Submission | None:
        if request.restart_of:
            # Its job has the name of an earlier attempt, so it is known by its submission only.
            return None
        _require_cluster(request)
        jobs = slurm_client.queued_jobs(request.job_name) or slurm_client.recorded_jobs(
            name=request.job_name, since=request.created_at
        )
        if not jobs:
            return None
        return Submission(
            job_id=jobs[0].job_id, executor=self.kind, submitted_at=request.created_at
        )

    def live_jobs(self, request: Request) -> tuple[Submission, ...]:
        _require_cluster(request)
        live = [
            job.job_id
            for job in slurm_client.queued_jobs(request.job_name)
            if not (translate(job.state) or AttemptState.PENDING).is_terminal
        ]
        found = [
            Submission(job_id=job_id, executor=self.kind, submitted_at=request.created_at)
            for job_id in sorted(live, key=_serial)
        ]
        if not request.expedite:
            return tuple(found)
        # The newest start of each, so that `cancel` ends it.
        starts = [(job, self.start_of(request, job)) for job in found]
        return tuple(
            job.model_copy(update={"restarts": start.restarts}) for job, start in starts if start
        )

    def withdraw(self, request: Request, submission: Submission) -> None:
        # Slurm checks the state itself, so a job that starts at this moment is not cancelled.
        if self._show(request, submission) is not None:
            self._scancel("--state=PENDING", submission.job_id)

    def is_pending(self, request: Request, submission: Submission) -> bool:
        return self._show_pending(request, submission) is not None

    def change_exclusion(
        self, request: Request, submission: Submission, exclude: Collection[str]
    ) -> bool:
        line = self._show_pending(request, submission)
        if line is None:
            return False
        before = slurm_client.expand_hosts((line.fields or {}).get("ExcNodeList", ""))
        if set(before) == set(exclude):
            return False
        hosts = f"ExcNodeList={','.join(exclude)}"
        slurm_client.call(["scontrol", "update", f"JobId={submission.job_id}", hosts])
        return True

    def drop_dependency(self, request: Request, submission: Submission) -> bool:
        line = self._show_pending(request, submission)
        if line is None:
            return False
        if (line.fields or {}).get("Dependency", NO_DEPENDENCY) in {"", NO_DEPENDENCY}:
            return False
        slurm_client.call(["scontrol", "update", f"JobId={submission.job_id}", "Dependency="])
        return True

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> base.JobStatus:
        _require_cluster(request)
        submission = submission or self.find(request)
        if submission is None:
            return self._absent(request.created_at, request.job_name)
        if request.expedite:
            return self._status_of_start(request, submission, since)
        # Slurm reuses job ids, so a job with another name is another job.
        line = slurm_client.listed_jobs(since=since).get(submission.job_id)
        if line is not None and line.name == request.job_name:
            return _status_of(line)
        # The job has ended, or was submitted after the shared answer.
        line = self._show(request, submission)
        if line is not None:
            return _status_of(line)
        if recorded := _recorded(request, submission):
            return _recorded_status(recorded[-1])
        return self._absent(submission.submitted_at, request.job_name)

    def _status_of_start(
        self, request: Request, submission: Submission, since: float
    ) -> base.JobStatus:
        """Return the status of one start of a job that Slurm may restart.

        Slurm is asked about this job alone only while the answer about all jobs does not show this
        start. The processes of this host share that, too.
        """
        listed = slurm_client.listed_starts(since=since).get(submission.job_id)
        if (
            listed is not None
            and listed.name == request.job_name
            and slurm_restarts.restarts_of(listed.fields) == submission.restarts
        ):
            return _status_of(listed)
        ask = partial(slurm_client.shared_call, age_s=slurm_client.JOBS_AGE_S, since=since)
        line = self._show(request, submission, ask)
        rows: list[JobLine] = []
        if line is None or slurm_restarts.restarts_of(line.fields):
            rows = _recorded(request, submission)
        if line is None:
            if len(rows) <= submission.restarts:
                return self._absent(submission.submitted_at, request.job_name)
            return _recorded_status(rows[submission.restarts])
        start = slurm_restarts.start_of(line)
        if start.restarts <= submission.restarts:
            return _status_of(line)
        return slurm_restarts.status_before(_status_of(line), submission.restarts, start, rows)

    def cancel(self, request: Request, submission: Submission) -> None:
        # Without an answer, nothing is cancelled: the id may be that of another job by now.
        line = self._show(request, submission)
        if line is None:
            return
        if request.expedite and slurm_restarts.restarts_of(line.fields) > submission.restarts:
            # That start has ended. `end_restarts` cancels a later one.
            return
        self._scancel(submission.job_id)

    def _show(
        self, request: Request, submission: Submission, ask: slurm_client.Ask | None = None
    ) -> JobLine | None:
        """Return the job as Slurm knows it; None if the id is unknown or of another job."""
        _require_cluster(request)
        line = slurm_client.show_job(submission.job_id, ask)
        return line if line is not None and line.name == request.job_name else None

    def _show_pending(self, request: Request, submission: Submission) -> JobLine | None:
        line = self._show(request, submission)
        return line if line is not None and bare_state(line.state) == "PENDING" else None

    def _scancel(self, *arguments: str) -> None:
        try:
            slurm_client.call(["scancel", *arguments])
        except errors.SchedulerUnavailableError:
            raise
        except errors.SchedulerError as error:
            if "invalid job id" not in str(error).lower():
                raise

    def room(
        self,
        resources: Resources,
        held: Mapping[str, int] | None = None,
        *,
        is_urgent: bool = True,
    ) -> slurm_capacity.Room | None:
        held = held or {}
        shared = partial(slurm_client.shared_call, age_s=slurm_client.CAPACITY_AGE_S)
        ask = slurm_client.call if is_urgent else shared
        allowed, problem, notice_s = None, "", slurm_client.NOTICE_S
        try:
            nodes = slurm_client.show_nodes(ask)
            with contextlib.suppress(errors.SchedulerError):
                notice_s = slurm_client.notice_s(shared)
            names = str(resources.extra.get("reservation", ""))
            chosen = slurm_client.reservation_nodes(names, ask) if names else None
            wanted = slurm_capacity.wanted_of(resources, chosen, slurm_client.partitions(ask))
            try:
                allowed = self._gpus_under_qos(resources.qos, held, ask)
            except errors.SchedulerUnavailableError as error:
                # The nodes are known even while slurmdbd, which has the limits, does not answer.
                problem = f"the limits of QOS {resources.qos} are unknown: {error}"
        except errors.SchedulerUnavailableError:
            raise
        except errors.SchedulerError:
            # Slurm refuses the question, for example about a reservation that does not exist.
            return None
        return slurm_capacity.room_of(
            nodes,
            resources,
            wanted,
            held,
            allowed=allowed,
            problem=problem,
            notice_s=notice_s,
        )

    def _gpus_under_qos(
        self, qos: str | None, held: Mapping[str, int], ask: slurm_client.Ask
    ) -> int | None:
        """Return the GPUs that the spec's QOS still allows; None without an enforced QOS."""
        if qos is None or not slurm_client.enforces_qos(ask):
            return None
        limits, in_use = slurm_client.qos_limits(qos, ask), slurm_client.jobs_in_qos(qos, ask)
        user = account_name(os.getuid())
        return slurm_capacity.gpus_under_qos(limits, in_use, user, sum(held.values()))

    def drained(self, request: Request, submission: Submission) -> dict[str, str]:
        _require_cluster(request)
        listed = slurm_client.listed_starts if request.expedite else slurm_client.listed_jobs
        line = listed().get(submission.job_id)
        if line is None or line.name != request.job_name:
            return {}
        shared = partial(slurm_client.shared_call, age_s=slurm_client.CAPACITY_AGE_S)
        return slurm_capacity.drained_hosts(
            slurm_client.show_nodes(shared), slurm_client.expand_hosts(line.nodes)
        )

    def comment(self, request: Request, submission: Submission, text: str) -> None:
        _require_cluster(request)
        # Not `scontrol`: words with `=` in a comment would look like further fields.
        name, *former = slurm_client.comment_of(submission.job_id)
        if name != request.job_name:
            return
        # The words of the submission, or of a person or a site, stay.
        mark = text.partition(":")[0] + ":"
        words = [word for word in former if not word.startswith(mark)]
        new = f"Comment={' '.join([*words, text])}"
        slurm_client.call(["scontrol", "update", f"JobId={submission.job_id}", new])

    def held_after_end(self, request: Request, submission: Submission) -> dict[str, int]:
        try:
            line = self._show(request, submission)
        except errors.SchedulerError:
            return {}
        if line is None or bare_state(line.state) != "COMPLETING":
            return {}
        return dict.fromkeys(slurm_client.expand_hosts(line.nodes), request.gpus_on_node)

    def _absent(self, since: float, name: str) -> base.JobStatus:
        # If a clock was set back, the absence counts. It must be seen again later anyway.
        if 0 <= slurm_client.now() - since < ABSENCE_S:
            return base.JobStatus(state=None, detail="Slurm does not list the job yet")
        message = f"neither squeue nor sacct lists {name}"
        return base.JobStatus(
            state=AttemptState.LOST, detail=message, evidence=(message,), is_absent=True
        )


def _recorded(request: Request, submission: Submission) -> list[JobLine]:
    """Return what Slurm's accounting has of the job, for each of its starts."""
    found = slurm_client.recorded_jobs(job_id=submission.job_id, since=submission.submitted_at)
    return [job for job in found if job.name == request.job_name]


def _require_cluster(request: Request) -> None:
    """Raise `SchedulerUnavailableError` if the job is on another cluster than this host asks.

    Two clusters may share a root. One would not know the other's jobs, or have others of their ids.
    """
    asked = slurm_client.cluster_name() if request.cluster else None
    if asked is not None and asked != request.cluster:
        raise errors.SchedulerUnavailableError(
            f"{request.job_name} was submitted to the Slurm cluster {request.cluster!r}, but this "
            f"host's commands ask {asked!r}; run the command on a host of {request.cluster!r}"
        )


def _is_over(start: base.JobStart) -> bool:
    return start.state is not None and start.state.is_terminal


def _status_of(line: JobLine) -> base.JobStatus:
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
    # With --no-kill Slurm removes a lost node from the job and keeps the job.
    is_leaderless = state is AttemptState.RUNNING and batch_host not in {"", *nodes}
    if is_leaderless:
        evidence.append(
            f"Slurm: {batch_host}, the job's leading node, is no longer one of its nodes"
        )
    return base.JobStatus(
        state=state,
        raw=bare_state(line.state),
        detail=reason or line.state,
        nodes=nodes,
        is_leaderless=is_leaderless,
        started_at=None if state is AttemptState.PENDING else line.started_at,
        starts_at=line.started_at if state is AttemptState.PENDING else None,
        ended_at=line.ended_at if has_ended else None,
        evidence=tuple(evidence),
    )


def _recorded_status(line: JobLine) -> base.JobStatus:
    """Return the status of a job that only the accounting still knows.

    If a controller starts without its saved state, it no longer knows its jobs. slurmdbd then ends
    them as `CANCELLED`, without the user that it names otherwise: `CANCELLED by 1000`. Since Slurm
    26.05, they also stay `RUNNING` there, until an administrator ends these runaway jobs.
    """
    status = _status_of(line)
    is_over = status.state is None or status.state.is_terminal
    if is_over and line.state != "CANCELLED":
        return status
    by = " by no user" if is_over else ""
    lost = (
        f"Slurm: job {line.job_id} is {line.state}{by} in the accounting, but the controller no "
        "longer knows it, as after a restart without its saved state"
    )
    return replace(status, raw=base.FORGOTTEN, state=AttemptState.LOST, evidence=(lost,))


def _serial(job_id: str) -> tuple[int, str]:
    """Return a sort key: Slurm numbers jobs in order, so 999 is older than 1000."""
    head = job_id.split("_")[0]
    return (int(head) if head.isdecimal() else 0, job_id)
