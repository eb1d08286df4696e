"""Requests of operators: journaled first, then passed to the agent or the scheduler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from holdfast.contracts import errors
from holdfast.contracts.disk.durable import STORAGE_FULL
from holdfast.contracts.disk.journal import AUTOMATIC, EventKind
from holdfast.contracts.disk.manifest import read_manifest, require_own_directory
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, checkpoint_id
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records import documents, history_cache, saving
from holdfast.contracts.records.annotations import require_note
from holdfast.contracts.records.history import (
    OPERATOR_GOES_ON,
    AttemptView,
    RunHistory,
    pinned_checkpoints,
)
from holdfast.contracts.records.orders import OrderBook, OrderState, open_orders, orders_of
from holdfast.contracts.states import AttemptState, RunState
from holdfast.workers.decisions import places
from holdfast.workers.decisions.exclusions import Rooms, exclude_for
from holdfast.workers.decisions.sizes import problem_with
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.runs.run_folders import release_reserve, why_not_submitted
from holdfast.workers.schedulers import ask_capacity, executor_for

# Move the attempts of a run to another place of its spec, as `places` decides.
#
# A move is a request like an operator's: the attempt saves and ends first, so a run never holds
# two allocations.


def move_on(history: RunHistory, *, now: float, writer: str) -> str:
    """Take back a job that waits for too long, for the next place; return what follows, or ''.

    `now` is Unix seconds. Raises `SchedulerError` if the scheduler does not answer.
    """
    last = history.last_attempt
    why = places.reason_to_move(history, now=now)
    following = history.spec.resources.next_place(places.place_of(last))
    if last is None or following is None or not why or not is_pending_now(history, last):
        return ""
    return _request_move(history, last, following, why, writer)


def return_when_free(
    watch: places.ReturnWatch, history: RunHistory, *, now: float, writer: str
) -> str:
    """Have an attempt that runs or waits elsewhere continue at the first choice if it is time.

    Returns what follows, or ''. Raises `SchedulerError` if the scheduler does not answer about the
    job.
    """
    last, resources = history.last_attempt, history.spec.resources
    if last is None or places.place_of(last) == 0:
        return ""
    rooms = Rooms(lambda _: executor_for(resources.executor).room(resources, is_urgent=False))
    try:
        exclude = exclude_for(history, rooms, place=0, gpus=last.gpus, now=now)
    except errors.SchedulerUnavailableError:
        # Without an answer the run stays where it is.
        return ""
    why = watch.look(history, ask_capacity(resources, exclude=exclude), now=now)
    if not why or (last.state is not AttemptState.RUNNING and not is_pending_now(history, last)):
        return ""
    return _request_move(history, last, 0, why, writer)


def is_pending_now(history: RunHistory, last: AttemptView) -> bool:
    """Return True if the scheduler still has the attempt's job in its queue.

    Raises `SchedulerError` if the scheduler does not answer.
    """
    attempt = history.paths.attempt(last.number)
    submission = documents.read_document(documents.Submission, attempt.submission)
    if last.request is None or submission is None or documents.read_claim(attempt):
        return False
    return executor_for(last.request.executor).is_pending(last.request, submission)


def _request_move(history: RunHistory, last: AttemptView, place: int, why: str, writer: str) -> str:
    facts = places.relaunch_request(last, place, why)
    # `request` sets it under the lock of the orders, from the attempt that is the last one then.
    del facts["after_attempt"]
    done = request(history.paths, writer=writer, seen=history.newest_order, **facts)
    return f"{why}: {done}"


Action = Literal["stop", "pause", "resume", "cancel", "relaunch"]
ACTIONS: Final[tuple[Action, ...]] = ("stop", "pause", "resume", "cancel", "relaunch")
# Requests that end a live attempt.
_ENDS_ATTEMPT: Final = frozenset({"stop", "pause", "cancel", "relaunch"})
# For this long, another operator's request is refused while the first is pending.
UNDER_WAY_S: Final = 60.0


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
    seen: int | None = None,
) -> str:
    """Request that a run be stopped, paused, resumed, cancelled or relaunched; return what happens.

    The request is an order of the run, see `contracts.orders`. Then a live attempt is asked to end
    after one last checkpoint, and a queued one is cancelled. If the scheduler does not answer, the
    run's supervisor tries again. Repeating a request is harmless. `writer` names the part of
    Holdfast that took it. `reason` explains it. `place` is where a relaunch continues, see
    `Decision`. With `now`, a run is cancelled without a last checkpoint, even while it saves that
    one. `seen` is the newest order that the caller knew, see `RunHistory.newest_order`.

    Raises `RunStateError` for a request that does not fit the run's state, `SpecError` for one that
    is wrong at any time, `NotFoundError` if there is no run, `OrdersChangedError` for an order
    after `seen`, and `RequestConflictError` for one of Holdfast's own requests while a person's is
    pending, or with `alone` while another recent request is pending.
    """
    asked = _Asked(action, by=by, gpus=gpus, reason=reason, place=place, now=now, via=writer)
    while True:
        try:
            return _request(paths, asked, alone=alone, seen=seen)
        except OSError as error:
            if error.errno not in STORAGE_FULL:
                raise
            # The reserve can be released once, for a second try.
            if not release_reserve(paths):
                raise errors.HoldfastError(_disk_full_message(paths, action, error)) from error


def _disk_full_message(paths: RunPaths, action: Action, error: OSError) -> str:
    last = history_cache.load_tallied(paths).last_attempt
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

    via: str

    def facts(self) -> dict[str, Any]:
        """Return the request's facts in the journal that are not in every request."""
        found = {"reason": self.reason or None, "place": self.place, "now": self.now or None}
        return {name: value for name, value in found.items() if value is not None}


def _request(paths: RunPaths, asked: _Asked, *, alone: bool, seen: int | None) -> str:
    with _orders_of_run(paths) as book:
        history = history_cache.load_tallied(paths)
        # One of Holdfast's own requests is based on what it has read. A newer order ends that
        # reason.
        book.require(seen)
        _refuse_automatic(history, asked)
        if alone and not asked.now:
            _refuse_second(history, time.time())
        _check(history, asked)
        last = history.last_attempt
        # The order exists from here on. If this process is killed now, the supervisor carries it
        # out.
        number = book.give(
            EventKind.OPERATOR_REQUEST,
            action=asked.action,
            by=asked.by,
            via=asked.via,
            gpus=asked.gpus,
            after_attempt=last.number if last else 0,
            of_completed=history.state is RunState.COMPLETED,
            overtakes=_open_request(history),
            **asked.facts(),
        )
        if last is None or last.state.is_terminal or asked.action not in _ENDS_ATTEMPT:
            return _what_follows(history, asked.action, asked.gpus)
        # Under the lock, so that the file is that of the newest order.
        _write_stop(paths.attempt(last.number), asked, number)
    unsaved = saving.why_nothing_is_saved(saving.trained_in(history))
    return _end_attempt(paths, last, asked.action, now=asked.now, unsaved=unsaved)


def _open_request(history: RunHistory) -> int | None:
    """Return the number of the request that a new one overtakes, or None."""
    requests = (order for order in reversed(orders_of(history)) if order.checkpoint is None)
    return next((order.number for order in requests if order.state.is_open), None)


def pin(paths: RunPaths, checkpoint: str, *, by: str, note: str = "", writer: str = "cli") -> str:
    """Keep a checkpoint whatever the keep rules say; return its id.

    Raises `NotFoundError` if there is none, or if it was deleted before the pin took effect,
    `CheckpointError` for one that the program wrote itself, and `SpecError` for what cannot be a
    note.
    """
    require_note(note)
    _check_committed(paths, checkpoint)
    with _orders_of_run(paths) as book:
        number = book.give(EventKind.PINNED, checkpoint=checkpoint, by=by, note=note, via=writer)
        # A deletion removes the manifest and then looks for pins, so one of the two sees the other.
        try:
            _check_committed(paths, checkpoint)
        except errors.HoldfastError as error:
            book.note(number, OrderState.FAILED, str(error))
            raise
    return checkpoint_id(paths.name, checkpoint)


def unpin(paths: RunPaths, checkpoint: str, *, by: str, writer: str = "cli") -> str:
    """Make a checkpoint subject to the keep rules again; return its id."""
    with _orders_of_run(paths) as book:
        if checkpoint not in pinned_checkpoints(history_cache.load_tallied(paths).events):
            raise errors.RunStateError(f"{checkpoint_id(paths.name, checkpoint)} is not pinned")
        book.give(EventKind.UNPINNED, checkpoint=checkpoint, by=by, via=writer)
    return checkpoint_id(paths.name, checkpoint)


@contextlib.contextmanager
def _orders_of_run(paths: RunPaths) -> Iterator[OrderBook]:
    """Hold the lock of the run's orders. Raises `NotFoundError` if there is no run."""
    # Long journals are read before the lock is taken, so that no other order waits for that.
    history_cache.load_tallied(paths)
    with open_orders(paths) as book:
        yield book


def _refuse_automatic(history: RunHistory, asked: _Asked) -> None:
    """Raise `RequestConflictError` for a request of Holdfast's own that no longer has a reason.

    One of a person counts before it, and without a live attempt the policy decides what follows.
    """
    if asked.by not in AUTOMATIC:
        return
    last, before = history.last_attempt, history.pending_request
    if before is not None:
        raise errors.RequestConflictError(
            f"run {history.paths.name}: {asked.by} does not {asked.action} it, because "
            f"{before.get('by') or 'another operator'} asked to {before['action']} it",
            by=str(before.get("by")),
            action=str(before["action"]),
            at=time.time(),
        )
    if last is None or last.state.is_terminal:
        raise errors.OrdersChangedError(
            f"run {history.paths.name}: {asked.by} does not {asked.action} it, because its attempt "
            "has ended"
        )


def _refuse_second(history: RunHistory, now: float) -> None:
    """Raise `RequestConflictError` while a recent request is still pending."""
    last, asked = history.last_attempt, history.pending_request
    requests = [e for e in history.events if e.kind is EventKind.OPERATOR_REQUEST]
    if asked is None or asked.get("by") in AUTOMATIC:
        return
    # Another host's clock wrote the time. If it is ahead by more than this, it says nothing.
    age_s = now - requests[-1].time
    if abs(age_s) > UNDER_WAY_S:
        return
    has_ended = last is None or last.state.is_terminal
    if has_ended and asked["action"] not in OPERATOR_GOES_ON:
        return
    who, action = str(asked.get("by") or "another operator"), str(asked["action"])
    size = f" at {counted(asked['gpus'], 'GPU')}" if asked.get("gpus") else ""
    raise errors.RequestConflictError(
        f"{who} asked to {action} run {history.paths.name}{size} "
        f"{max(age_s, 0.0):.0f} s ago, and that request is still pending; wait until it is done, "
        "then repeat yours",
        by=who,
        action=action,
        at=requests[-1].time,
    )


def problem_with_state(
    run: str, action: Action, state: RunState, *, may_lack_steps: bool, is_pausing: bool
) -> str:
    """Return why a run in `state` refuses `action`, or ''.

    `may_lack_steps` is that of its last attempt, see `AttemptView`. `is_pausing` says that a
    request to pause is pending.
    """
    if state is RunState.COMPLETED and not (action == "relaunch" and may_lack_steps):
        return (
            f"run {run} is completed, so there is nothing to {action}; start a new run from one of "
            "its checkpoints with `holdfast fork`"
        )
    if action == "resume" and state is not RunState.PAUSED and not is_pausing:
        return (
            f"run {run} is {state}, not paused; continue a run that has ended with "
            f"`holdfast relaunch {run}`"
        )
    if action in {"stop", "pause", "cancel"} and not state.is_live:
        how = "has failed" if state is RunState.FAILED else f"is {state}"
        return f"run {run} {how}, so there is nothing to {action}"
    return ""


def _check(history: RunHistory, asked: _Asked) -> None:
    """Raise `SpecError` for a wrong request, and `RunStateError` for one at the wrong time."""
    run, state, action = history.paths.name, history.state, asked.action
    if action not in ACTIONS:
        raise errors.SpecError(f"{action!r}: expected one of {', '.join(ACTIONS)}")
    if asked.now and action != "cancel":
        raise errors.SpecError(
            f"{action} always saves a last checkpoint; only cancel can leave it out"
        )
    last = history.last_attempt
    before = history.pending_request or {}
    refusal = problem_with_state(
        run,
        action,
        state,
        may_lack_steps=last is not None and last.may_lack_steps,
        is_pausing=before.get("action") == "pause",
    )
    if refusal:
        raise errors.RunStateError(refusal)
    reason = why_not_submitted(history.record) if action in OPERATOR_GOES_ON else ""
    if reason:
        raise errors.SpecError(f"run {run}: {reason}. Nothing was queued or stopped", [reason])
    if (gpus := asked.gpus) is None:
        return
    if action != "relaunch":
        raise errors.SpecError(
            f"{action} takes no GPU count; use `holdfast relaunch {run} --gpus {gpus}`"
        )
    problem = problem_with(history.spec, gpus)
    if problem:
        raise errors.SpecError(f"run {run}: {problem}", [problem])
    problem = Feasibility.of(history).problem(gpus)
    if problem:
        raise errors.SpecError(
            f"run {run}: {problem}; a program that can load it is another run: start it with "
            "`holdfast fork --spec`. Nothing was queued or stopped",
            [problem],
        )


def _write_stop(attempt: AttemptPaths, asked: _Asked, number: int) -> None:
    """Ask the attempt's agent to end it. The caller holds the lock of the orders."""
    stop = documents.StopFile(
        action=asked.action,
        by=asked.by,
        order=number,
        requested_at=time.time(),
        deadline_s=0.0 if asked.now else None,
        detail="without a last checkpoint" if asked.now else "",
    )
    documents.write_document(attempt.stop, stop)


def _end_attempt(
    paths: RunPaths, view: AttemptView, action: Action, *, now: bool, unsaved: str
) -> str:
    """Have the scheduler take back a job that is still queued; return what happens.

    If the scheduler does not answer, the supervisor tries again, see `carry_out`. `unsaved` is why
    there will be no last checkpoint, or ''.
    """
    how = "ends now, without a last checkpoint" if now else "ends after one last checkpoint"
    how = f"ends without a last checkpoint: {unsaved}" if unsaved and not now else how
    message = f"attempt {view.number} {how} ({action})"
    try:
        # Another user's run could name a job of this user's. Its own supervisor takes jobs back.
        if paths.is_mine() and _take_back(paths.attempt(view.number)):
            return f"attempt {view.number} was still queued and is cancelled ({action})"
    except errors.SchedulerError as error:
        return (
            f"{action} of attempt {view.number} is pending, because {_problem(error)}. The run's "
            "supervisor tries again until it is done"
        )
    return message


def _problem(error: errors.SchedulerError) -> str:
    """Return why a job could not be taken back."""
    is_silent = isinstance(error, errors.SchedulerUnavailableError)
    return f"the scheduler {'does not answer' if is_silent else 'refuses it'}: {error}"


def _take_back(attempt: AttemptPaths) -> bool:
    """Cancel the attempt's job if no agent runs it yet; return True if it has ended by that.

    A job that starts meanwhile continues, and its agent finds the stop file. Raises
    `SchedulerError`.
    """
    request_file = documents.read_document(documents.Request, attempt.request)
    if request_file is None or request_file.executor == "local" or documents.read_claim(attempt):
        return False
    executor = executor_for(request_file.executor)
    # The answer of `sbatch` may have been lost, so the job is looked up by its name.
    submission = documents.read_document(documents.Submission, attempt.submission) or executor.find(
        request_file
    )
    if submission is None or not executor.is_pending(request_file, submission):
        return False
    executor.withdraw(request_file, submission)
    # It may have started between the two questions. Its agent then finds the stop file.
    return not executor.is_pending(request_file, submission) and not documents.read_claim(attempt)


def has_agent(history: RunHistory) -> bool:
    """Return True if an agent runs the last attempt, or there is no live one."""
    last = history.last_attempt
    if last is None or last.state.is_terminal:
        return True
    return documents.read_claim(history.paths.attempt(last.number)) is not None


def carry_out(history: RunHistory) -> str:
    """Do what a pending order asks of a live attempt and is not done yet; return what was done.

    The command that gave the order may have been killed, or the scheduler may not have answered it.
    Only a supervisor calls this, in each turn. Raises `SchedulerError`, after it has recorded that.
    """
    paths, last, asked = history.paths, history.last_attempt, history.pending_request
    if last is None or last.state.is_terminal or asked is None:
        return ""
    action, attempt = asked["action"], paths.attempt(last.number)
    if action not in _ENDS_ATTEMPT:
        return ""
    number = int(asked.get("order") or 0)
    found = documents.read_document(documents.StopFile, attempt.stop)
    if found is None or found.order < number:
        # Under the lock, so that an older order never replaces the file of a newer one.
        with open_orders(paths) as book:
            book.require(history.newest_order)
            given = _Asked(
                action,
                by=str(asked.get("by")),
                gpus=None,
                reason="",
                place=None,
                now=bool(asked.get("now")),
                via="flow",
            )
            _write_stop(attempt, given, number)
    try:
        is_done = _take_back(attempt)
    except errors.SchedulerError as error:
        with open_orders(paths) as book:
            book.note(number, OrderState.PENDING, _problem(error))
        raise
    return f"{action} by {asked.get('by')}: the queued job was taken back" if is_done else ""


def _what_follows(history: RunHistory, action: Action, gpus: int | None) -> str:
    run = history.paths.name
    if action in {"resume", "relaunch"}:
        before = history.last_attempt.gpus if history.last_attempt else history.spec.gpus
        return f"run {run} continues at {counted(gpus or before or history.spec.gpus, 'GPU')}"
    if action == "pause":
        return f"run {run} is paused; continue it with `holdfast resume {run}`"
    return f"run {run} will not be relaunched ({action})"


def _check_committed(paths: RunPaths, checkpoint: str) -> None:
    manifest = read_manifest(paths.checkpoint(checkpoint))
    if manifest is None:
        raise errors.NotFoundError(
            f"no committed checkpoint {checkpoint!r} in run {paths.name}; "
            f"list them with `holdfast checkpoints {paths.name}`"
        )
    require_own_directory(manifest, "keep it from being deleted by the program")
