"""The endings and changes of state of attempts, from the outcome, the claim and the scheduler.

What only an ending needs is imported then, because most looks at an attempt find none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import xxhash

from holdfast.contracts import errors
from holdfast.contracts.disk import file_locks, filesystems, reading
from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, folder_of
from holdfast.contracts.records import documents
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import ATTEMPT_MOVES, AttemptState
from holdfast.workers.decisions.sizes import is_single
from holdfast.workers.nodes.processes import boot_id
from holdfast.workers.schedulers import JobStatus, executor_for

# How long an outcome waits for the scheduler's final state.
VERDICT_WAIT_S: Final = 60.0
# How long a job usually takes to end after its agent has written the outcome.
JOB_ENDS_S: Final = 3.0
# For how long after the loss of a lead another node of its job may still take over.
SUCCESSION_S: Final = 60.0
ENDING_LOCK_S: Final = 60.0
# A new forecast of a pending job's start is journaled if it moves by this, and so seldom.
FORECAST_MOVE_S: Final = 60.0
FORECAST_EVERY_S: Final = 300.0
LOG_TAIL_BYTES: Final = 4096
# `missing.json` has the notes of this many other hosts at most.
NOTED_HOSTS_MAX: Final = 32


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything known about one attempt at one moment."""

    request: documents.Request | None
    submission: documents.Submission | None
    claim: documents.Claim | None
    outcome: documents.Outcome | None
    stop: documents.StopFile | None
    status: JobStatus | None

    @property
    def has_ended(self) -> bool:
        """Return True if the outcome says how the attempt ended and nothing can change that."""
        return self.outcome is not None and self._is_final(self.outcome)

    @property
    def misses(self) -> str:
        """What is missing although the attempt seems over: "job", "outcome", "verdict" or ""."""
        if self.outcome is not None:
            return "" if self._is_final(self.outcome) else "verdict"
        if self.status is None or not self.status.has_ended:
            return ""
        return "job" if self.status.is_absent else "outcome"

    @property
    def job(self) -> documents.Submission | None:
        """The job that runs the attempt."""
        return documents.job_of(self.submission, self.claim)

    def _is_final(self, outcome: documents.Outcome) -> bool:
        """Return True if no later answer of the scheduler can change the ending.

        Slurm reports a job as COMPLETING until its nodes are free, and only then why it ended.
        """
        if self.request is None or self.request.executor != "slurm":
            return True
        from holdfast.workers.decisions.causes import is_certain

        if outcome.state is AttemptState.COMPLETED or is_certain(outcome):
            return True
        return self.status is not None and self.status.has_ended


def complete_goodput(paths: RunPaths, journal: JournalWriter) -> None:
    """Journal the goodput of attempts whose ending was written by a process that then died."""
    history = load_tallied(paths)
    for view in history.attempts:
        is_journaled = (EventKind.GOODPUT, view.number) in history.tally.listed
        if view.was_submitted and view.state.is_terminal and not is_journaled:
            _journal_goodput(history, view.number, journal)


def _journal_goodput(history: RunHistory, number: int, journal: JournalWriter) -> None:
    """Journal the goodput of the run up to the end of attempt `number`."""
    from holdfast.contracts.account.timeline import goodput_of

    count = [view.number for view in history.attempts].index(number) + 1
    goodput = goodput_of(
        history, until=history.attempts[count - 1].ended_at or time.time(), attempts=count
    )
    journal.append(EventKind.GOODPUT, attempt=number, **asdict(goodput))


def observe(attempt: AttemptPaths) -> Observation:
    """Read an attempt's documents and its job's status (None if the scheduler does not answer)."""
    before = documents.read_documents(attempt)
    status = None
    if before.request is not None:
        with contextlib.suppress(errors.SchedulerUnavailableError, errors.SchedulerError):
            # The job that claimed the attempt runs it, even if another was recorded.
            since = before.outcome.ended_at + JOB_ENDS_S if before.outcome else 0.0
            executor = executor_for(before.request.executor)
            status = executor.status(before.request, before.job, since=since)
    # Read the documents after the scheduler: an outcome written before the job ended is then seen.
    after = documents.read_documents(attempt)
    return Observation(
        request=before.request,
        submission=before.submission,
        claim=after.claim,
        outcome=after.outcome,
        stop=documents.read_document(documents.StopFile, attempt.stop)
        if filesystems.is_there(attempt.stop)
        else None,
        status=status,
    )


def reconcile_attempt(
    paths: RunPaths, view: AttemptView, writer: str, load: Callable[[], RunHistory]
) -> bool:
    """Journal what is new about one attempt; return True if anything was."""
    attempt = paths.attempt(view.number)
    seen = observe(attempt)
    if seen.status is not None and seen.status.is_leaderless and not _is_led(attempt, seen):
        # Slurm would keep such a job running on the other nodes until its time limit, see
        # decision 5.
        _end_leaderless(paths, attempt, seen, writer, load)
    if not _awaits_submission(seen) and _is_over(attempt, seen):
        return _end(paths, attempt, seen, writer, load)
    status = seen.status
    if status is None or status.state is None or status.state.is_terminal:
        return False
    is_new = status.state in ATTEMPT_MOVES[view.state]
    if not is_new and not _is_new_forecast(view, status, time.time()):
        return False
    facts: dict[str, Any] = {"state": status.state.value, "detail": status.detail}
    if status.starts_at is not None:
        facts["starts_at"] = status.starts_at
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.ATTEMPT_STATE, attempt=view.number, **facts)
    return True


def _is_new_forecast(view: AttemptView, status: JobStatus, now: float) -> bool:
    """Return True if a pending job waits for something else, or will start at another time.

    The scheduler's forecast changes often, so a new time is journaled only now and then.
    """
    last = view.pending
    if last is None or status.state is not AttemptState.PENDING:
        return False
    if status.detail != last.data.get("detail"):
        return True
    before, after = last.data.get("starts_at"), status.starts_at
    has_moved = before != after and (
        before is None or after is None or abs(after - before) >= FORECAST_MOVE_S
    )
    return has_moved and not 0 <= now - last.time < FORECAST_EVERY_S


def _is_over(attempt: AttemptPaths, seen: Observation) -> bool:
    """Return True if the attempt has ended and nothing that is missing can still appear.

    An outcome counts immediately, unless Slurm may still report why the job ended. What is missing
    must stay missing for as long as a file system or scheduler can be late, counted from when a
    process of this host first noticed it. A job is not missing while its agents write heartbeats: a
    command that queries the wrong cluster finds no job of this one.
    """
    if seen.has_ended:
        return True
    if not seen.misses:
        if seen.status is not None:
            # The job was seen again, so an absence before this moment counts no more.
            attempt.missing.unlink(missing_ok=True)
        return False
    absence_s = _absence_s(attempt, seen)
    if not absence_s:
        return True
    # Monotonic seconds of two boots cannot be compared, so each boot counts for itself.
    boot, now = boot_id(), time.monotonic()
    heard = _digest_of_beats(attempt) if seen.misses == "job" else ""
    noted = documents.read_document(documents.Missing, attempt.missing)
    if noted is None or (noted.what, noted.heard) != (seen.misses, heard):
        noted = documents.Missing(what=seen.misses, since={}, heard=heard)
    since = noted.since.get(boot)
    if since is None or since > now:
        # Other hosts count for themselves.
        others = dict(list(noted.since.items())[-NOTED_HOSTS_MAX:])
        documents.write_document(
            attempt.missing, noted.model_copy(update={"since": {**others, boot: now}})
        )
        return False
    return now - since >= absence_s


def _digest_of_beats(attempt: AttemptPaths) -> str:
    """Return a digest that changes with each heartbeat; '' if there are none."""
    from holdfast.workers.nodes.heartbeats import read_heartbeats

    marks = [(beat.host, beat.time) for beat in read_heartbeats(attempt)]
    return xxhash.xxh3_64_hexdigest(repr(marks).encode()) if marks else ""


def _absence_s(attempt: AttemptPaths, seen: Observation) -> float:
    """Return for how many seconds the outcome or job must be missing before that counts."""
    if seen.request is None:
        return filesystems.delay_s(attempt.directory)
    if seen.request.executor == "local":
        # The job ran on this host, which sees its own files immediately.
        return 0.0
    if seen.misses == "verdict":
        return VERDICT_WAIT_S
    if seen.misses == "job":
        return executor_for(seen.request.executor).absence_s
    return filesystems.delay_s(attempt.directory)


def _end(
    paths: RunPaths,
    attempt: AttemptPaths,
    seen: Observation,
    writer: str,
    load: Callable[[], RunHistory],
) -> bool:
    """Journal the attempt's ending once; return False if a job has just claimed the attempt."""
    from holdfast.workers.runs.attempts import cancel_leftovers

    with _ending_lock(attempt):
        # Read again under the lock, because another process may have written the line meanwhile.
        own = _events_of(load(), attempt.number)
        if any(event.kind is EventKind.ATTEMPT_ENDED for event in own):
            return True
        if seen.outcome is None:
            # The last look bypasses the client's cache, which may remember that there is no
            # outcome, see decision 48.
            filesystems.revalidate(attempt.directory)
            found = documents.read_documents(attempt)
            seen = replace(seen, outcome=found.outcome, claim=found.claim)
            # A job that starts late must not run an attempt that has ended.
            if seen.claim is None and not documents.close_claim(attempt):
                return False
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(EventKind.ATTEMPT_ENDED, **_ending_data(paths, attempt, seen, own))
            _journal_goodput(load(), attempt.number, journal)
    attempt.missing.unlink(missing_ok=True)
    if seen.request is not None:
        cancel_leftovers(attempt, seen.request, ended=_job_id(seen))
    return True


def _is_led(attempt: AttemptPaths, seen: Observation) -> bool:
    """Return True if the attempt is over, or if another node of its job leads it."""
    if seen.outcome is not None or seen.status is None:
        return True
    term = documents.newest_term(attempt)
    return term is not None and not term.is_end and term.host in seen.status.nodes


def _may_continue(spec: RunSpec, request: documents.Request | None) -> bool:
    """Return True if another node may be about to lead the attempt."""
    if request is None or spec.supervision.restarts_in_place == 0:
        return False
    return request.spare_nodes > 0 or not is_single(spec)


def _end_leaderless(
    paths: RunPaths,
    attempt: AttemptPaths,
    seen: Observation,
    writer: str,
    load: Callable[[], RunHistory],
) -> None:
    """Cancel a job that lost its leading node, because it would hold the other nodes idle.

    The loss is journaled first, so that the ending does not count as an operator's cancellation.
    """
    history, now = load(), time.time()
    term = documents.newest_term(attempt)
    lead = term.host if term is not None else seen.claim.host if seen.claim else ""
    lost = [e for e in _events_of(history, attempt.number) if e.kind is EventKind.NODE_LOST]
    known = [event for event in lost if event.data.get("host") == lead or not lead]
    if not known:
        # Before the cancellation, which would otherwise count as a user's, see decision 5.
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(
                EventKind.NODE_LOST,
                attempt=attempt.number,
                node=0,
                host=lead,
                detail=seen.status.evidence[-1] if seen.status else "",
            )
    lost_s = now - known[-1].time if known else 0.0
    if _may_continue(history.spec, seen.request) and 0 <= lost_s < SUCCESSION_S:
        return
    if seen.request is not None and seen.job is not None:
        with contextlib.suppress(errors.SchedulerError):
            executor_for(seen.request.executor).cancel(seen.request, seen.job)


def _awaits_submission(seen: Observation) -> bool:
    """Return True for an attempt that was never submitted; `resume_submission` handles it."""
    return (
        seen.submission is None
        and seen.claim is None
        and seen.outcome is None
        and (seen.status is None or not seen.status.nodes)
    )


@contextlib.contextmanager
def _ending_lock(attempt: AttemptPaths) -> Iterator[None]:
    """Hold the lock under which one process writes the attempt's ending."""
    below = folder_of(attempt.ending_lock)
    with file_locks.locked(attempt.ending_lock, ENDING_LOCK_S, below=below) as is_locked:
        if not is_locked:
            raise TimeoutError(
                f"{attempt.ending_lock}: locked for {ENDING_LOCK_S:.0f} s; the process that writes "
                "the attempt's ending hangs, or the file system's lock service does"
            )
        yield


def _events_of(history: RunHistory, number: int) -> list[Event]:
    return [event for event in history.events if event.data.get("attempt") == number]


def _ending_data(
    paths: RunPaths, attempt: AttemptPaths, seen: Observation, own: list[Event]
) -> dict[str, Any]:
    """Return the `attempt_ended` line's data: the ending, and the facts that readers need."""
    from holdfast.contracts.disk.manifest import newest_committed
    from holdfast.workers.decisions.causes import classify
    from holdfast.workers.nodes.heartbeats import newest_step, read_heartbeats

    losses = [str(event.data["host"]) for event in own if event.kind is EventKind.NODE_LOST]
    lost_hosts = list(dict.fromkeys(losses))
    ending = classify(
        outcome=seen.outcome,
        status=seen.status,
        signals=[event.data for event in own if event.kind is EventKind.SIGNAL],
        stop=seen.stop,
        claimed=seen.claim is not None,
        lost_hosts=lost_hosts,
        job_log="" if seen.claim else job_log_tail(attempt),
    )
    outcome, status = seen.outcome, seen.status
    data: dict[str, Any] = {
        "attempt": attempt.number,
        "state": ending.state.value,
        "cause": ending.cause.value if ending.cause else None,
        "evidence": list(ending.evidence),
        "job_id": _job_id(seen),
        "scheduler_state": status.raw if status else None,
        "world_size": seen.request.world_size if seen.request else None,
        "lost_hosts": lost_hosts,
        # Nodes and schedulers write `ended_at` by clocks that may differ from this one.
        "noticed_at": time.time(),
    }
    if outcome is not None:
        facts = outcome.model_dump(mode="json", exclude={"state", "cause", "evidence", "job_id"})
        return {**facts, **data}
    committed = newest_committed(paths, attempt.number)
    resumed = [event.data for event in own if event.kind is EventKind.RESUMED]
    beats = read_heartbeats(attempt)
    last = newest_step(beats)
    return {
        **data,
        "hosts": [beat.host for beat in beats] or list(status.nodes if status else ()),
        "first_step": resumed[0]["step"] + 1 if resumed and "step" in resumed[0] else None,
        "last_step": max((s for s in (last, committed and committed.step) if s), default=None),
        "resumed_from": resumed[0].get("checkpoint") if resumed else None,
        "command_digest": resumed[0].get("command_digest") if resumed else None,
        "committed_step": committed.step if committed else None,
        "started_at": seen.claim.claimed_at if seen.claim else None,
        "ended_at": _ended_at(status, [beat.time for beat in beats]),
        "traceback": None,
    }


def job_log_tail(attempt: AttemptPaths) -> str:
    """Return the end of the job's standard error, or '' if there is none."""
    from holdfast.workers.runs.restarts import job_logs

    logs = job_logs(attempt)
    found = sorted(logs.glob("*.err"))
    try:
        return reading.read_tail(found[-1], LOG_TAIL_BYTES, below=logs.parent) if found else ""
    except (OSError, errors.ForeignFileError):
        return ""


def _job_id(seen: Observation) -> str | None:
    if seen.job is not None:
        return seen.job.job_id
    return seen.claim.job_id if seen.claim else None


def _ended_at(status: JobStatus | None, beats: list[float]) -> float:
    """Return when the attempt ended (Unix seconds): by the scheduler, last heartbeat, or now."""
    if status is not None and status.ended_at:
        return status.ended_at
    return max(beats, default=time.time())
