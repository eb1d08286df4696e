"""Where the attempts of a run go: the first choice of `resources`, or one of its fallbacks.

A job that waits for too long is taken back and submitted at the next place. A run returns to its
first choice when that has had enough free GPUs for a while. Both are requests like an operator's:
the attempt saves and ends first, so a run never holds two allocations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.contracts.attempt import Submission, read_claim, read_document
from holdfast.contracts.history import AttemptView, RunHistory
from holdfast.contracts.journal import FALLBACKS
from holdfast.contracts.states import AttemptState
from holdfast.workers import operator
from holdfast.workers.executors import executor_for
from holdfast.workers.growth import AskCapacity

# Slurm's forecasts of a job that was just submitted are not worth much.
FORECAST_AFTER_S = 60.0


def place_of(last: AttemptView | None) -> int:
    """Return the place of an attempt: 0 for the first choice, n for the n-th fallback."""
    return last.request.place if last is not None and last.request is not None else 0


def place_after(history: RunHistory, capacity: int | None) -> int:
    """Return the place of the next attempt: the first choice, unless it is known to be full."""
    place = place_of(history.last_asked)
    is_full = capacity is not None and capacity < history.spec.gpus_min
    return place if is_full and place <= len(history.spec.resources.fallbacks) else 0


def move_on(history: RunHistory, *, now: float, writer: str) -> str:
    """Take back a job that waits for too long, for the next place; return what follows, or ''.

    `now` is Unix seconds. Raises `SchedulerError` if the scheduler does not answer.
    """
    last = history.last_attempt
    why = reason_to_move(history, now=now)
    if last is None or last.request is None or not why:
        return ""
    attempt = history.paths.attempt(last.number)
    submission = read_document(Submission, attempt.submission)
    if submission is None or read_claim(attempt):
        return ""
    if not executor_for(last.request.executor).is_pending(last.request, submission):
        return ""
    return _request(history, last, place_of(last) + 1, why, writer)


def reason_to_move(history: RunHistory, *, now: float) -> str:
    """Return why a pending attempt should go to the next place, or '' if it should not."""
    last, fallbacks = history.last_attempt, history.spec.resources.fallbacks
    place = place_of(last)
    if last is None or place >= len(fallbacks) or history.pending_request is not None:
        return ""
    is_queued = last.state in {AttemptState.SUBMITTED, AttemptState.PENDING}
    if not is_queued or last.submitted_at is None or last.started_at is not None:
        return ""
    waited_s, limit_s = now - last.submitted_at, 60 * fallbacks[place].after_min
    if waited_s >= limit_s:
        return f"attempt {last.number} was pending for {waited_s / 60:.0f} min"
    starts_at = last.pending.data.get("starts_at") if last.pending else None
    if starts_at is None or waited_s < FORECAST_AFTER_S or starts_at - now <= limit_s - waited_s:
        return ""
    return (
        f"Slurm expects attempt {last.number} to wait for {(starts_at - now) / 60:.0f} min more, "
        f"and {limit_s / 60:.0f} min are allowed"
    )


@dataclass
class ReturnWatch:
    """Notices that the first choice has had enough free GPUs since a time (Unix seconds)."""

    free_since: float | None = None

    def look(self, history: RunHistory, ask: AskCapacity, *, now: float) -> str:
        """Return why the attempt should save and continue at the first choice now, or ''.

        `ask` returns the free GPUs there.
        """
        last, resources = history.last_attempt, history.spec.resources
        is_away = last is not None and last.state is AttemptState.RUNNING and place_of(last) > 0
        if not is_away or last is None or history.pending_request is not None:
            self.free_since = None
            return ""
        delay_s = 60 * resources.return_after_min
        is_due = self.free_since is not None and now - self.free_since >= delay_s
        free = ask(is_urgent=is_due)
        if free is None or free < last.gpus:
            self.free_since = None
            return ""
        self.free_since = now if self.free_since is None else self.free_since
        has_trained = last.started_at is not None and now - last.started_at >= delay_s
        if not has_trained or now - self.free_since < delay_s:
            return ""
        self.free_since = None
        return f"the first choice has {free} free GPUs for {delay_s / 60:.3g} min"


def return_when_free(watch: ReturnWatch, history: RunHistory, *, now: float, writer: str) -> str:
    """Have a running attempt save and continue at the first choice if it is time.

    Returns what follows, or ''. Raises `SchedulerError` if the scheduler does not answer.
    """
    last, resources = history.last_attempt, history.spec.resources
    executor = executor_for(resources.executor)
    why = watch.look(history, partial(executor.capacity, resources), now=now)
    return _request(history, last, 0, why, writer) if last is not None and why else ""


def relaunch_request(last: AttemptView, place: int, why: str) -> dict[str, Any]:
    """Return the facts of the journal line that asks for an attempt at another place."""
    return {
        "action": "relaunch",
        "by": FALLBACKS,
        "gpus": last.gpus,
        "after_attempt": last.number,
        "place": place,
        "reason": why,
    }


def _request(history: RunHistory, last: AttemptView, place: int, why: str, writer: str) -> str:
    facts = relaunch_request(last, place, why)
    del facts["after_attempt"]
    done = operator.request(history.paths, writer=writer, seen=history.newest_order, **facts)
    return f"{why}: {done}"
