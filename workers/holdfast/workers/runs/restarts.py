"""Restarts: the scheduler starts an attempt's job again, and the next attempt may run in it.

With `resources.standby = "expedite"`, Slurm restarts a job at the highest priority after a node
failure. The restart has the attempt's folder: `restart.json` is the job as it was seen, and
`verdict.json` decides once which attempt runs in it, or none, as for a successor. Without a verdict
it does not train. See decision 99.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.bounds import NUMBER_MAX
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records import documents
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.decisions.policy import Decision
from holdfast.workers.decisions.restarts import plan_restart
from holdfast.workers.decisions.sizes import is_single
from holdfast.workers.runs import successors
from holdfast.workers.runs.request import as_restart, build_request, differences
from holdfast.workers.schedulers import Executor, executor_for

# How many attempts back a withdrawal may be unfinished.
BACK_MAX: Final = 3


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The restart of an attempt's job, from the attempt's documents.

    `submission` is that of the attempt, and `seen` the restarted job once it was seen.
    """

    paths: AttemptPaths
    request: documents.Request
    submission: documents.Submission
    seen: documents.Submission | None
    verdict: documents.SuccessorVerdict | None

    @property
    def executor(self) -> Executor:
        return executor_for(self.request.executor)


def read(paths: AttemptPaths) -> Restart | None:
    """Return the restart that an attempt's job may have; None if it may have none."""
    request = documents.read_document(documents.Request, paths.request)
    submission = documents.read_document(documents.Submission, paths.submission)
    if request is None or not request.expedite or submission is None:
        return None
    return Restart(
        paths=paths,
        request=request,
        submission=submission,
        seen=documents.read_document(documents.Submission, paths.restart),
        verdict=documents.read_document(documents.SuccessorVerdict, paths.verdict),
    )


def _newest(run: RunPaths, below: int = NUMBER_MAX) -> Restart | None:
    """Return the restart of the newest attempt that was submitted."""
    numbers = [number for number in run.attempt_numbers() if number < below]
    for number in reversed(numbers[-BACK_MAX:]):
        paths = run.attempt(number)
        if paths.submission.exists():
            return read(paths)
    return None


def waiting_facts(run: RunPaths) -> dict[str, Any] | None:
    """Return the facts about the job that waits to become the next attempt, or None.

    It is a successor, or a restart.
    """
    one = _newest(run)
    if one is None or one.verdict is not None or one.seen is None:
        return successors.waiting_facts(run)
    return {
        "number": one.seen.restarts,
        "job_id": one.seen.job_id,
        "after_attempt": one.request.attempt,
        "gpus": one.request.size,
        "submitted_at": one.seen.submitted_at,
    }


def may_come(history: RunHistory) -> bool:
    """Return True if the last attempt's job may be restarted, or is.

    The nodes of the job stay free for it, so their number does not limit the next attempt.
    """
    last = history.last_asked
    if last is None or last.request is None or not last.request.expedite:
        return False
    if not last.state.is_terminal:
        return False
    one = read(history.paths.attempt(last.number))
    return one is not None and one.verdict is None


def prepare(history: RunHistory, decision: Decision, journal: JournalWriter, now: float) -> str:
    """Prepare the restart of the last attempt's job for a relaunch; return why that waits, or ''.

    A restart that the next attempt cannot use is withdrawn. The supervisor then decides again,
    because the free nodes limit the size of an attempt with a separate job. Raises
    `SchedulerError` if the scheduler does not answer. Only the process that holds the run's flow
    lock may call this. `now` is Unix seconds.
    """
    if not may_come(history):
        return ""
    last = history.last_asked
    assert last is not None
    one = read(history.paths.attempt(last.number))
    assert one is not None
    start = one.executor.start_of(one.request, one.submission)
    wanted = build_request(
        history.record,
        history.spec,
        attempt=history.attempts[-1].number + 1,
        gpus=decision.gpus,
        reason=decision.reason,
        exclude=decision.exclude,
        place=decision.place,
        cluster=one.request.cluster,
        expedite=is_allowed(history.spec, decision.gpus),
    )
    ended = last.facts.get("noticed_at") or last.ended_at or now
    plan = plan_restart(
        start,
        restarts=one.submission.restarts,
        differ=differences(one.request, wanted),
        exclude=decision.exclude,
        waited_s=now - ended,
        has_choice=bool(history.spec.resources.fallbacks) or not is_single(history.spec),
    )
    if start is not None and start.restarts > one.submission.restarts and plan.action != "gone":
        _record_seen(history, one, start.restarts, journal, now)
    if plan.action == "wait":
        return f"job {one.submission.job_id}: {plan.reason}"
    if plan.action == "adopt":
        return ""
    reason = plan.reason or "Slurm did not restart it"
    _withdraw(read(one.paths), reason, journal)
    return f"job {one.submission.job_id}: {reason}"


def _record_seen(
    history: RunHistory, one: Restart, restarts: int, journal: JournalWriter, now: float
) -> None:
    if one.seen is None or one.seen.restarts != restarts:
        seen = one.submission.model_copy(update={"restarts": restarts, "submitted_at": now})
        documents.write_document(one.paths.restart, seen)
    facts = {"attempt": one.request.attempt, "restarts": restarts}
    lines = history.lines.of_kinds(EventKind.SUCCESSOR_SUBMITTED)
    if not any(facts.items() <= line.data.items() for line in lines):
        journal.append(
            EventKind.SUCCESSOR_SUBMITTED,
            attempt=one.request.attempt,
            restarts=restarts,
            job_id=one.submission.job_id,
            gpus=one.request.size,
        )


def with_restart(run: RunPaths, request: documents.Request) -> documents.Request:
    """Return the request of the next attempt, in the restarted job if `prepare` chose that."""
    one = _newest(run, below=request.attempt) if request.expedite else None
    if one is None or one.verdict is not None or one.seen is None:
        return request
    return as_restart(request, one.request)


def is_undecided(run: RunPaths, request: documents.Request) -> bool:
    """Return True while nobody has decided about the restart that `request` names."""
    one = read(run.attempt(request.restart_of))
    return one is not None and one.verdict is None


def adopt(run: RunPaths, request: documents.Request) -> documents.Submission | None:
    """Let the attempt of `request` run in the restarted job; return the job, or None if it ended.

    Repeating this is harmless.
    """
    one = read(run.attempt(request.restart_of))
    if one is None:
        return None
    number = request.attempt if one.seen is not None else 0
    restarts = one.seen.restarts if one.seen is not None else 0
    verdict = one.verdict or successors.decide_on(one.paths, number, restarts=restarts)
    if verdict.attempt != request.attempt:
        return None
    facts = {"restarts": verdict.restarts, "submitted_at": request.created_at}
    return one.submission.model_copy(update=facts)


def release(history: RunHistory, reason: str, journal: JournalWriter) -> bool:
    """Withdraw what waits to become the next attempt; return True if nothing of it is left.

    Raises `SchedulerError` if the scheduler does not answer.
    """
    last = history.last_asked
    is_gone = True
    if last is not None and last.state.is_terminal:
        is_gone = _withdraw(read(history.paths.attempt(last.number)), reason, journal)
    return successors.release(history, reason, journal) and tend(history, journal) and is_gone


def tend(history: RunHistory, journal: JournalWriter) -> bool:
    """Finish earlier withdrawals; return True if there is nothing left of them."""
    last = history.last_attempt
    if last is None or last.request is None or history.spec.resources.standby == "none":
        return True
    is_gone = True
    for number in range(max(1, last.number - BACK_MAX), last.number):
        one = read(history.paths.attempt(number))
        if one is not None and one.verdict is not None:
            is_gone &= _withdraw(one, one.verdict.reason, journal)
    return is_gone


def _withdraw(one: Restart | None, reason: str, journal: JournalWriter) -> bool:
    """Decide that no attempt runs in a restart, and cancel it; return True if it is gone.

    From the verdict on, it cannot train, even if it starts.
    """
    if one is None:
        return True
    verdict = one.verdict or successors.decide_on(one.paths, 0, reason)
    if verdict.attempt or verdict.is_gone:
        return True
    if not one.executor.end_restarts(one.request, one.submission):
        return False
    documents.write_document(one.paths.verdict, verdict.model_copy(update={"is_gone": True}))
    if one.seen is not None:
        journal.append(
            EventKind.SUCCESSOR_WITHDRAWN,
            attempt=one.request.attempt,
            restarts=one.seen.restarts,
            job_id=one.submission.job_id,
            reason=verdict.reason,
        )
    return True


def first_of(run: RunPaths, request: documents.Request) -> AttemptPaths:
    """Return the attempt for which the job of `request` was submitted: an earlier one, or its own.

    The job's logs are in that attempt's folder.
    """
    number = request.attempt
    while request.restart_of and request.restart_of < number:
        number = request.restart_of
        before = documents.read_document(documents.Request, run.attempt(number).request)
        if before is None:
            break
        request = before
    return run.attempt(number)


def job_logs(attempt: AttemptPaths) -> Path:
    """Return the folder with the logs of an attempt's job.

    A successor's job and a restart's were submitted before there was the attempt's folder.
    """
    request = documents.read_document(documents.Request, attempt.request)
    if request is not None and request.restart_of:
        return first_of(attempt.run, request).logs
    number = request.successor if request is not None else 0
    return attempt.run.successor(number).logs if number else attempt.logs


def is_allowed(spec: RunSpec, gpus: int) -> bool:
    """Return True if Slurm may restart the job of an attempt on `gpus` GPUs after a node failure.

    A job with spare nodes continues without a restart. Raises `SchedulerUnavailableError` without
    an answer.
    """
    resources = spec.resources
    if resources.standby not in {"expedite", "auto"}:
        return False
    if resources.spares_beside(spec.share(gpus).nodes):
        return False
    return executor_for(resources.executor).expedites()
