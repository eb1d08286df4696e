"""Move the attempts of a run to another place of its spec, as `places` decides.

A move is a request like an operator's: the attempt saves and ends first, so a run never holds two
allocations.
"""

from __future__ import annotations

from holdfast.contracts.errors import SchedulerUnavailableError
from holdfast.contracts.records.attempt import Submission, read_claim, read_document
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.states import AttemptState
from holdfast.workers.decisions.exclusions import Rooms, exclude_for
from holdfast.workers.decisions.places import (
    ReturnWatch,
    place_of,
    reason_to_move,
    relaunch_request,
)
from holdfast.workers.runs import operator
from holdfast.workers.schedulers import ask_capacity, executor_for


def move_on(history: RunHistory, *, now: float, writer: str) -> str:
    """Take back a job that waits for too long, for the next place; return what follows, or ''.

    `now` is Unix seconds. Raises `SchedulerError` if the scheduler does not answer.
    """
    last = history.last_attempt
    why = reason_to_move(history, now=now)
    following = history.spec.resources.next_place(place_of(last))
    if last is None or following is None or not why or not is_pending_now(history, last):
        return ""
    return _request(history, last, following, why, writer)


def return_when_free(watch: ReturnWatch, history: RunHistory, *, now: float, writer: str) -> str:
    """Have an attempt that runs or waits elsewhere continue at the first choice if it is time.

    Returns what follows, or ''. Raises `SchedulerError` if the scheduler does not answer about the
    job.
    """
    last, resources = history.last_attempt, history.spec.resources
    if last is None or place_of(last) == 0:
        return ""
    rooms = Rooms(lambda _: executor_for(resources.executor).room(resources, is_urgent=False))
    try:
        exclude = exclude_for(history, rooms, place=0, gpus=last.gpus, now=now)
    except SchedulerUnavailableError:
        # Without an answer the run stays where it is.
        return ""
    why = watch.look(history, ask_capacity(resources, exclude=exclude), now=now)
    if not why or (last.state is not AttemptState.RUNNING and not is_pending_now(history, last)):
        return ""
    return _request(history, last, 0, why, writer)


def is_pending_now(history: RunHistory, last: AttemptView) -> bool:
    """Return True if the scheduler still has the attempt's job in its queue.

    Raises `SchedulerError` if the scheduler does not answer.
    """
    attempt = history.paths.attempt(last.number)
    submission = read_document(Submission, attempt.submission)
    if last.request is None or submission is None or read_claim(attempt):
        return False
    return executor_for(last.request.executor).is_pending(last.request, submission)


def _request(history: RunHistory, last: AttemptView, place: int, why: str, writer: str) -> str:
    facts = relaunch_request(last, place, why)
    del facts["after_attempt"]
    done = operator.request(history.paths, writer=writer, seen=history.newest_order, **facts)
    return f"{why}: {done}"
