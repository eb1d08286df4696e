"""Take back a job that the scheduler has kept pending for longer than the spec allows.

The run then continues at a smaller size, or pauses. It is an operator's request like any other: it
is journaled first, and the next attempt is submitted only when the scheduler reports the job's end.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.contracts.attempt import Submission, read_claim, read_document
from holdfast.contracts.history import AttemptView, RunHistory
from holdfast.contracts.journal import PENDING_TIMEOUT
from holdfast.contracts.spec import RunSpec
from holdfast.contracts.states import AttemptState
from holdfast.workers import operator
from holdfast.workers.executors import executor_for
from holdfast.workers.feasibility import Feasibility
from holdfast.workers.sizes import allowed_sizes


def take_back_overdue(history: RunHistory, *, now: float, writer: str) -> str:
    """Take back the last attempt's job if it is pending for too long; return what follows, or ''.

    `now` is Unix seconds. The scheduler is asked about the job immediately before, so a job that
    has just started goes on. Raises `SchedulerError` if the scheduler does not answer.
    """
    last, spec = history.last_attempt, history.spec
    if last is None or last.request is None or not is_overdue(spec, last, now=now):
        return ""
    attempt = history.paths.attempt(last.number)
    submission = read_document(Submission, attempt.submission)
    if history.pending_request is not None or submission is None or read_claim(attempt):
        return ""
    executor = executor_for(last.request.executor)
    if not executor.is_pending(last.request, submission):
        return ""
    waits_for = last.pending.data.get("detail") if last.pending else ""
    waited_min = (now - submission.submitted_at) / 60
    why = (
        f"job {submission.job_id} of attempt {last.number} was pending for {waited_min:.0f} min, "
        f"last because of {waits_for or 'no reason that the scheduler gave'}"
    )
    capacity = executor.capacity(spec.resources)
    gpus = smaller_size(spec, last.gpus, capacity, Feasibility.of(history).allows)
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


def is_overdue(spec: RunSpec, last: AttemptView, *, now: float) -> bool:
    """Return True if the attempt's job is in the queue for longer than the spec allows."""
    limit_min = spec.supervision.pending_timeout_min
    if limit_min is None or last.submitted_at is None or last.started_at is not None:
        return False
    is_queued = last.state in {AttemptState.SUBMITTED, AttemptState.PENDING}
    return is_queued and now - last.submitted_at >= 60 * limit_min


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
