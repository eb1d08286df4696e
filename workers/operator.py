"""Requests of operators: journaled first, then passed to the agent or the scheduler."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from holdfast.contracts.attempt import (
    Request,
    StopFile,
    Submission,
    read_claim,
    read_document,
    write_document,
)
from holdfast.contracts.errors import (
    HoldfastError,
    NotFoundError,
    RequestConflictError,
    RunConflictError,
    SchedulerError,
    SpecError,
)
from holdfast.contracts.file_locks import wait_for_lock
from holdfast.contracts.history import (
    OPERATOR_GOES_ON,
    AttemptView,
    RunHistory,
    load_history,
    pinned_checkpoints,
)
from holdfast.contracts.journal import AUTOMATIC, FOREIGN_LOCK_S, EventKind, JournalWriter
from holdfast.contracts.manifest import read_manifest
from holdfast.contracts.paths import AttemptPaths, RunPaths, checkpoint_id, has_spec
from holdfast.contracts.reading import LOCK_FLAGS, open_beneath
from holdfast.contracts.sources import require_own_directory
from holdfast.contracts.states import RunState
from holdfast.workers.executors import executor_for
from holdfast.workers.feasibility import Feasibility
from holdfast.workers.runs import release_reserve, why_not_submitted
from holdfast.workers.sizes import problem_with

Action = Literal["stop", "pause", "resume", "cancel", "relaunch"]
ACTIONS: Final[tuple[Action, ...]] = ("stop", "pause", "resume", "cancel", "relaunch")
# Requests that end a live attempt.
_ENDS_ATTEMPT: Final = frozenset({"stop", "pause", "cancel", "relaunch"})
# A request holds the lock for milliseconds.
TURN_S: Final = 30.0
# For this long, another operator's request is refused while the first is pending.
UNDER_WAY_S: Final = 60.0
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def request(
    paths: RunPaths,
    action: Action,
    *,
    by: str,
    gpus: int | None = None,
    writer: str = "cli",
    alone: bool = False,
    reason: str = "",
    place: int | None = None,
    now: bool = False,
) -> str:
    """Request that a run be stopped, paused, resumed, cancelled or relaunched; return what happens.

    The request is journaled. Then a live attempt is asked to end after one last checkpoint, and a
    queued one is cancelled. Repeating a request is harmless. Raises `SpecError` for a request that
    does not fit the run's state and `NotFoundError` if there is no run. With `alone`, raises
    `RequestConflictError` while another recent request is pending. `reason` explains the request.
    `place` is where a relaunch continues, see `Decision`. With `now`, a run is cancelled without
    a last checkpoint, also while it saves that one.
    """
    asked = _Asked(action, by=by, gpus=gpus, reason=reason, place=place, now=now)
    while True:
        try:
            return _request(paths, asked, writer=writer, alone=alone)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # The reserve can be released once, for a second try.
            if not release_reserve(paths):
                raise HoldfastError(_disk_full_message(paths, action, error)) from error


def _disk_full_message(paths: RunPaths, action: Action, error: OSError) -> str:
    last = load_history(paths).last_attempt
    job = f", or end job {last.job_id} with the scheduler's own command" if last else ""
    return (
        f"run {paths.name}: the file system is full ({error}), so the request to {action} was "
        f"not recorded; free some space there and repeat the request{job}"
    )


@dataclass(frozen=True)
class _Asked:
    """One request, as `request` gets it."""

    action: Action
    _: KW_ONLY
    by: str
    gpus: int | None
    reason: str
    place: int | None
    now: bool

    def facts(self) -> dict[str, Any]:
        """Return the request's facts in the journal that are not in every request."""
        found = {"reason": self.reason or None, "place": self.place, "now": self.now or None}
        return {name: value for name, value in found.items() if value is not None}


def _request(paths: RunPaths, asked: _Asked, *, writer: str, alone: bool) -> str:
    with _operator_lock(paths):
        history = load_history(paths)
        if alone and not asked.now:
            _refuse_second(history, time.time())
        _check(history, asked)
        last = history.last_attempt
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(
                EventKind.OPERATOR_REQUEST,
                action=asked.action,
                by=asked.by,
                gpus=asked.gpus,
                after_attempt=last.number if last else 0,
                of_completed=history.state is RunState.COMPLETED,
                **asked.facts(),
            )
    if last is None or last.state.is_terminal or asked.action not in _ENDS_ATTEMPT:
        return _what_follows(history, asked.action, asked.gpus)
    return _end_attempt(paths.attempt(last.number), last, asked)


def pin(paths: RunPaths, checkpoint: str, *, by: str, note: str = "", writer: str = "cli") -> str:
    """Keep a checkpoint whatever the keep rules say; return its id.

    Raises `NotFoundError` if there is none, or if it was deleted before the pin took effect, and
    `CheckpointError` for one that the program wrote itself.
    """
    _check_committed(paths, checkpoint)
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.PINNED, checkpoint=checkpoint, by=by, note=note)
    # A deletion removes the manifest and then looks for pins, so one of the two sees the other.
    _check_committed(paths, checkpoint)
    return checkpoint_id(paths.name, checkpoint)


def unpin(paths: RunPaths, checkpoint: str, *, by: str, writer: str = "cli") -> str:
    """Make a checkpoint subject to the keep rules again; return its id."""
    if checkpoint not in pinned_checkpoints(load_history(paths).events):
        raise SpecError(f"{checkpoint_id(paths.name, checkpoint)} is not pinned")
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.UNPINNED, checkpoint=checkpoint, by=by)
    return checkpoint_id(paths.name, checkpoint)


@contextlib.contextmanager
def _operator_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the run's operator lock, so that each request sees the ones before it."""
    if not has_spec(paths.directory):
        # This folder is not a run, so leave no lock in it. Reading the history raises the error.
        yield
        return
    handle = open_beneath(paths.operator_lock, LOCK_FLAGS, below=paths.directory)
    try:
        wait_s = TURN_S if paths.is_mine() else FOREIGN_LOCK_S
        if not wait_for_lock(handle, wait_s):
            raise RunConflictError(
                f"run {paths.name}: another process has kept {paths.operator_lock} locked for "
                f"{wait_s:.0f} s; find it with `fuser {paths.operator_lock}`"
            )
        yield
    finally:
        os.close(handle)


def _refuse_second(history: RunHistory, now: float) -> None:
    """Raise `RequestConflictError` while a recent request is still pending."""
    last, asked = history.last_attempt, history.pending_request
    requests = [e for e in history.events if e.kind is EventKind.OPERATOR_REQUEST]
    if asked is None or asked.get("by") in AUTOMATIC or now - requests[-1].time > UNDER_WAY_S:
        return
    has_ended = last is None or last.state.is_terminal
    if has_ended and asked["action"] not in OPERATOR_GOES_ON:
        return
    who, action = str(asked.get("by") or "another operator"), str(asked["action"])
    size = f" at {asked['gpus']} GPUs" if asked.get("gpus") else ""
    raise RequestConflictError(
        f"{who} asked to {action} run {history.paths.name}{size} "
        f"{now - requests[-1].time:.0f} s ago, and that request is still pending; wait until it "
        "is done, then repeat yours",
        by=who,
        action=action,
        at=requests[-1].time,
    )


def _check(history: RunHistory, asked: _Asked) -> None:
    """Raise `SpecError` for a request that does not fit the run's state."""
    run, state, action = history.paths.name, history.state, asked.action
    if action not in ACTIONS:
        raise SpecError(f"{action!r}: expected one of {', '.join(ACTIONS)}")
    if asked.now and action != "cancel":
        raise SpecError(f"{action} always saves a last checkpoint; only cancel can leave it out")
    last = history.last_attempt
    may_go_on = action == "relaunch" and last is not None and last.may_lack_steps
    if state is RunState.COMPLETED and not may_go_on:
        raise SpecError(
            f"run {run} is completed, so there is nothing to {action}; start a new run from one of "
            "its checkpoints with `holdfast fork`"
        )
    if action == "resume" and state is not RunState.PAUSED:
        raise SpecError(
            f"run {run} is {state}, not paused; continue a run that has ended with "
            f"`holdfast relaunch {run}`"
        )
    if action in {"stop", "pause", "cancel"} and not state.is_live:
        raise SpecError(f"run {run} is already {state}; there is nothing to {action}")
    reason = why_not_submitted(history.record) if action in OPERATOR_GOES_ON else ""
    if reason:
        raise SpecError(f"run {run}: {reason}. Nothing was queued or stopped", [reason])
    if (gpus := asked.gpus) is None:
        return
    if action != "relaunch":
        raise SpecError(f"{action} takes no GPU count; use `holdfast relaunch {run} --gpus {gpus}`")
    problem = problem_with(history.spec, gpus)
    if problem:
        raise SpecError(f"run {run}: {problem}", [problem])
    problem = Feasibility.of(history).problem(gpus)
    if problem:
        raise SpecError(
            f"run {run}: {problem}; a program with another mesh is another run: start it with "
            "`holdfast fork`. Nothing was queued or stopped",
            [problem],
        )


def _end_attempt(attempt: AttemptPaths, view: AttemptView, asked: _Asked) -> str:
    """End a live attempt by a file to its agent, or by the scheduler while it is queued."""
    stop = StopFile(
        action=asked.action,
        by=asked.by,
        requested_at=time.time(),
        deadline_s=0.0 if asked.now else None,
        detail="without a last checkpoint" if asked.now else "",
    )
    write_document(attempt.stop, stop)
    how = "ends now, without a last checkpoint" if asked.now else "ends after one last checkpoint"
    message = f"attempt {view.number} {how} ({asked.action})"
    request_file = read_document(Request, attempt.request)
    submission = read_document(Submission, attempt.submission)
    if request_file is None or request_file.executor == "local" or read_claim(attempt):
        return message
    # A queued job has no agent yet. If one starts meanwhile, it finds the file.
    with contextlib.suppress(SchedulerError):
        executor = executor_for(request_file.executor)
        submission = submission or executor.find(request_file)
        if submission is None:
            return message
        status = executor.status(request_file, submission)
        if status.state == "pending":
            executor.cancel(request_file, submission)
            return f"attempt {view.number} was still queued and is cancelled ({asked.action})"
    return message


def _what_follows(history: RunHistory, action: Action, gpus: int | None) -> str:
    run = history.paths.name
    if action in {"resume", "relaunch"}:
        before = history.last_attempt.gpus if history.last_attempt else history.spec.gpus
        return f"run {run} continues at {gpus or before or history.spec.gpus} GPUs"
    return f"run {run} will not be relaunched ({action})"


def _check_committed(paths: RunPaths, checkpoint: str) -> None:
    manifest = read_manifest(paths.checkpoint(checkpoint))
    if manifest is None:
        raise NotFoundError(
            f"no committed checkpoint {checkpoint!r} in run {paths.name}; "
            f"list them with `holdfast checkpoints {paths.name}`"
        )
    require_own_directory(manifest, "keep it from being deleted by the program")
