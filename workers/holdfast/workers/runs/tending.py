"""What a supervisor does about the last attempt's job at every turn, beside looking at it.

It takes back a job that the scheduler has kept pending for longer than the spec allows. The run
then continues at a smaller size, or pauses. That is an operator's request like any other: it is
journaled first, and the next attempt is submitted only when the scheduler reports the job's end.
It lets a pending job use excluded hosts again, tells a running one which of its nodes are drained,
and tells Slurm in the job's comment when its run was last committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts.disk.journal import PENDING_TIMEOUT, EventKind, JournalWriter
from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.records import documents
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState
from holdfast.workers.decisions import attempt_limit, drained_nodes, places
from holdfast.workers.decisions.exclusions import Rooms, exclude_for, excluded_hosts
from holdfast.workers.decisions.sizes import allowed_sizes
from holdfast.workers.runs import operator
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.runs.operator import is_pending_now
from holdfast.workers.schedulers import ask_capacity, executor_for


def take_back_overdue(history: RunHistory, *, now: float, writer: str) -> str:
    """Take back the last attempt's job if it is pending for too long; return what follows, or ''.

    `now` is Unix seconds. The scheduler is asked about the job immediately before, so a job that
    has just started continues. Raises `SchedulerError` if the scheduler does not answer.
    """
    last, spec = history.last_attempt, history.spec
    may_move = attempt_limit.may_try_again(history)
    if last is None or last.request is None:
        return ""
    if not is_overdue(spec, last, now=now, may_move=may_move):
        return ""
    # Asked last, because a job that has just started must continue.
    if history.pending_request is not None or not is_pending_now(history, last):
        return ""
    submission = documents.read_document(
        documents.Submission, history.paths.attempt(last.number).submission
    )
    waits_for = last.pending.data.get("detail") if last.pending else ""
    why = (
        f"job {submission.job_id if submission else ''} of attempt {last.number} was pending for "
        f"{places.waited_s(last, now) / 60:.0f} min, "
        f"last because of {waits_for or 'no reason that the scheduler gave'}"
    )
    exclude = excluded_hosts(history.attempts, now)
    ask = ask_capacity(spec.resources.at(places.place_of(last)), exclude=exclude)
    gpus = None
    if may_move:
        gpus = smaller_size(spec, last.gpus, ask(is_urgent=True), Feasibility.of(history).allows)
    action: operator.Action = "relaunch" if gpus else "pause"
    done = operator.request(
        history.paths,
        action,
        by=PENDING_TIMEOUT,
        gpus=gpus,
        writer=writer,
        reason=why,
        seen=history.newest_order,
    )
    return f"{why}: {done}"


def allow_hosts_again(history: RunHistory, *, now: float, writer: str) -> str:
    """Let a pending job use hosts that it need not or cannot exclude any more; return what changed.

    `now` is Unix seconds. Nodes may have gone down since the job was submitted, and an exclusion
    ends after a while. Without an answer of the scheduler, the job waits as before.
    """
    last = history.last_attempt
    if (
        last is None
        or last.request is None
        or not last.request.exclude
        or not places.is_queued(last)
    ):
        return ""
    place, attempt = places.place_of(last), history.paths.attempt(last.number)
    submission = documents.read_document(documents.Submission, attempt.submission)
    resources, executor = history.spec.resources.at(place), executor_for(last.request.executor)
    rooms = Rooms(lambda _: executor.room(resources, is_urgent=False))
    try:
        needed = exclude_for(history, rooms, place=place, gpus=last.gpus, now=now)
        kept = [host for host in last.request.exclude if host in needed]
        again = [host for host in last.request.exclude if host not in needed]
        if not again or submission is None:
            return ""
        if not executor.change_exclusion(last.request, submission, kept):
            return ""
    except SchedulerError:
        # The next turn tries again.
        return ""
    text = f"the pending job may use {', '.join(again)} again"
    with JournalWriter(history.paths.journal_of(writer)) as journal:
        journal.append(EventKind.NOTE, attempt=last.number, text=text)
    return f"attempt {last.number}: {text}"


def is_overdue(spec: RunSpec, last: AttemptView, *, now: float, may_move: bool = True) -> bool:
    """Return True if the attempt's job is in the queue for longer than the spec allows.

    A job that waits before the last fallback goes to the next one instead, if it `may_move`.
    """
    limit_min = spec.supervision.pending_timeout_min
    if limit_min is None or not places.is_queued(last):
        return False
    if may_move and spec.resources.next_place(places.place_of(last)) is not None:
        return False
    return places.waited_s(last, now) >= 60 * limit_min


def smaller_size(
    spec: RunSpec, current: int, capacity: int | None, fits: Callable[[int], bool]
) -> int | None:
    """Return the GPUs to try next, fewer than `current`; None if the spec allows no fewer.

    The largest count that is free now is taken, otherwise the smallest, which starts soonest. If
    the capacity is unknown, the next smaller count is taken.
    """
    sizes = [size for size in allowed_sizes(spec) if size < current and fits(size)]
    if not sizes:
        return None
    free = [size for size in sizes if capacity is None or size <= capacity]
    return max(free, default=sizes[0])


# Each change is a call to the controller, which all jobs of a cluster share.
CHANGE_S: Final = 60.0
MARK: Final = "holdfast:"


def text_of(step: int, committed_at: float) -> str:
    """Return the comment's part for a commit. `committed_at` is in Unix seconds."""
    return f"{MARK}step-{step}@{int(committed_at)}"


class CommitComments:
    """Keeps the comment of the live attempt's job, for `resources.commit_comment`.

    A scheduler that must choose a job to preempt can then take one that loses little. The
    supervisor calls `tend` at every turn.
    """

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
        submission = documents.read_document(
            documents.Submission, history.paths.attempt(last.number).submission
        )
        if submission is None:
            return
        self._tell_at = now + CHANGE_S
        try:
            executor_for(last.request.executor).comment(last.request, submission, text)
        except SchedulerError:
            return
        self._told = last.number, text


def tell_drained_nodes(history: RunHistory) -> None:
    """Write `drained.json` when other nodes of the last attempt's job are drained than before.

    The scheduler is asked only if the attempt may continue on other nodes. All supervisors of a
    host share its answer, which may be a minute old. Without an answer, nothing changes.
    The attempt's agent decides what follows.
    """
    last = history.last_attempt
    if last is None or last.request is None or last.state is not AttemptState.RUNNING:
        return
    attempt, request = history.paths.attempt(last.number), last.request
    if not drained_nodes.may_leave(history.spec, request):
        return
    submission = documents.read_document(documents.Submission, attempt.submission)
    if submission is None:
        return
    try:
        hosts = executor_for(request.executor).drained(request, submission)
    except SchedulerError:
        # The next turn asks again.
        return
    if not hosts and not attempt.drained.exists():
        return
    told, found = (
        documents.read_document(documents.DrainedNodes, attempt.drained),
        documents.DrainedNodes(hosts=hosts),
    )
    if told != found:
        documents.write_document(attempt.drained, found)
