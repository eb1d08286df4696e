"""What people ask of a run: a journal line first, then a word to the agent or the scheduler."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from typing import Final, Literal

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
from holdfast.contracts.journal import FOREIGN_LOCK_S, GROWER, EventKind, JournalWriter
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.paths import AttemptPaths, RunPaths, checkpoint_id, has_spec
from holdfast.contracts.reading import LOCK_FLAGS, is_mine, open_beneath
from holdfast.contracts.states import RunState
from holdfast.workers.executors import executor_for
from holdfast.workers.feasibility import Feasibility
from holdfast.workers.runs import release_reserve, why_not_submitted
from holdfast.workers.sizes import problem_with

Action = Literal["stop", "pause", "resume", "cancel", "relaunch"]
ACTIONS: Final[tuple[Action, ...]] = ("stop", "pause", "resume", "cancel", "relaunch")
# What a live attempt is told; `resume` finds none.
_ENDS_ATTEMPT: Final = frozenset({"stop", "pause", "cancel", "relaunch"})
# An operator's turn takes milliseconds.
TURN_S: Final = 30.0
# So long another operator waits for what was asked to come about.
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
) -> str:
    """Ask that a run be stopped, paused, resumed, cancelled or relaunched; returns what happens.

    The request is journaled, then a live attempt is told to end after one last checkpoint and a
    queued one is taken back. Harmless when repeated. Raises `SpecError` for what makes no sense
    and `NotFoundError` without a run; where it must be `alone`, `RequestConflictError` while what
    somebody asked for a moment ago has not come about.
    """
    try:
        return _request(paths, action, by=by, gpus=gpus, writer=writer, alone=alone)
    except OSError as error:
        if error.errno not in FULL:
            raise
        is_released = release_reserve(paths)
        if not is_released:
            raise HoldfastError(_full_words(paths, action, error)) from error
    try:
        return _request(paths, action, by=by, gpus=gpus, writer=writer, alone=alone)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise HoldfastError(_full_words(paths, action, error)) from error


def _full_words(paths: RunPaths, action: Action, error: OSError) -> str:
    last = load_history(paths).last_attempt
    job = f", or end job {last.job_id} by the scheduler's own command" if last else ""
    return (
        f"run {paths.name}: the file system is full ({error}), so the request to {action} could "
        f"not be recorded; free some space there and ask again{job}"
    )


def _request(
    paths: RunPaths, action: Action, *, by: str, gpus: int | None, writer: str, alone: bool
) -> str:
    with _turn(paths):
        history = load_history(paths)
        if alone:
            _refuse_second(history, time.time())
        _check(history, action, gpus)
        last = history.last_attempt
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(
                EventKind.OPERATOR_REQUEST,
                action=action,
                by=by,
                gpus=gpus,
                after_attempt=last.number if last else 0,
                of_completed=history.state is RunState.COMPLETED,
            )
    if last is None or last.state.is_terminal or action not in _ENDS_ATTEMPT:
        return _what_follows(history, action, gpus)
    return _end_attempt(paths.attempt(last.number), last, action, by)


def pin(paths: RunPaths, checkpoint: str, *, by: str, note: str = "", writer: str = "cli") -> str:
    """Keep a checkpoint whatever the keep rules say; returns its id.

    Raises `NotFoundError` when there is none, or when it was deleted before the pin held.
    """
    _committed(paths, checkpoint)
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.PINNED, checkpoint=checkpoint, by=by, note=note)
    # Who deletes takes the manifest away and then looks for pins: one of us sees the other.
    _committed(paths, checkpoint)
    return checkpoint_id(paths.name, checkpoint)


def unpin(paths: RunPaths, checkpoint: str, *, by: str, writer: str = "cli") -> str:
    """Leave a checkpoint to the keep rules again; returns its id."""
    if checkpoint not in pinned_checkpoints(load_history(paths).events):
        raise SpecError(f"{checkpoint_id(paths.name, checkpoint)} is not pinned")
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.UNPINNED, checkpoint=checkpoint, by=by)
    return checkpoint_id(paths.name, checkpoint)


@contextlib.contextmanager
def _turn(paths: RunPaths) -> Iterator[None]:
    """One operator after the other: each sees what the one before asked for."""
    if not has_spec(paths.directory):
        # No lock is left in a folder that is no run's; who reads the history says so.
        yield
        return
    handle = open_beneath(paths.operator_lock, LOCK_FLAGS, below=paths.directory)
    try:
        wait_s = TURN_S if is_mine(paths.directory) else FOREIGN_LOCK_S
        if not wait_for_lock(handle, wait_s):
            raise RunConflictError(
                f"run {paths.name}: another process has kept {paths.operator_lock} locked for "
                f"{wait_s:.0f} s; `fuser {paths.operator_lock}` names it"
            )
        yield
    finally:
        os.close(handle)


def _refuse_second(history: RunHistory, now: float) -> None:
    """Raise `RequestConflictError` while the newest request is fresh and not yet carried out."""
    last, asked = history.last_attempt, history.pending_request
    told = [e for e in history.events if e.kind is EventKind.OPERATOR_REQUEST]
    if asked is None or asked.get("by") == GROWER or now - told[-1].time > UNDER_WAY_S:
        return
    has_ended = last is None or last.state.is_terminal
    if has_ended and asked["action"] not in OPERATOR_GOES_ON:
        return
    who, what = str(asked.get("by") or "somebody"), str(asked["action"])
    size = f" at {asked['gpus']} GPUs" if asked.get("gpus") else ""
    raise RequestConflictError(
        f"{who} asked {now - told[-1].time:.0f} s ago to {what} run {history.paths.name}{size}, "
        "and that is under way; look how it goes, then ask again",
        by=who,
        action=what,
        at=told[-1].time,
    )


def _check(history: RunHistory, action: Action, gpus: int | None) -> None:
    """Raise `SpecError` for a request that makes no sense in the run's condition."""
    run, state = history.paths.name, history.state
    if action not in ACTIONS:
        raise SpecError(f"{action!r}: expected one of {', '.join(ACTIONS)}")
    last = history.last_attempt
    may_go_on = action == "relaunch" and last is not None and last.may_lack_steps
    if state is RunState.COMPLETED and not may_go_on:
        raise SpecError(
            f"run {run} is completed, there is nothing to {action}; `holdfast fork` begins a new "
            "run from one of its checkpoints"
        )
    if action == "resume" and state is not RunState.PAUSED:
        raise SpecError(
            f"run {run} is {state}, not paused; `holdfast relaunch {run}` takes an ended run up "
            "again"
        )
    if action in {"stop", "pause", "cancel"} and not state.is_live:
        raise SpecError(f"run {run} is {state} already; there is nothing to {action}")
    words = why_not_submitted(history.record) if action in OPERATOR_GOES_ON else ""
    if words:
        raise SpecError(f"run {run}: {words}. Nothing was queued or stopped", [words])
    if gpus is None:
        return
    if action != "relaunch":
        raise SpecError(
            f"{action} takes no GPU count; `holdfast relaunch {run} --gpus {gpus}` does"
        )
    problem = problem_with(history.spec, gpus)
    if problem:
        raise SpecError(f"run {run}: {problem}", [problem])
    problem = Feasibility.of(history).problem(gpus)
    if problem:
        raise SpecError(
            f"run {run}: {problem}; a program with another mesh is another run: begin it with "
            "`holdfast fork`. Nothing was queued or stopped",
            [problem],
        )


def _end_attempt(attempt: AttemptPaths, view: AttemptView, action: Action, by: str) -> str:
    """Tell a live attempt to end: by a file to its agent, by the scheduler while it is queued."""
    stop = StopFile(action=action, by=by, requested_at=time.time())
    write_document(attempt.stop, stop)
    told = f"attempt {view.number} ends after one last checkpoint ({action})"
    asked = read_document(Request, attempt.request)
    submission = read_document(Submission, attempt.submission)
    if asked is None or asked.executor == "local" or read_claim(attempt):
        return told
    # No agent reads the file of a queued job; one that starts meanwhile still finds it.
    with contextlib.suppress(SchedulerError):
        executor = executor_for(asked.executor)
        submission = submission or executor.find(asked)
        if submission is None:
            return told
        status = executor.status(asked, submission)
        if status.state == "pending":
            executor.cancel(asked, submission)
            return f"attempt {view.number} was still queued and is taken back ({action})"
    return told


def _what_follows(history: RunHistory, action: Action, gpus: int | None) -> str:
    run = history.paths.name
    if action in {"resume", "relaunch"}:
        before = history.last_attempt.world_size if history.last_attempt else history.spec.gpus
        return f"run {run} goes on at {gpus or before or history.spec.gpus} GPUs"
    return f"run {run} will not be relaunched ({action})"


def _committed(paths: RunPaths, checkpoint: str) -> Manifest:
    manifest = read_manifest(paths.checkpoint(checkpoint))
    if manifest is None:
        raise NotFoundError(
            f"no committed checkpoint {checkpoint!r} in run {paths.name}; "
            f"`holdfast checkpoints {paths.name}` lists them"
        )
    return manifest
