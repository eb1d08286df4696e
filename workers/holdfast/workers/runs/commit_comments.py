"""Tell Slurm in a job's comment when its run was last committed: `resources.commit_comment`.

A scheduler that must choose a job to preempt can then take one that loses little.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.records.attempt import Submission, read_document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.states import AttemptState
from holdfast.workers.schedulers import executor_for

# Each change is a call to the controller, which all jobs of a cluster share.
CHANGE_S: Final = 60.0
MARK: Final = "holdfast:"


def text_of(step: int, committed_at: float) -> str:
    """Return the comment's part for a commit. `committed_at` is in Unix seconds."""
    return f"{MARK}step-{step}@{int(committed_at)}"


class CommitComments:
    """Keeps the comment of the live attempt's job. The supervisor calls `tend` at every turn."""

    def __init__(self) -> None:
        self._told: tuple[int, str] | None = None
        self._tell_at = 0.0

    def tend(self, history: RunHistory) -> None:
        """Change the comment after a commit, at most every `CHANGE_S` seconds.

        Without an answer of the scheduler, it is tried again after the same time.
        """
        last = history.last_attempt
        if last is None or last.request is None or last.state is not AttemptState.RUNNING:
            return
        commits = history.tally.commits.get(last.number)
        wanted = last.request.resources.commit_comment
        if not wanted or commits is None or commits.newest_step is None:
            return
        text, now = text_of(commits.newest_step, commits.newest_at), time.monotonic()
        if (last.number, text) == self._told or now < self._tell_at:
            return
        submission = read_document(Submission, history.paths.attempt(last.number).submission)
        if submission is None:
            return
        self._tell_at = now + CHANGE_S
        try:
            executor_for(last.request.executor).comment(last.request, submission, text)
        except SchedulerError:
            return
        self._told = last.number, text
