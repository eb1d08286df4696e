"""Tell a running attempt which of its nodes are drained. Its agent decides what follows."""

from __future__ import annotations

from holdfast.contracts.errors import SchedulerError
from holdfast.contracts.records.attempt import (
    DrainedNodes,
    Submission,
    read_document,
    write_document,
)
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.states import AttemptState
from holdfast.workers.decisions.drained_nodes import may_leave
from holdfast.workers.schedulers import executor_for


def tend(history: RunHistory) -> None:
    """Write `drained.json` when other nodes of the last attempt's job are drained than before.

    The scheduler is asked only if the attempt may continue on other nodes. All supervisors of a
    host share its answer, which may be a minute old. Without an answer, nothing changes.
    """
    last = history.last_attempt
    if last is None or last.request is None or last.state is not AttemptState.RUNNING:
        return
    attempt, request = history.paths.attempt(last.number), last.request
    if not may_leave(history.spec, request):
        return
    submission = read_document(Submission, attempt.submission)
    if submission is None:
        return
    try:
        hosts = executor_for(request.executor).drained(request, submission)
    except SchedulerError:
        # The next turn asks again.
        return
    if not hosts and not attempt.drained.exists():
        return
    told, found = read_document(DrainedNodes, attempt.drained), DrainedNodes(hosts=hosts)
    if told != found:
        write_document(attempt.drained, found)
