"""The interface of every executor, and the status of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.contracts.disk.paths import AttemptPaths, ConsumerPaths, SuccessorPaths
from holdfast.contracts.errors import SchedulerUnavailableError, SubmissionRefusedError
from holdfast.contracts.records.documents import Request, Submission
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.states import AttemptState
from holdfast.workers.schedulers.slurm_capacity import Room

# The local executor's states in place of a scheduler's: the processes are gone although the machine
# stayed up, or the machine was rebooted.
GONE: Final = "gone"
REBOOTED: Final = "rebooted"
# In place of Slurm's state for a job that ended when the controller lost its records.
FORGOTTEN: Final = "forgotten"
# In the message of a refusal that may come from the hosts that Holdfast excluded.
BECAUSE_EXCLUDED: Final = "which excludes"


class AskCapacity(Protocol):
    """Returns how many GPUs are free or the attempt's own; None if unknown."""

    def __call__(self, *, is_urgent: bool) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The scheduler's current report on a job. Times are Unix seconds.

    `state` is None if the report does not determine a state yet, and `LOST` if the scheduler knows
    no such job. `raw` is the scheduler's own state. `evidence` is kept with the attempt's ending.
    """

    state: AttemptState | None
    raw: str = ""
    detail: str = ""
    nodes: tuple[str, ...] = ()
    started_at: float | None = None
    # When the scheduler expects a pending job to start.
    starts_at: float | None = None
    ended_at: float | None = None
    evidence: tuple[str, ...] = ()
    # The leading node is gone but the job is not, so the job can no longer succeed.
    is_leaderless: bool = False
    # The scheduler answered and has no such job.
    is_absent: bool = False

    @property
    def has_ended(self) -> bool:
        """True if the job will not run any more."""
        return self.state is not None and self.state.is_terminal


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """The newest start of a job that the scheduler has restarted `restarts` times.

    While it is `ending`, the start before this one still has nodes. One that is `held` never
    starts unless a person releases it. `nodes` are those on which it runs.
    """

    restarts: int
    state: AttemptState | None
    is_ending: bool = False
    is_held: bool = False
    nodes: tuple[str, ...] = ()
    raw: str = ""


class Executor(ABC):
    """A service that runs jobs. Every call is bounded in time."""

    kind: str
    # A job that was submitted without an answer counts as nonexistent if the scheduler does not
    # list it for this many seconds.
    absence_s: float

    @abstractmethod
    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        """Submit the attempt's agent to the scheduler.

        Raises `SchedulerError` with the scheduler's message if it refused the job, and
        `SchedulerUnavailableError` if it is unknown whether it accepted the job.
        """

    def submit_successor(self, paths: SuccessorPaths, request: Request) -> Submission:
        """Submit a successor's agent, which waits for an attempt to run. Raises like `submit`."""
        raise SubmissionRefusedError(
            f"{request.job_name}: the executor {self.kind!r} has no queue, so no job waits in it",
            may_pass=False,
        )

    def submit_consumer(self, paths: ConsumerPaths, request: Request) -> Submission:
        """Submit the job of a consumer, which is not an attempt. Raises like `submit`."""
        raise SubmissionRefusedError(
            f"{request.job_name}: the executor {self.kind!r} has no jobs besides attempts",
            may_pass=False,
        )

    def expedites(self) -> bool:
        """Return True if the scheduler can restart a job ahead of all others after a node failure.

        Raises `SchedulerUnavailableError` without an answer.
        """
        return False

    def start_of(self, request: Request, submission: Submission) -> JobStart | None:
        """Return the newest start of a job that the scheduler may restart; None if it is gone.

        Raises `SchedulerUnavailableError` without an answer.
        """
        del request, submission
        return None

    def end_restarts(self, request: Request, submission: Submission) -> bool:
        """Let the job not be restarted any more, and cancel a restart; return True if it is gone.

        The start that runs the attempt is not cancelled. Raises like `cancel`.
        """
        del request, submission
        return True

    def cluster(self) -> str | None:
        """Return the name of the cluster that this host submits to; None if unknown or none."""
        return None

    @abstractmethod
    def find(self, request: Request) -> Submission | None:
        """Return the job that was submitted for `request`, found by its name, or None.

        Raises `SchedulerUnavailableError` if the scheduler did not answer.
        """

    def live_jobs(self, request: Request) -> tuple[Submission, ...]:
        """Return every job with the attempt's name that has not ended, oldest first.

        Raises `SchedulerUnavailableError` if the scheduler did not answer.
        """
        found = self.find(request)
        return () if found is None else (found,)

    def withdraw(self, request: Request, submission: Submission) -> None:
        """Cancel the job unless it has started."""
        self.cancel(request, submission)

    def is_pending(self, request: Request, submission: Submission) -> bool:
        """Return True if the job waits in the scheduler's queue at this moment.

        Raises `SchedulerUnavailableError` without an answer.
        """
        del request, submission
        return False

    def change_exclusion(
        self, request: Request, submission: Submission, exclude: Collection[str]
    ) -> bool:
        """Let a pending job use every node but `exclude`. Return False if it did so already.

        Raises `SchedulerError` if the scheduler refuses the change or does not answer.
        """
        del request, submission, exclude
        return False

    def drop_dependency(self, request: Request, submission: Submission) -> bool:
        """Let a pending job start before the job that it waits for has ended.

        Returns False if it waits for none. Raises like `change_exclusion`.
        """
        del request, submission
        return False

    @abstractmethod
    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        """Return the job's status. From `since` on (Unix seconds), an earlier one is too old.

        Raises `SchedulerUnavailableError` without an answer.
        """

    @abstractmethod
    def cancel(self, request: Request, submission: Submission) -> None:
        """Kill the job without a last checkpoint; harmless if it has ended."""

    def room(
        self,
        resources: Resources,
        held: Mapping[str, int] | None = None,
        *,
        is_urgent: bool = True,
    ) -> Room | None:
        """Return the nodes for a job of `resources`; None if this executor never knows them.

        `held` maps hosts to GPUs of our own job that count as free, because it will release them.
        If it is not urgent, the scheduler's answer may be a minute old. Raises
        `SchedulerUnavailableError` without an answer.
        """
        del resources, held, is_urgent
        return None

    def capacity(
        self,
        resources: Resources,
        held: Mapping[str, int] | None = None,
        *,
        is_urgent: bool = True,
        exclude: Collection[str] = (),
    ) -> int | None:
        """Return the GPUs free now for `resources`, without those of the hosts `exclude`.

        None if they are not limited, or if this executor never knows them. Raises
        `SchedulerUnavailableError` without an answer. For the other arguments, see `room`.
        """
        found = self.room(resources, held, is_urgent=is_urgent)
        if found is not None and found.problem:
            raise SchedulerUnavailableError(found.problem)
        return None if found is None else found.free_gpus(exclude)

    def drained(self, request: Request, submission: Submission) -> dict[str, str]:
        """Return the job's nodes that their operator drains, with the reasons.

        The scheduler's answer may be a minute old. Raises `SchedulerError` without an answer.
        """
        del request, submission
        return {}

    def comment(self, request: Request, submission: Submission, text: str) -> None:
        """Put `text`, which has no spaces, at the end of the job's comment, in place of the last.

        Raises `SchedulerError` if the scheduler refuses the change or does not answer.
        """
        del request, submission, text

    def held_after_end(self, request: Request, submission: Submission) -> dict[str, int]:
        """Return the GPUs by host that an ended job still holds while Slurm cleans up its nodes."""
        del request, submission
        return {}
