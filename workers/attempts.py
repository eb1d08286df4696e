"""Attempts: reserved exclusively, requested durably, then submitted, once each.

The order is what makes a relaunch after any crash safe: `mkdir attempts/NNNN` (one process
wins), `request.json`, a journal line, the scheduler, `submission.json`, a journal line. Whoever
finds an attempt without a submission asks the scheduler for its name before submitting it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.contracts.attempt import (
    Claim,
    Request,
    RunRecord,
    Submission,
    read_document,
    write_document,
)
from holdfast.contracts.durable import fsync_directory, make_directory
from holdfast.contracts.errors import NotFoundError, RunConflictError
from holdfast.contracts.history import load_events
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.contracts.spec import RunSpec
from holdfast.workers.executors import executor_for
from holdfast.workers.provenance import take_provenance
from holdfast.workers.request import build_request, working_directory_of


def reserve(paths: RunPaths, number: int) -> AttemptPaths | None:
    """Take attempt `number` of a run; None when another process has taken it."""
    attempt = paths.attempt(number)
    make_directory(paths.attempts)
    try:
        attempt.directory.mkdir()
    except FileExistsError:
        return None
    fsync_directory(paths.attempts)
    for directory in (attempt.journal, attempt.heartbeats, attempt.logs, attempt.dumps):
        make_directory(directory)
    return attempt


def submit_attempt(
    paths: RunPaths,
    spec: RunSpec,
    record: RunRecord,
    *,
    gpus: int,
    reason: str,
    exclude: Sequence[str] = (),
    journal: JournalWriter,
) -> AttemptPaths:
    """Reserve the next attempt and submit it on `gpus` GPUs.

    Raises `RunConflictError` when another process reserved it first, `SchedulerError` when the
    scheduler refused it, and `SchedulerUnavailableError` when nobody knows: the attempt then
    stays reserved, for `resume_submission`.
    """
    taken = paths.list_attempts()
    number = taken[-1].number + 1 if taken else 1
    attempt = reserve(paths, number)
    if attempt is None:
        raise RunConflictError(
            f"attempt {number} of {paths.name} was reserved by another process; only one flow "
            "submits for a run: let it"
        )
    request = build_request(
        record,
        spec,
        attempt=number,
        gpus=gpus,
        reason=reason,
        exclude=exclude,
        created_at=time.time(),
        provenance=take_provenance(spec, Path(working_directory_of(record, spec))),
    )
    write_document(attempt.request, request)
    _tell_reserved(request, journal, exclude)
    _submit(attempt, request, journal)
    return attempt


def resume_submission(paths: RunPaths, journal: JournalWriter) -> AttemptPaths | None:
    """Finish a submission that a crash cut short; None when there is none.

    The last attempt is looked up by its name: found, its submission is written down; absent, it
    is submitted. Raises `SchedulerUnavailableError` when the scheduler does not answer: wait.
    """
    taken = paths.list_attempts()
    if not taken or not is_unsubmitted(taken[-1]):
        return None
    attempt = taken[-1]
    request = read_document(Request, attempt.request)
    if request is None:
        raise NotFoundError(
            f"{attempt.directory}: reserved, but its request was never written; "
            "`abandon_reservation` frees the number"
        )
    found = executor_for(request.executor).find(request)
    if found is None:
        _submit(attempt, request, journal)
    else:
        _record(attempt, found, journal)
    return attempt


def complete_journal(paths: RunPaths, journal: JournalWriter) -> None:
    """Journal the reservations and submissions that a crash kept from being told.

    Each is a document first. Only the process that holds the run's flow lock may call this.
    """
    told = {(event.kind, event.data.get("attempt")) for event in load_events(paths)}
    for attempt in paths.list_attempts():
        request = read_document(Request, attempt.request)
        if request and (EventKind.ATTEMPT_RESERVED, attempt.number) not in told:
            _tell_reserved(request, journal, request.exclude)
        job: Submission | Claim | None = read_document(Submission, attempt.submission)
        if job is None and (EventKind.ATTEMPT_ENDED, attempt.number) in told:
            # It ended before anybody could find it for its submission.
            job = read_document(Claim, attempt.claim)
        if job and (EventKind.ATTEMPT_SUBMITTED, attempt.number) not in told:
            _tell_submitted(attempt, job.job_id, journal)


def is_unsubmitted(attempt: AttemptPaths) -> bool:
    """True for an attempt that was reserved and of which no submission is known."""
    return not attempt.submission.exists() and not attempt.outcome.exists()


def abandon_reservation(attempt: AttemptPaths, journal: JournalWriter) -> None:
    """End an attempt that a crash left without a request: nothing was ever submitted for it.

    Only the process that holds the run's flow lock may call this.
    """
    if read_document(Request, attempt.request) or read_document(Claim, attempt.claim):
        raise RunConflictError(f"{attempt.directory}: has a request; `resume_submission` is for it")
    journal.append(
        EventKind.ATTEMPT_ENDED,
        attempt=attempt.number,
        state="lost",
        cause="infrastructure",
        evidence=["the submitting process ended before the request was written"],
        ended_at=time.time(),
    )


def _submit(attempt: AttemptPaths, request: Request, journal: JournalWriter) -> None:
    submission = executor_for(request.executor).submit(attempt, request)
    _record(attempt, submission, journal)


def _record(attempt: AttemptPaths, submission: Submission, journal: JournalWriter) -> None:
    write_document(attempt.submission, submission)
    _tell_submitted(attempt, submission.job_id, journal)


def _tell_reserved(request: Request, journal: JournalWriter, exclude: Sequence[str]) -> None:
    journal.append(
        EventKind.ATTEMPT_RESERVED,
        attempt=request.attempt,
        gpus=request.world_size,
        nodes=request.nodes,
        reason=request.reason,
        exclude=list(exclude),
    )


def _tell_submitted(attempt: AttemptPaths, job_id: str, journal: JournalWriter) -> None:
    journal.append(EventKind.ATTEMPT_SUBMITTED, attempt=attempt.number, job_id=job_id)
