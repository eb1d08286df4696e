"""What every executor offers, and what it says about a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.attempt import Request, Submission
from holdfast.contracts.paths import AttemptPaths
from holdfast.contracts.spec import Resources
from holdfast.contracts.states import AttemptState

# What the executor of this machine says in place of a scheduler's word: the processes are gone
# while the machine stayed up, or the machine was started again.
GONE: Final = "gone"
REBOOTED: Final = "rebooted"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the scheduler says of a job now. Times are Unix seconds.

    `state` is None when it said something that tells nothing yet; `LOST` when it answered and
    knows no such job. `raw` is its own word, `evidence` what is worth keeping with the ending.
    """

    state: AttemptState | None
    raw: str = ""
    detail: str = ""
    nodes: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    evidence: tuple[str, ...] = ()
    # The node that led the job is gone and the job is not: nothing can come of it any more.
    is_leaderless: bool = False
    # The scheduler answered, and has no such job.
    is_absent: bool = False

    @property
    def has_ended(self) -> bool:
        """True when the job will not run any more."""
        return self.state is not None and self.state.is_terminal


class Executor(ABC):
    """A place that takes jobs. Every call is bounded in time."""

    kind: str
    # Seconds after which a job that was submitted without an answer, and that the scheduler does
    # not show, is believed not to exist.
    absence_s: float

    @abstractmethod
    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        """Hand the attempt's agent to the scheduler.

        Raises `SchedulerError` when it refused, with its own words, and
        `SchedulerUnavailableError` when nobody knows whether it took the job.
        """

    @abstractmethod
    def find(self, request: Request) -> Submission | None:
        """The job that was submitted for `request`, by its name, or None when there is none.

        Raises `SchedulerUnavailableError` when the scheduler did not answer.
        """

    def live_jobs(self, request: Request) -> tuple[Submission, ...]:
        """Every job of the attempt's name that has not ended, oldest first.

        Raises `SchedulerUnavailableError` when the scheduler did not answer.
        """
        found = self.find(request)
        return () if found is None else (found,)

    def withdraw(self, request: Request, submission: Submission) -> None:
        """Cancel the job unless it has begun to run."""
        self.cancel(request, submission)

    @abstractmethod
    def status(self, request: Request, submission: Submission | None) -> JobStatus:
        """Where the job stands. Raises `SchedulerUnavailableError` without an answer."""

    @abstractmethod
    def cancel(self, request: Request, submission: Submission) -> None:
        """End the job by force, without a last checkpoint; harmless when it has ended."""

    @abstractmethod
    def capacity(self, resources: Resources, held: Mapping[str, int] | None = None) -> int | None:
        """GPUs that are free now for such resources; None when unknown or unbounded.

        `held` are GPUs, by host, that would be free as well were a job of ours gone.
        """

    def held_after_end(self, request: Request, submission: Submission) -> dict[str, int]:
        """GPUs, by host, of a job that has ended and whose nodes are still being cleaned up."""
        del request, submission
        return {}
