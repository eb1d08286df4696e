"""Reserve, request and submit attempts, each exactly once.

The order of writes makes a relaunch safe after a crash at any point: `mkdir attempts/NNNN` (only
one process succeeds), `request.json`, a journal line, the scheduler, `submission.json`, a journal
line. For an attempt without a submission, the scheduler is first asked for a job of its name.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.contracts import errors
from holdfast.contracts.disk.durable import fsync_directory, make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records import documents
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.records.orders import OrderBook, open_orders
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.runs import restarts, successors
from holdfast.workers.runs.provenance import take_provenance
from holdfast.workers.runs.request import build_request, working_directory_of
from holdfast.workers.schedulers import executor_for
from holdfast.workers.schedulers.base import Executor


def reserve(paths: RunPaths, number: int) -> AttemptPaths | None:
    """Reserve attempt `number` of a run; return None if another process has reserved it."""
    attempt = paths.attempt(number)
    make_directory(paths.attempts)
    try:
        # `mkdir` is exclusive on shared file systems too, so one process gets the number.
        attempt.directory.mkdir()
    except FileExistsError:
        return None
    # A power cut must not free the number: its job may be running by then.
    fsync_directory(paths.attempts)
    for directory in (attempt.journal, attempt.heartbeats, attempt.logs, attempt.dumps):
        make_directory(directory)
    return attempt


def submit_attempt(
    paths: RunPaths,
    spec: RunSpec,
    record: documents.RunRecord,
    *,
    gpus: int,
    reason: str,
    exclude: Sequence[str] = (),
    place: int = 0,
    hangs_before: int = 0,
    journal: JournalWriter,
    seen: int | None = None,
) -> AttemptPaths:
    """Reserve the next attempt and submit it on `gpus` GPUs.

    `hangs_before` is what earlier attempts used of the budget `hang`.
    `seen` is the newest order that the decision took into account, see `RunHistory.newest_order`.
    Raises `OrdersChangedError` if another came since, `RunConflictError` if another process
    reserved the attempt first, `SchedulerError` if the scheduler refused it, and
    `SchedulerUnavailableError` if the answer is unknown. In the last case the attempt stays
    reserved, and `resume_submission` continues it.
    """
    with open_orders(paths) as book:
        # The decision was made without the lock, because it asks the scheduler. An order that came
        # meanwhile makes the supervisor decide again, see decision 85.
        book.require(seen)
        taken = paths.list_attempts()
        number = taken[-1].number + 1 if taken else 1
        attempt = reserve(paths, number)
    if attempt is None:
        raise errors.RunConflictError(
            f"attempt {number} of {paths.name} was reserved by another process; only one "
            "supervisor submits a run's attempts, so wait for that one"
        )
    try:
        request = build_request(
            record,
            spec,
            attempt=number,
            gpus=gpus,
            reason=reason,
            exclude=exclude,
            place=place,
            hangs_before=hangs_before,
            created_at=time.time(),
            cluster=executor_for(spec.resources.executor).cluster(),
            provenance=take_provenance(spec, Path(working_directory_of(record, spec))),
            expedite=restarts.is_allowed(spec, gpus),
        )
        request = restarts.with_restart(paths, request)
        if not request.restart_of:
            request = successors.with_successor(paths, request, journal)
        # On disk before the scheduler is asked, so the job needs nothing from this process any
        # more, see decision 34.
        documents.write_document(attempt.request, request)
    except BaseException:
        # The scheduler was not asked yet. A full disk must not use up a number at each try.
        with open_orders(paths) as book:
            # An order that names this attempt needs it, so the number is used up then.
            if book.ending(number) is None:
                shutil.rmtree(attempt.directory, ignore_errors=True)
        raise
    _journal_reserved(request, journal, exclude)
    if not _start_waiting(paths, attempt, request, journal):
        _submit(paths, attempt, successors.without_successor(attempt, request), journal)
    return attempt


def resume_submission(
    paths: RunPaths, journal: JournalWriter, absences: Absences | None = None
) -> AttemptPaths | None:
    """Finish a submission that a crash or an unavailable scheduler interrupted, if there is one.

    A job that claimed the attempt or has its name is recorded. An attempt that was never sent to
    the scheduler, or that it refused, is submitted. If the answer to a submission is unknown, the
    attempt is submitted again only after the job stayed absent for the executor's `absence_s`
    seconds, counted by `absences`. Until then `SchedulerUnavailableError` is raised: wait and
    call again. Raises `OrdersChangedError` if there certainly is not a job, and an order ends the
    attempt. Returns None if no submission is unfinished.
    """
    taken = paths.list_attempts()
    if not taken or not is_unsubmitted(taken[-1]):
        return None
    attempt = taken[-1]
    request = documents.read_document(documents.Request, attempt.request)
    if request is None:
        raise errors.NotFoundError(
            f"{attempt.directory}: reserved, but its request was never written; call "
            "`abandon_reservation` to free the number"
        )
    if _start_waiting(paths, attempt, request, journal):
        return attempt
    request = successors.without_successor(attempt, request)
    executor = executor_for(request.executor)
    tried = documents.read_document(documents.SubmissionTry, attempt.submitting)
    # The claim comes first: it is certain, and the scheduler may not list the job yet.
    found = _claimed_job(attempt, request) or executor.find(request)
    if found is not None:
        _record(attempt, found, journal)
        return attempt
    if tried is not None and not tried.refused:
        _await_answer(attempt, request, tried, absences or Absences())
    _submit(paths, attempt, request, journal)
    return attempt


class Absences:
    """How long this process has looked for each attempt's job without finding it.

    Uses the monotonic clock of one process, so setting the system clock cannot age an absence.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[tuple[int, int], float] = {}

    def seconds(self, attempt: int, count: int) -> float:
        """Return the seconds since the first look for the job after submission number `count`."""
        now = self._clock()
        return now - self._since.setdefault((attempt, count), now)


def _await_answer(
    attempt: AttemptPaths,
    request: documents.Request,
    tried: documents.SubmissionTry,
    absences: Absences,
) -> None:
    """Raise `SchedulerUnavailableError` unless it is certain that there is no job."""
    absence_s = executor_for(request.executor).absence_s
    # Only that host can see the process.
    if request.executor == "local" and tried.host != socket.gethostname():
        raise errors.SchedulerUnavailableError(
            f"attempt {attempt.number} was being started on {tried.host} with the local executor; "
            "run the command there"
        )
    waited_s = absences.seconds(attempt.number, tried.count)
    if waited_s < absence_s:
        raise errors.SchedulerUnavailableError(
            f"it is unknown whether the scheduler accepted {request.job_name}, which it does not "
            f"list; it is submitted again if it does not appear within {absence_s:.0f} s"
        )


def end_duplicates(attempt: AttemptPaths, journal: JournalWriter) -> list[str]:
    """Keep one of the jobs that the scheduler may hold for an attempt; return what was done.

    The job that claimed the attempt is kept, otherwise the recorded one, otherwise the oldest.
    Without a claim only pending jobs are cancelled, because a running one may be about to claim.
    Only the process that holds the run's flow lock may call this.
    """
    tried = documents.read_document(documents.SubmissionTry, attempt.submitting)
    request = documents.read_document(documents.Request, attempt.request)
    if tried is None or request is None or not tried.may_have_duplicates:
        return []
    executor = executor_for(request.executor)
    jobs = executor.live_jobs(request)
    claim = documents.read_claim(attempt)
    recorded = documents.read_document(documents.Submission, attempt.submission)
    live = [job.job_id for job in jobs]
    kept = claim.job_id if claim else recorded.job_id if recorded else ""
    if not claim and kept not in live:
        kept = live[0] if live else kept
    if recorded is not None and kept != recorded.job_id:
        # Before any job is cancelled: a crash in between must not leave a cancelled job on record.
        documents.write_document(attempt.submission, recorded.model_copy(update={"job_id": kept}))
    messages = []
    for job in jobs:
        if job.job_id == kept:
            continue
        if claim:
            executor.cancel(request, job)
        else:
            executor.withdraw(request, job)
        messages.append(
            f"job {job.job_id} duplicates job {kept} of attempt {attempt.number}; it was cancelled"
        )
        journal.append(EventKind.NOTE, attempt=attempt.number, text=messages[-1])
    return messages


def cancel_leftovers(
    attempt: AttemptPaths, request: documents.Request, *, ended: str | None
) -> None:
    """Cancel every other job of an attempt whose job has `ended`, if there may be others.

    If the scheduler does not answer, they stay: they find the attempt claimed and end themselves.
    """
    tried = documents.read_document(documents.SubmissionTry, attempt.submitting)
    if tried is None or not tried.may_have_duplicates:
        return
    executor = executor_for(request.executor)
    with contextlib.suppress(errors.SchedulerError):
        for job in executor.live_jobs(request):
            if job.job_id != ended:
                executor.cancel(request, job)


def complete_journal(paths: RunPaths, journal: JournalWriter) -> None:
    """Journal the reservations and submissions that a crash kept out of the journal.

    Each of them was written as a document first. Only the process that holds the run's flow lock
    may call this.
    """
    history = load_tallied(paths)
    journaled = history.tally.listed | {
        (str(event.kind), event.data.get("attempt")) for event in history.events
    }
    for attempt in paths.list_attempts():
        request = documents.read_document(documents.Request, attempt.request)
        if request and (EventKind.ATTEMPT_RESERVED, attempt.number) not in journaled:
            _journal_reserved(request, journal, request.exclude)
        job: documents.Submission | documents.Claim | None = documents.read_document(
            documents.Submission, attempt.submission
        )
        if job is None and (EventKind.ATTEMPT_ENDED, attempt.number) in journaled:
            # It ended before its submission was found and recorded.
            job = documents.read_claim(attempt)
        if job and (EventKind.ATTEMPT_SUBMITTED, attempt.number) not in journaled:
            _journal_submitted(attempt, job.job_id, journal)


def is_unsubmitted(attempt: AttemptPaths) -> bool:
    """Return True for a reserved attempt without a known submission."""
    return not attempt.submission.exists() and not attempt.outcome.exists()


def abandon_reservation(attempt: AttemptPaths, journal: JournalWriter) -> None:
    """End an attempt that has no request because of a crash; it was never submitted.

    Only the process that holds the run's flow lock may call this.
    """
    # The claim decides between this process and a job that starts late: the one that creates it
    # wins.
    if documents.read_document(documents.Request, attempt.request) or not documents.close_claim(
        attempt
    ):
        raise errors.RunConflictError(
            f"{attempt.directory}: has a request; call `resume_submission` instead"
        )
    evidence = "the submitting process ended before the request was written"
    _journal_ended(attempt, journal, AttemptState.LOST, Cause.INFRASTRUCTURE, evidence)


def end_unsubmitted(
    attempt: AttemptPaths,
    journal: JournalWriter,
    *,
    state: AttemptState,
    cause: Cause,
    evidence: str,
) -> bool:
    """End an attempt that has no job at the scheduler; return False if a job claimed it after all.

    Only the process that holds the run's flow lock may call this.
    """
    # Exclusive, so a job that starts late cannot train an attempt that has ended.
    if not documents.close_claim(attempt):
        return False
    _journal_ended(attempt, journal, state, cause, evidence)
    return True


def has_no_job(attempt: AttemptPaths) -> bool:
    """Return True if the scheduler certainly holds no job of an unsubmitted attempt."""
    tried = documents.read_document(documents.SubmissionTry, attempt.submitting)
    # Each try was refused, so no answer was lost.
    return tried is None or (bool(tried.refused) and tried.count == tried.refusals)


def gpus_held_after_end(executor: Executor, run: RunPaths, history: RunHistory) -> dict[str, int]:
    """Return the GPUs by host that the last attempt's job has not released yet."""
    last = history.last_asked
    if last is None or last.request is None:
        return {}
    submission = documents.read_document(documents.Submission, run.attempt(last.number).submission)
    held = executor.held_after_end(last.request, submission) if submission else {}
    # The next attempt may have the nodes of its successor.
    for host, gpus in successors.gpus_held(history).items():
        held[host] = held.get(host, 0) + gpus
    return held


def _start_waiting(
    paths: RunPaths, attempt: AttemptPaths, request: documents.Request, journal: JournalWriter
) -> bool:
    """Let the successor or restart that the request names run the attempt; False if it cannot.

    Raises `OrdersChangedError` like `_submit`.
    """
    if not request.successor and not request.restart_of:
        return False
    one = restarts if request.restart_of else successors
    if one.is_undecided(paths, request):
        asked = documents.SubmissionTry(count=1, host=socket.gethostname(), tried_at=time.time())
        with open_orders(paths) as book:
            _require_no_ending(paths, attempt, book)
            documents.write_document(attempt.submitting, asked)
            job = one.adopt(paths, request)
    else:
        job = one.adopt(paths, request)
    if job is None:
        return False
    _record(attempt, job, journal)
    which = {"restarts": job.restarts} if job.restarts else {"successor": request.successor}
    journal.append(EventKind.SUCCESSOR_ADOPTED, **which, attempt=attempt.number, job_id=job.job_id)
    if request.successor:
        successors.let_start(request, job)
    return True


def _require_no_ending(paths: RunPaths, attempt: AttemptPaths, book: OrderBook) -> None:
    if (order := book.ending(attempt.number)) is not None:
        raise errors.OrdersChangedError(
            f"{order.data.get('by') or 'an operator'} asked to {order.data['action']} "
            f"{paths.name} before attempt {attempt.number} was submitted"
        )


def _submit(
    paths: RunPaths, attempt: AttemptPaths, request: documents.Request, journal: JournalWriter
) -> None:
    """Submit the job, and record both the attempt to submit and the scheduler's answer.

    Raises `OrdersChangedError` for an order that came after the attempt was reserved. One that
    comes after this check finds `submitting.json`, and the supervisor ends the job.
    """
    before = documents.read_document(documents.SubmissionTry, attempt.submitting)
    now = time.time()
    asked = documents.SubmissionTry(
        count=before.count + 1 if before else 1,
        host=socket.gethostname(),
        tried_at=now,
        refusals=before.refusals if before else 0,
        refused_since=before.refused_since if before else None,
    )
    with open_orders(paths) as book:
        _require_no_ending(paths, attempt, book)
        # Durable before the scheduler is asked. Without it, a crash during `sbatch` would look like
        # an attempt that was never submitted, and the next supervisor would submit it again.
        documents.write_document(attempt.submitting, asked)
    try:
        submission = executor_for(request.executor).submit(attempt, request)
    except errors.SchedulerUnavailableError:
        # The answer is unknown, so no refusal is recorded: the job may exist.
        raise
    except errors.SchedulerError as error:
        message = str(error)
        refused = {
            "refused": message,
            "may_pass": isinstance(error, errors.SubmissionRefusedError) and error.may_pass,
            "refusals": asked.refusals + 1,
            "refused_since": asked.refused_since or now,
        }
        documents.write_document(attempt.submitting, asked.model_copy(update=refused))
        # A refusal that can pass is retried for a week. One line for each reason is enough.
        if before is None or before.refused != message:
            journal.append(
                EventKind.ATTEMPT_STATE,
                attempt=attempt.number,
                state=AttemptState.CREATED.value,
                detail=message,
            )
        raise
    _record(attempt, submission, journal)


def _claimed_job(attempt: AttemptPaths, request: documents.Request) -> documents.Submission | None:
    """Return the job that claimed the attempt, unless the executor is local."""
    claim = documents.read_claim(attempt)
    if claim is None or request.executor == "local":
        return None
    return documents.Submission(
        job_id=claim.job_id, executor=request.executor, submitted_at=request.created_at
    )


def _record(
    attempt: AttemptPaths, submission: documents.Submission, journal: JournalWriter
) -> None:
    documents.write_document(attempt.submission, submission)
    _journal_submitted(attempt, submission.job_id, journal)


def _journal_reserved(
    request: documents.Request, journal: JournalWriter, exclude: Sequence[str]
) -> None:
    journal.append(
        EventKind.ATTEMPT_RESERVED,
        attempt=request.attempt,
        gpus=request.size,
        nodes=request.nodes,
        reason=request.reason,
        exclude=list(exclude),
        place=request.place,
    )


def _journal_submitted(attempt: AttemptPaths, job_id: str, journal: JournalWriter) -> None:
    journal.append(EventKind.ATTEMPT_SUBMITTED, attempt=attempt.number, job_id=job_id)


def _journal_ended(
    attempt: AttemptPaths, journal: JournalWriter, state: AttemptState, cause: Cause, evidence: str
) -> None:
    journal.append(
        EventKind.ATTEMPT_ENDED,
        attempt=attempt.number,
        state=state.value,
        cause=cause.value,
        evidence=[evidence],
        ended_at=time.time(),
    )
