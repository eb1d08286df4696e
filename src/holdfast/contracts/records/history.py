"""The history of a run, computed from its files. Decisions, the SQL index and the CLI use it.

Only the `load_…` functions read files. Within one journal, the lines are in the order in which they
were written, whatever their times say. Attempt numbers order the events of different writers: an
operator's request contains the last attempt that existed when it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.journal import AUTOMATIC, Event, EventKind, read_journal
from holdfast.contracts.disk.journal_follow import KEPT
from holdfast.contracts.disk.paths import IMPORTED, AttemptPaths, RunPaths
from holdfast.contracts.errors import NotFoundError, UnreadableRunError, reading_run
from holdfast.contracts.records.documents import (
    Claim,
    Outcome,
    Request,
    RunRecord,
    Submission,
    read_document,
    read_documents,
)
from holdfast.contracts.records.tally import Tally, tally_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause, RunState

OPERATOR_HOLDS = frozenset({"pause", "stop", "cancel"})
_CAUSES = frozenset(Cause)
OPERATOR_GOES_ON = frozenset({"resume", "relaunch"})


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt, from its documents and the journal. Times are Unix seconds."""

    number: int
    state: AttemptState
    request: Request | None
    job_id: str | None
    # Why the scheduler has not accepted or not started the job yet.
    waits_for: str = ""
    # The newest line about the job in the scheduler's queue.
    pending: Event | None = None
    cause: Cause | None = None
    evidence: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    outcome: Outcome | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    resumed_from: str | None = None
    command_digest: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def world_size(self) -> int:
        """The number of requested ranks; 0 if the request never became durable."""
        return self.request.world_size if self.request else 0

    @property
    def gpus(self) -> int:
        """The requested size, in GPUs as `elastic` counts them; 0 without a request."""
        return self.request.size if self.request else 0

    @property
    def was_submitted(self) -> bool:
        """False if the supervisor ended before it could submit the job."""
        is_trace = self.request is None and self.job_id is None
        return not (is_trace and self.state is AttemptState.LOST)

    @property
    def may_lack_steps(self) -> bool:
        """True for a completed attempt whose agent could not confirm that all steps ran.

        The program had no Session, closed it early, or did not set the number of steps.
        """
        is_completed = self.state is AttemptState.COMPLETED
        return is_completed and self.outcome is not None and bool(self.outcome.evidence)

    @property
    def traceback(self) -> str | None:
        """The traceback of the first failed rank, or None."""
        return self.outcome.traceback if self.outcome else self.facts.get("traceback")


class Lines:
    """The lines of a run by kind and by attempt, each in order of time."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    @cached_property
    def by_attempt(self) -> dict[int, list[Event]]:
        return group(self._events, lambda event: event.data.get("attempt", 0))

    def of_kinds(self, *kinds: EventKind) -> Sequence[Event]:
        """Return the lines of one or several kinds."""
        if len(kinds) == 1:
            return self._by_kind.get(kinds[0], ())
        return [event for event in self._events if event.kind in kinds]

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        return group(self._events, lambda event: event.kind)


def group(events: Iterable[Event], key_of: Callable[[Event], Any]) -> dict[Any, list[Event]]:
    """Return the lines by a key, in their order."""
    found: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        found[key_of(event)].append(event)
    return dict(found)


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """One run: its identity, its attempts in order, and its journal lines in order of time.

    With `tallied`, `events` lacks the lines that are only counted, see `contracts.tally`. What
    decides about a run must therefore use `tally` for these kinds. `past` are the attempts that
    ended so long ago that a `HistoryReader` checks them only now and then.
    """

    paths: RunPaths
    record: RunRecord
    spec: RunSpec
    attempts: tuple[AttemptView, ...]
    events: tuple[Event, ...]
    tallied: Tally | None = None
    grouped: Lines | None = None
    past: frozenset[int] = frozenset()

    @cached_property
    def lines(self) -> Lines:
        """The lines in `events` by kind and by attempt."""
        return self.grouped or Lines(self.events)

    @cached_property
    def tally(self) -> Tally:
        """The sums over all lines of the run."""
        if self.tallied is not None:
            return self.tallied
        return tally_of(self.events, excluded_checkpoints(self.events))

    @property
    def last_attempt(self) -> AttemptView | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def last_asked(self) -> AttemptView | None:
        """The newest attempt that a supervisor could submit, see `AttemptView.was_submitted`."""
        return next((one for one in reversed(self.attempts) if one.was_submitted), None)

    @cached_property
    def pending_request(self) -> dict[str, Any] | None:
        """The operator request that counts now: of those that no later attempt has answered.

        The newest one of a person counts before all of Holdfast's own. One of Holdfast's own only
        ends an attempt. If that attempt has ended otherwise, the request is answered.
        """
        last = self.last_asked
        number = last.number if last else 0
        pending = [
            event.data
            for event in self.lines.of_kinds(EventKind.OPERATOR_REQUEST)
            if (event.data.get("after_attempt") or 0) >= number
        ]
        # A person's request must not be lost because the grow policy or a fallback asked later, see
        # decision 85.
        given = [data for data in pending if data.get("by") not in AUTOMATIC]
        if given or not pending:
            return given[-1] if given else None
        is_answered = last and last.state.is_terminal and last.cause is not Cause.OPERATOR
        return None if is_answered else pending[-1]

    @cached_property
    def newest_order(self) -> int:
        """The number of the newest order, see `records.orders`; 0 if there is none."""
        return max(map(order_number, self.events), default=0)

    @cached_property
    def last_decision(self) -> dict[str, Any] | None:
        """The decision after the last attempt, or None."""
        last = self.last_asked.number if self.last_asked else 0
        found = (event.data for event in reversed(self.lines.of_kinds(EventKind.DECISION)))
        return next((data for data in found if data.get("after_attempt") == last), None)

    @property
    def committed_step(self) -> int | None:
        """The newest committed step on the run's branch, or None."""
        if self.record.imported_from is not None:
            return IMPORTED.step
        found = (one.branch_step for one in self.tally.commits.values())
        return max((step for step in found if step is not None), default=None)

    @cached_property
    def state(self) -> RunState:
        if self.record.imported_from is not None:
            return RunState.COMPLETED
        return fold_run_state(self.attempts, self.pending_request, self.last_decision)


def takes_up_completed(request: Mapping[str, Any] | None) -> bool:
    """Return True for a `relaunch` that was requested when the run was already completed."""
    if request is None or not request.get("of_completed"):
        return False
    return bool(request["action"] == "relaunch")


def fold_run_state(
    attempts: Sequence[AttemptView],
    request: dict[str, Any] | None,
    decision: dict[str, Any] | None,
) -> RunState:
    """Return the state of a run from its last attempt, the operator's request and the decision."""
    action = request["action"] if request else None
    last = attempts[-1] if attempts else None
    if last and last.state is AttemptState.CREATED and last.waits_for:
        return RunState.WAITING
    if last and not last.state.is_terminal:
        alive = last.state in {AttemptState.RUNNING, AttemptState.STOPPING}
        return RunState.RUNNING if alive else RunState.QUEUED
    if last and last.state is AttemptState.COMPLETED and not takes_up_completed(request):
        return RunState.COMPLETED
    if action == "pause":
        return RunState.PAUSED
    if action in OPERATOR_HOLDS:
        return RunState.CANCELLED
    if action in OPERATOR_GOES_ON:
        return RunState.WAITING
    if last is None:
        return RunState.QUEUED
    if decision and decision["action"] == "stop":
        return RunState.CANCELLED if last.cause is Cause.OPERATOR else RunState.FAILED
    return RunState.CANCELLED if last.cause is Cause.OPERATOR else RunState.WAITING


def excluded_checkpoints(events: Iterable[Event]) -> frozenset[str]:
    """Return the directory names that rollbacks removed from the run's current branch."""
    return frozenset(
        name
        for event in events
        if event.kind is EventKind.ROLLED_BACK
        for name in event.data.get("excluded") or ()
    )


def blamed_checkpoints(events: Iterable[Event]) -> frozenset[str]:
    """Return the directory names that were excluded because launches from them had crashed."""
    return excluded_checkpoints(event for event in events if event.data.get("crash"))


def goes_on_after_numerics(
    events: Iterable[Event], attempt: int, launch: int | None = None
) -> bool:
    """Return True if the last action after a bad loss was a rollback.

    Looks at one launch of an attempt, or at the whole attempt if `launch` is None.
    """
    return _last_on_numerics(events, attempt, launch).get("action") == "rollback"


def stopped_for_numerics(events: Iterable[Event], attempt: int, launch: int) -> str:
    """Return the reason if the last action after a bad loss in a launch was to stop; else empty."""
    last = _last_on_numerics(events, attempt, launch)
    return str(last.get("reason")) if last.get("action") == "stop" else ""


def _last_on_numerics(
    events: Iterable[Event], attempt: int, launch: int | None
) -> Mapping[str, Any]:
    found = [
        event.data
        for event in events
        if event.kind is EventKind.NUMERICS
        and event.data.get("attempt") == attempt
        and launch in {None, event.data.get("launch")}
    ]
    return found[-1] if found else {}


def pinned_checkpoints(events: Iterable[Event]) -> frozenset[str]:
    """Return the directory names of pinned checkpoints. The last event of each one decides."""
    pinned: dict[str, bool] = {}
    for event in events:
        if event.kind in {EventKind.PINNED, EventKind.UNPINNED}:
            pinned[str(event.data["checkpoint"])] = event.kind is EventKind.PINNED
    return frozenset(name for name, is_pinned in pinned.items() if is_pinned)


def load_events(paths: RunPaths) -> tuple[Event, ...]:
    """Return every complete line of all journals of the run, see `order_events`."""
    return order_events(read_journal(path)[0] for path in paths.list_journals())


def read_events(journals: Iterable[Path]) -> tuple[Event, ...]:
    """Return the lines of some journals. Those that this process knows are not read again."""
    return order_events(KEPT.read(path) for path in journals)


def order_number(event: Event) -> int:
    """Return the number of the order that a line gives; 0 for any other line."""
    return 0 if event.kind is EventKind.ORDER_STATE else int(event.data.get("order") or 0)


def order_of(event: Event) -> tuple[float, str, int, int]:
    """Return a sort key: time, writer and number."""
    return event.time, event.writer, event.opening, event.sequence


def order_events(journals: Iterable[Sequence[Event]]) -> tuple[Event, ...]:
    """Return the lines of several journals as one sequence, by their times.

    The lines of one journal stay in their order. Where its clock was set back, a line counts as
    late as the newest one before it.
    """
    keyed: list[tuple[float, str, int, int, Event]] = []
    for journal in journals:
        # Clocks of hosts differ, but the numbers of one writer are certain.
        newest = 0.0
        for event in journal:
            newest = max(newest, event.time)
            keyed.append((newest, event.writer, event.opening, event.sequence, event))
    keyed.sort(key=lambda one: one[:4])
    return tuple(one[4] for one in keyed)


def load_history(paths: RunPaths, events: Sequence[Event] | None = None) -> RunHistory:
    """Read a run from disk.

    Of journals that this process has read before, only new lines are read. Pass the result of
    `load_events` as `events` to avoid reading the journals. Raises `NotFoundError` if there is no
    run, and `UnreadableRunError` if its files have invalid contents.
    """
    record, spec = load_identity(paths)
    with reading_run(paths.directory):
        if events is None:
            events = read_events(paths.list_journals())
        events = tuple(events)
        attempts = tuple(view_attempt(attempt, events) for attempt in paths.list_attempts())
        return RunHistory(paths=paths, record=record, spec=spec, attempts=attempts, events=events)


def load_identity(paths: RunPaths) -> tuple[RunRecord, RunSpec]:
    """Return the record and the spec of a run, which never change. Raises like `load_history`."""
    record = load_record(paths)
    with reading_run(paths.directory):
        return record, record.read_spec()


def load_record(paths: RunPaths) -> RunRecord:
    """Return the record of a run.

    Raises `NotFoundError` without one, and `UnreadableRunError` if it is that of another run.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(
            f"{paths.directory}: no run here (no spec.json); `holdfast runs` lists the runs"
        )
    check_identity(paths, record)
    return record


def check_identity(paths: RunPaths, record: RunRecord) -> None:
    """Raise `UnreadableRunError` if a folder contains the spec of another run."""
    if record.run not in {paths.name, paths.directory.resolve().name}:
        raise UnreadableRunError(
            f"{paths.spec}: the spec of run {record.run!r} is in the folder {paths.name!r}; rename "
            f"the folder to {record.run!r}, or move it out of the root"
        )


def view_attempt(paths: AttemptPaths, events: Sequence[Event]) -> AttemptView:
    """Return one attempt from its documents and the run's events. Raises `HoldfastError`."""
    own = [e for e in events if e.data.get("attempt") == paths.number]
    ended = next((e for e in own if e.kind is EventKind.ATTEMPT_ENDED), None)
    documents = read_documents(paths)
    submission, claim, outcome = documents.submission, documents.claim, documents.outcome
    facts = dict(ended.data) if ended else {}
    job = documents.job or claim
    resumed = [e for e in own if e.kind is EventKind.RESUMED]
    first, last = resumed[0].data if resumed else {}, facts.get("last_step")
    if outcome and outcome.last_step is not None:
        last = outcome.last_step
    return AttemptView(
        number=paths.number,
        state=_state(own, ended, submission, claim),
        request=documents.request,
        job_id=job.job_id if job else None,
        waits_for=_waits_for(own, is_submitted=submission is not None) if claim is None else "",
        pending=_newest_pending(own) if claim is None else None,
        cause=_cause(facts.get("cause")),
        evidence=tuple(facts.get("evidence") or ()),
        hosts=outcome.hosts if outcome else (claim.host,) if claim else (),
        outcome=outcome,
        facts=facts,
        resumed_from=first.get("checkpoint"),
        command_digest=first.get("command_digest"),
        first_step=first["step"] + 1 if first.get("step") is not None else None,
        last_step=last,
        submitted_at=submission.submitted_at if submission else None,
        started_at=claim.claimed_at if claim else None,
        ended_at=outcome.ended_at if outcome else facts.get("ended_at"),
    )


def _cause(name: str | None) -> Cause | None:
    """Return the cause with this name; `UNKNOWN` for a name that this version does not know."""
    if not name:
        return None
    # A newer version may have journaled a cause that this one lacks, see decision 41.
    return Cause(name) if name in _CAUSES else Cause.UNKNOWN


def _waits_for(own: Sequence[Event], *, is_submitted: bool) -> str:
    """Return why the scheduler refused the job, or what the job waits for in its queue."""
    if (pending := _newest_pending(own)) is not None:
        reason = pending.data.get("detail") or "no reason given"
        return f"the job is pending: {reason}{_expected_start(pending.data.get('starts_at'))}"
    states = [e.data for e in own if e.kind is EventKind.ATTEMPT_STATE]
    is_refused = bool(states) and states[-1]["state"] == AttemptState.CREATED
    return str(states[-1].get("detail") or "") if is_refused and not is_submitted else ""


def _expected_start(starts_at: float | None) -> str:
    """Return the scheduler's forecast as text; empty without one, or with an impossible time."""
    if starts_at is None:
        return ""
    try:
        when = datetime.fromtimestamp(starts_at, UTC)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"; the scheduler expects it to start at {when:%Y-%m-%d %H:%M} UTC"


def _newest_pending(own: Sequence[Event]) -> Event | None:
    """Return the newest line about the attempt's state if it says that the job is pending."""
    states = [event for event in own if event.kind is EventKind.ATTEMPT_STATE]
    is_pending = bool(states) and states[-1].data["state"] == AttemptState.PENDING
    return states[-1] if is_pending else None


def _state(
    own: Sequence[Event], ended: Event | None, submission: Submission | None, claim: Claim | None
) -> AttemptState:
    """Return the attempt's state by an ending, else a stop, else a claim, else the scheduler."""
    if ended:
        return AttemptState(ended.data["state"])
    states = [e.data["state"] for e in own if e.kind is EventKind.ATTEMPT_STATE]
    # `CREATED` was recorded before the scheduler accepted the job.
    states = [state for state in states if state != AttemptState.CREATED]
    # A scheduler that has begun to end a job never resumes it.
    is_stopping = AttemptState.STOPPING in states
    if is_stopping or any(e.kind is EventKind.SIGNAL for e in own):
        return AttemptState.STOPPING
    if claim:
        return AttemptState.RUNNING
    if states:
        return AttemptState(states[-1])
    return AttemptState.SUBMITTED if submission else AttemptState.CREATED
