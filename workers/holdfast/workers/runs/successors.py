"""Successors: jobs that wait in the queue while an attempt runs, to become the next attempt.

A run has at most one successor that waits. `verdict.json` is created exclusively and decides once
what becomes of it: the attempt that it runs, or that it runs none. Its job trains only after the
first, and claims the attempt like any other job. So a job that starts late, or that the scheduler
could not withdraw, ends without training.

The order of writes is that of attempts: `mkdir successors/NNNN`, `request.json`,
`submitting.json`, the scheduler, `submission.json`, a journal line.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.contracts.disk.durable import fsync_directory, make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, SuccessorPaths
from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records import documents
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.records.orders import open_orders
from holdfast.contracts.states import AttemptState
from holdfast.workers.decisions import attempt_limit, exclusions, places
from holdfast.workers.decisions.policy import Decision
from holdfast.workers.runs.request import (
    as_successor,
    build_request,
    differences,
    run_by,
)
from holdfast.workers.schedulers import JobStatus, executor_for
from holdfast.workers.schedulers.slurm_capacity import Room

# A refused successor is submitted again after this time.
REFUSED_WAIT_S: Final = 600.0
# A successor that starts waits for this long to be adopted, and then ends.
WAIT_S_MAX: Final = 600.0
# It does not wait for an attempt that starts later than this.
DELAY_S_MAX: Final = 240.0


@dataclass(frozen=True, kw_only=True)
class Successor:
    """One successor, from its documents. `verdict` is None while it waits."""

    paths: SuccessorPaths
    request: documents.Request | None
    tried: documents.SubmissionTry | None
    submission: documents.Submission | None
    verdict: documents.SuccessorVerdict | None

    @property
    def number(self) -> int:
        return self.paths.number

    @property
    def is_waiting(self) -> bool:
        """True until it is adopted or withdrawn."""
        return self.verdict is None

    @property
    def is_closed(self) -> bool:
        """True if nothing is left to do about it: it runs an attempt, or its job is gone."""
        return self.verdict is not None and (self.verdict.attempt > 0 or self.verdict.is_gone)

    @property
    def may_have_job(self) -> bool:
        """False if the scheduler certainly got no job of it."""
        return self.submission is not None or (self.tried is not None and not self.tried.refused)


def newest(run: RunPaths) -> Successor | None:
    """Return the run's newest successor. Earlier ones are closed; None if there never was one."""
    paths = run.newest_successor()
    return None if paths is None else read(paths)


def read(paths: SuccessorPaths) -> Successor:
    """Read a successor's documents. Raises `UnreadableRunError` for a damaged one."""
    return Successor(
        paths=paths,
        request=documents.read_document(documents.Request, paths.request),
        tried=documents.read_document(documents.SubmissionTry, paths.submitting),
        submission=documents.read_document(documents.Submission, paths.submission),
        verdict=documents.read_document(documents.SuccessorVerdict, paths.verdict),
    )


def decide_on(
    paths: AttemptPaths, attempt: int, reason: str = "", *, restarts: int = 0
) -> documents.SuccessorVerdict:
    """Let a successor run `attempt`, or with 0 none; return the verdict that counts.

    Of several processes that decide at the same time, the first one creates it. `restarts` is the
    start of the job that runs the attempt, if the scheduler restarts it.
    """
    verdict = documents.SuccessorVerdict(
        attempt=attempt, restarts=restarts, reason=reason, decided_at=time.time()
    )
    if documents.create_document(paths.verdict, verdict):
        return verdict
    found = documents.read_document(documents.SuccessorVerdict, paths.verdict)
    assert found is not None
    return found


def waiting_facts(run: RunPaths) -> dict[str, Any] | None:
    """Return the facts about the successor that waits, as `show` prints them, or None."""
    one = newest(run)
    if one is None or not one.is_waiting or one.request is None:
        return None
    return {
        "number": one.number,
        "job_id": one.submission.job_id if one.submission else None,
        "after_attempt": one.request.attempt - 1,
        "gpus": one.request.size,
        "submitted_at": one.submission.submitted_at if one.submission else None,
    }


# While an attempt runs.


def tend(history: RunHistory, journal: JournalWriter, *, now: float) -> str:
    """Keep one successor in the queue while an attempt runs; return the news, or ''.

    `now` is Unix seconds. Only the process that holds the run's flow lock may call this. Raises
    `SchedulerError` if the scheduler does not answer.
    """
    if not _is_in_use(history):
        return ""
    one = newest(history.paths)
    if one is not None and not one.is_closed:
        why = _why_not_needed(history, one) if one.is_waiting else ""
        if why or not one.is_waiting:
            return withdraw(one, why, journal)
        return _watch(history, one, journal)
    if not _is_wanted(history) or _was_refused(one, now):
        return ""
    return _submit_new(history, journal, now)


def _is_in_use(history: RunHistory) -> bool:
    """Return True if the run's attempts have successors: those that Slurm restarts have none."""
    standby, last = history.spec.resources.standby, history.last_attempt
    if standby == "auto":
        return last is None or last.request is None or not last.request.expedite
    return standby == "successor"


def _is_wanted(history: RunHistory) -> bool:
    """Return True if the run may need another attempt after the one that runs."""
    last = history.last_attempt
    return (
        last is not None
        and last.state is AttemptState.RUNNING
        and last.request is not None
        and last.request.executor == "slurm"
        and last.job_id is not None
        and history.pending_request is None
        and attempt_limit.may_try_again(history)
    )


def _was_refused(one: Successor | None, now: float) -> bool:
    """Return True if Slurm refused the newest successor a short while ago."""
    if one is None or one.tried is None or not one.tried.refused:
        return False
    return 0 <= now - one.tried.tried_at < REFUSED_WAIT_S


def _why_not_needed(history: RunHistory, one: Successor) -> str:
    """Return why a waiting successor is withdrawn while an attempt is live, or ''."""
    last, asked = history.last_attempt, history.pending_request
    if asked is not None and (asked["action"] not in {"resume", "relaunch"} or asked.get("gpus")):
        return f"{asked['action']} by {asked.get('by') or 'an operator'}"
    if one.request is None or one.tried is None:
        return "the submitting process ended before the scheduler was asked"
    if one.tried.refused and one.submission is None:
        return f"the scheduler refused it: {one.tried.refused}"
    if last is not None and one.request.attempt != last.number + 1:
        return f"it was to follow attempt {one.request.attempt - 1}"
    return ""


def _submit_new(history: RunHistory, journal: JournalWriter, now: float) -> str:
    """Submit a successor of the running attempt, of the same size at the same place."""
    paths, last = history.paths, history.last_attempt
    assert last is not None
    before = paths.newest_successor()
    one = _reserve(paths, before.number + 1 if before else 1)
    if one is None:
        return ""
    request = _request_of(history, last, one.number, now)
    documents.write_document(one.request, request)
    with open_orders(paths) as book:
        # An order that comes later finds the successor and withdraws it.
        book.require(history.newest_order)
        asked = documents.SubmissionTry(count=1, host=socket.gethostname(), tried_at=now)
        documents.write_document(one.submitting, asked)
    try:
        submission = executor_for(request.executor).submit_successor(one, request)
    except SchedulerUnavailableError:
        raise
    except SchedulerError as error:
        refused = {"refused": str(error), "refusals": 1, "refused_since": now}
        documents.write_document(one.submitting, asked.model_copy(update=refused))
        return withdraw(read(one), f"the scheduler refused it: {error}", journal)
    return _record(one, request, submission, journal)


def _reserve(run: RunPaths, number: int) -> SuccessorPaths | None:
    paths = run.successor(number)
    make_directory(run.successors)
    try:
        paths.directory.mkdir()
    except FileExistsError:
        return None
    fsync_directory(run.successors)
    make_directory(paths.logs)
    return paths


def _request_of(
    history: RunHistory, last: AttemptView, number: int, now: float
) -> documents.Request:
    assert last.job_id is not None
    request = build_request(
        history.record,
        history.spec,
        attempt=last.number + 1,
        gpus=last.gpus,
        reason=f"the successor of attempt {last.number}",
        exclude=exclusions.excluded_hosts(history.attempts, now),
        place=places.place_of(last),
        created_at=now,
        cluster=last.request.cluster if last.request else None,
    )
    return as_successor(request, number, last.job_id)


def _record(
    paths: SuccessorPaths,
    request: documents.Request,
    submission: documents.Submission,
    journal: JournalWriter,
) -> str:
    documents.write_document(paths.submission, submission)
    journal.append(
        EventKind.SUCCESSOR_SUBMITTED,
        successor=paths.number,
        attempt=request.attempt - 1,
        job_id=submission.job_id,
        gpus=request.size,
    )
    return (
        f"job {submission.job_id} waits in the queue as the successor of attempt "
        f"{request.attempt - 1}"
    )


def _watch(history: RunHistory, one: Successor, journal: JournalWriter) -> str:
    """Record a job whose submission got no answer, and notice a job that is gone."""
    assert one.request is not None
    executor = executor_for(one.request.executor)
    if one.submission is None:
        if (found := executor.find(one.request)) is not None:
            return _record(one.paths, one.request, found, journal)
        assert one.tried is not None
        if not 0 <= time.time() - one.tried.tried_at < executor.absence_s:
            return withdraw(one, "the scheduler does not list it", journal)
        return ""
    journaled = history.lines.of_kinds(EventKind.SUCCESSOR_SUBMITTED)
    if not any(event.data.get("successor") == one.number for event in journaled):
        return _record(one.paths, one.request, one.submission, journal)
    status = executor.status(one.request, one.submission)
    return withdraw(one, _gone(status), journal) if status.has_ended else ""


def _gone(status: JobStatus) -> str:
    return f"its job does not wait any more: {(*status.evidence, status.detail)[0]}"


# The end of a successor that no attempt needs.


def release(history: RunHistory, reason: str, journal: JournalWriter) -> bool:
    """Withdraw what waits; return True if the scheduler has no job of a successor any more.

    Raises like `withdraw`.
    """
    if history.spec.resources.standby == "none":
        return True
    one = newest(history.paths)
    if one is None or one.is_closed:
        return True
    withdraw(one, reason, journal)
    one = read(one.paths)
    return one.is_closed


def withdraw(one: Successor, reason: str, journal: JournalWriter) -> str:
    """Decide that a successor runs no attempt and cancel its job; return the news, or ''.

    From the verdict on, its job cannot train, even if it starts. Raises `SchedulerError` if the
    scheduler does not answer. The next call then continues.
    """
    verdict = one.verdict or decide_on(one.paths, 0, reason)
    if verdict.attempt or verdict.is_gone:
        return ""
    job = one.submission
    if one.request is not None and one.may_have_job and not _cancel(one):
        return ""
    documents.write_document(one.paths.verdict, verdict.model_copy(update={"is_gone": True}))
    journal.append(
        EventKind.SUCCESSOR_WITHDRAWN,
        successor=one.number,
        job_id=job.job_id if job else None,
        reason=verdict.reason,
    )
    name = f"job {job.job_id}" if job else f"successor {one.number}"
    return f"{name} was withdrawn from the queue: {verdict.reason}"


def _cancel(one: Successor) -> bool:
    """Cancel a successor's job; return True if the scheduler has none any more.

    One whose submission got no answer may appear until the executor's `absence_s` have passed.
    """
    assert one.request is not None
    executor = executor_for(one.request.executor)
    live = executor.live_jobs(one.request)
    for job in live:
        executor.cancel(one.request, job)
    if live and executor.live_jobs(one.request):
        return False
    if one.submission is not None or live or one.tried is None:
        return True
    return not 0 <= time.time() - one.tried.tried_at < executor.absence_s


# Adoption as the next attempt.


def prefer(
    history: RunHistory,
    decision: Decision,
    room_at: Callable[[int], Room | None],
    fits: Callable[[int], bool],
) -> Decision:
    """Return the decision with the size of the waiting successor if a new job would wait, too.

    The policy takes the size that is free now. If not even that is free, a successor, which has
    waited for longer, starts sooner. What a person or `elastic.on_preemption` asks for is kept.
    """
    spec = history.spec
    if spec.resources.standby == "none" or decision.action != "relaunch":
        return decision
    one = newest(history.paths)
    if one is None or not one.is_waiting or one.request is None or one.submission is None:
        return decision
    size = one.request.size
    is_free_choice = history.pending_request is None and not spec.elastic.on_preemption
    if size == decision.gpus or not is_free_choice or not fits(size):
        return decision
    if one.request.place != decision.place:
        return decision
    room = room_at(decision.place)
    free = room.free_gpus(decision.exclude) if room is not None else None
    if free is None or free >= decision.gpus:
        return decision
    text = f"{decision.reason}; {counted(size, 'GPU')} instead, for which a successor waits"
    return replace(decision, gpus=size, reason=text)


def with_successor(
    run: RunPaths, request: documents.Request, journal: JournalWriter
) -> documents.Request:
    """Return the request of the next attempt as the waiting successor runs it, if it can.

    A successor that cannot run it is withdrawn. Raises `SchedulerError` if the scheduler does not
    answer about one that could.
    """
    one = newest(run) if request.resources.standby != "none" else None
    if one is None or one.is_closed:
        return request
    why = _why_unfit(one, request) if one.is_waiting else ""
    if why or not one.is_waiting:
        withdraw(one, why, journal)
        return request
    return run_by(request, one.number)


def _why_unfit(one: Successor, request: documents.Request) -> str:
    """Return why a waiting successor cannot run the attempt of `request`, or ''.

    A job that is still pending gets the nodes that the attempt excludes.
    """
    if one.request is None or one.submission is None:
        return "its submission got no answer"
    if found := differences(one.request, request):
        return f"attempt {request.attempt} needs another job: {', '.join(found)} differ"
    executor = executor_for(request.executor)
    status = executor.status(one.request, one.submission)
    if status.state is AttemptState.PENDING:
        try:
            executor.change_exclusion(one.request, one.submission, request.exclude)
        except SchedulerUnavailableError:
            raise
        except SchedulerError as error:
            return f"the nodes that it excludes cannot be changed: {error}"
        status = executor.status(one.request, one.submission, since=time.time())
    if status.state not in {AttemptState.PENDING, AttemptState.RUNNING}:
        return _gone(status)
    shared = sorted({*status.nodes} & {*request.exclude})
    return f"it has started on {', '.join(shared)}, which is excluded" if shared else ""


def adopt(run: RunPaths, request: documents.Request) -> documents.Submission | None:
    """Let the successor that `request` names run its attempt; return the job, or None if it ended.

    Repeating this is harmless.
    """
    one = read(run.successor(request.successor))
    number = request.attempt if one.submission is not None else 0
    verdict = one.verdict or decide_on(one.paths, number)
    if verdict.attempt != request.attempt or one.submission is None:
        return None
    # The attempt begins now: its job waited for another one before.
    return one.submission.model_copy(update={"submitted_at": request.created_at})


def let_start(request: documents.Request, job: documents.Submission) -> None:
    """Let an adopted job start, although the job of the attempt before may not have ended yet.

    Slurm ends a job that lost a node after `SlurmdTimeout`, and gives its other nodes to the jobs
    behind the successor meanwhile.
    """
    # Without an answer, it starts when that job has ended.
    with contextlib.suppress(SchedulerError):
        executor_for(request.executor).drop_dependency(request, job)


def is_undecided(run: RunPaths, request: documents.Request) -> bool:
    """Return True while nobody has decided about the successor that `request` names."""
    return attempt_of(run, request.successor) is None


def attempt_of(run: RunPaths, number: int) -> int | None:
    """Return the attempt that a successor runs, 0 if it runs none, None while it waits."""
    verdict = documents.read_document(documents.SuccessorVerdict, run.successor(number).verdict)
    return None if verdict is None else verdict.attempt


def without_successor(attempt: AttemptPaths, request: documents.Request) -> documents.Request:
    """Return the request of an attempt with a separate job, after its successor has ended.

    The same holds for the restarted job that was to run it.
    """
    if not request.successor and not request.restart_of:
        return request
    request = run_by(request, 0)
    attempt.submitting.unlink(missing_ok=True)
    documents.write_document(attempt.request, request)
    return request


def gpus_held(history: RunHistory) -> dict[str, int]:
    """Return the GPUs by host that a waiting successor holds, because its job has started."""
    if history.spec.resources.standby == "none":
        return {}
    one = newest(history.paths)
    if one is None or not one.is_waiting or one.request is None or one.submission is None:
        return {}
    status = executor_for(one.request.executor).status(one.request, one.submission)
    if status.state is not AttemptState.RUNNING:
        return {}
    return dict.fromkeys(status.nodes, one.request.gpus_on_node)
