"""What disk knows of a run, folded into one value. Decisions, SQL and people all read this.

Pure but for `load_history`, which reads. Order between writers is by attempt number and never
by clocks: a request of an operator names the last attempt that existed when it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.contracts.attempt import (
    Claim,
    Outcome,
    Request,
    RunRecord,
    Submission,
    job_of,
    read_claim,
    read_document,
    read_outcome,
)
from holdfast.contracts.errors import NotFoundError, UnreadableRunError, reading_run
from holdfast.contracts.journal import Event, EventKind, read_journal
from holdfast.contracts.journal_cache import KEPT
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.contracts.spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause, RunState

OPERATOR_HOLDS = frozenset({"pause", "stop", "cancel"})
_CAUSES = frozenset(Cause)
OPERATOR_GOES_ON = frozenset({"resume", "relaunch"})


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt as its documents and the journal tell it. Times are Unix seconds."""

    number: int
    state: AttemptState
    request: Request | None
    job_id: str | None
    # Why the scheduler does not run it yet, in its own words.
    waits_for: str = ""
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
        """Ranks that were asked for; 0 when the request never became durable."""
        return self.request.world_size if self.request else 0

    @property
    def was_submitted(self) -> bool:
        """False when the flow ended before it could ask for the job: nothing was tried."""
        is_trace = self.request is None and self.job_id is None
        return not (is_trace and self.state is AttemptState.LOST)

    @property
    def may_lack_steps(self) -> bool:
        """True for a completed attempt whose agent did not see the program do all its steps.

        The program had no Session, closed it early, or had not said how many steps there are.
        """
        is_completed = self.state is AttemptState.COMPLETED
        return is_completed and self.outcome is not None and bool(self.outcome.evidence)

    @property
    def traceback(self) -> str | None:
        """The first failing rank's traceback, when there is one."""
        return self.outcome.traceback if self.outcome else self.facts.get("traceback")


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """One run: its identity, its attempts in order, and every journal line in order of time."""

    paths: RunPaths
    record: RunRecord
    spec: RunSpec
    attempts: tuple[AttemptView, ...]
    events: tuple[Event, ...]

    @property
    def last_attempt(self) -> AttemptView | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def last_asked(self) -> AttemptView | None:
        """The newest attempt but for those whose flow ended before it could ask for the job."""
        asked = [attempt for attempt in self.attempts if attempt.was_submitted]
        return asked[-1] if asked else None

    @property
    def pending_request(self) -> dict[str, Any] | None:
        """The newest request of an operator that no attempt has answered yet."""
        last = self.last_asked.number if self.last_asked else 0
        return next(
            (
                event.data
                for event in reversed(self.events)
                if event.kind is EventKind.OPERATOR_REQUEST
                and (event.data.get("after_attempt") or 0) >= last
            ),
            None,
        )

    @property
    def last_decision(self) -> dict[str, Any] | None:
        """The decision taken after the last attempt, if there is one."""
        last = self.last_asked.number if self.last_asked else 0
        return next(
            (
                event.data
                for event in reversed(self.events)
                if event.kind is EventKind.DECISION and event.data.get("after_attempt") == last
            ),
            None,
        )

    @property
    def state(self) -> RunState:
        return fold_run_state(self.attempts, self.pending_request, self.last_decision)


def takes_up_completed(request: Mapping[str, Any] | None) -> bool:
    """True for a `relaunch` that was asked for when the run was completed already."""
    if request is None or not request.get("of_completed"):
        return False
    return bool(request["action"] == "relaunch")


def fold_run_state(
    attempts: Sequence[AttemptView],
    request: dict[str, Any] | None,
    decision: dict[str, Any] | None,
) -> RunState:
    """Where a run stands; a table over the last attempt, the operator's word and the decision."""
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
    """Directory names that rollbacks took off the run's current branch."""
    return frozenset(
        name
        for event in events
        if event.kind is EventKind.ROLLED_BACK
        for name in event.data.get("excluded") or ()
    )


def goes_on_after_numerics(
    events: Iterable[Event], attempt: int, launch: int | None = None
) -> bool:
    """True when the ranks' last word on a bad loss, in an attempt or in one launch of it, was
    to train on from an earlier checkpoint."""
    return _last_on_numerics(events, attempt, launch).get("action") == "rollback"


def stopped_for_numerics(events: Iterable[Event], attempt: int, launch: int) -> str:
    """Why, when the ranks' last word in a launch was to stop for a bad loss; else empty."""
    said = _last_on_numerics(events, attempt, launch)
    return str(said.get("reason")) if said.get("action") == "stop" else ""


def _last_on_numerics(
    events: Iterable[Event], attempt: int, launch: int | None
) -> Mapping[str, Any]:
    said = [
        event.data
        for event in events
        if event.kind is EventKind.NUMERICS
        and event.data.get("attempt") == attempt
        and launch in {None, event.data.get("launch")}
    ]
    return said[-1] if said else {}


def pinned_checkpoints(events: Iterable[Event]) -> frozenset[str]:
    """Directory names that are pinned, by the last word on each."""
    pinned: dict[str, bool] = {}
    for event in events:
        if event.kind in {EventKind.PINNED, EventKind.UNPINNED}:
            pinned[str(event.data["checkpoint"])] = event.kind is EventKind.PINNED
    return frozenset(name for name, is_pinned in pinned.items() if is_pinned)


def load_events(paths: RunPaths) -> tuple[Event, ...]:
    """Every whole line of every journal of the run, by time, writer and number."""
    return _in_order(event for path in paths.list_journals() for event in read_journal(path)[0])


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda e: (e.time, e.writer, e.launch, e.sequence)))


def load_history(paths: RunPaths, events: Sequence[Event] | None = None) -> RunHistory:
    """Read a run from disk. Raises `NotFoundError` when no run was created there, and
    `UnreadableRunError` where its files cannot be believed.

    Of journals that this process has read before, only what was added is read. `events` are all
    lines as `load_events` gives them, where somebody has read them already.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(
            f"{paths.directory}: no run here (no spec.json); `holdfast runs` lists those there are"
        )
    check_identity(paths, record)
    with reading_run(paths.directory):
        if events is None:
            events = _in_order(e for path in paths.list_journals() for e in KEPT.read(path))
        events = tuple(events)
        attempts = tuple(_view(attempt, events) for attempt in paths.list_attempts())
        return RunHistory(
            paths=paths,
            record=record,
            spec=RunSpec.read(record.spec),
            attempts=attempts,
            events=events,
        )


def check_identity(paths: RunPaths, record: RunRecord) -> None:
    """Raise `UnreadableRunError` for a spec that says that it is another folder's."""
    if record.run not in {paths.name, paths.directory.resolve().name}:
        raise UnreadableRunError(
            f"{paths.spec}: the spec of run {record.run!r} lies in the folder {paths.name!r}; give "
            f"the folder its name back, or move it out of the root"
        )


def _view(paths: AttemptPaths, events: Sequence[Event]) -> AttemptView:
    own = [e for e in events if e.data.get("attempt") == paths.number]
    ended = next((e for e in own if e.kind is EventKind.ATTEMPT_ENDED), None)
    request = read_document(Request, paths.request)
    submission = read_document(Submission, paths.submission)
    claim = read_claim(paths)
    outcome = read_outcome(paths)
    facts = dict(ended.data) if ended else {}
    job = job_of(submission, claim) or claim
    resumed = [e for e in own if e.kind is EventKind.RESUMED]
    first, last = resumed[0].data if resumed else {}, facts.get("last_step")
    if outcome and outcome.last_step is not None:
        last = outcome.last_step
    return AttemptView(
        number=paths.number,
        state=_state(own, ended, submission, claim),
        request=request,
        job_id=job.job_id if job else None,
        waits_for=_waits_for(own) if submission is None and claim is None else "",
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


def _cause(word: str | None) -> Cause | None:
    """The cause that a line names; one that this version does not know is unknown."""
    if not word:
        return None
    return Cause(word) if word in _CAUSES else Cause.UNKNOWN


def _waits_for(own: Sequence[Event]) -> str:
    """Why the scheduler did not take the job when it was last asked."""
    said = [e.data for e in own if e.kind is EventKind.ATTEMPT_STATE]
    is_refused = bool(said) and said[-1]["state"] == AttemptState.CREATED
    return str(said[-1].get("detail") or "") if is_refused else ""


def _state(
    own: Sequence[Event], ended: Event | None, submission: Submission | None, claim: Claim | None
) -> AttemptState:
    """The newest thing known: an ending, then a stop, then a claim, then the scheduler's word."""
    if ended:
        return AttemptState(ended.data["state"])
    said = [e.data["state"] for e in own if e.kind is EventKind.ATTEMPT_STATE]
    # What was said before the scheduler took the job tells nothing of the job.
    said = [state for state in said if state != AttemptState.CREATED]
    # A scheduler that takes a job down does not take that back.
    is_stopping = AttemptState.STOPPING in said
    if is_stopping or any(e.kind is EventKind.SIGNAL for e in own):
        return AttemptState.STOPPING
    if claim:
        return AttemptState.RUNNING
    if said:
        return AttemptState(said[-1])
    return AttemptState.SUBMITTED if submission else AttemptState.CREATED
