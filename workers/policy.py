"""What comes next: a pure function of what disk knows, the free GPUs and the time."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.contracts.attempt import SubmissionTry
from holdfast.contracts.history import (
    AttemptView,
    RunHistory,
    excluded_checkpoints,
    goes_on_after_numerics,
    takes_up_completed,
)
from holdfast.contracts.journal import GROWER
from holdfast.contracts.paths import CheckpointName
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.causes import Ending
from holdfast.workers.evidence import names_hardware
from holdfast.workers.sizes import allowed_sizes, choose_gpus

Action = Literal["relaunch", "restart", "wait", "stop"]

UNLIMITED: Final = 1_000_000
# Relaunches that are forgiven per cause over the life of a run; a spec may say otherwise.
BUDGETS: Final[dict[Cause, int]] = {
    Cause.PREEMPTION: UNLIMITED,
    Cause.TIME_LIMIT: UNLIMITED,
    Cause.NODE_FAILURE: 20,
    Cause.HANG: 5,
    Cause.INFRASTRUCTURE: 3,
    Cause.UNKNOWN: 3,
    Cause.STORAGE_FULL: 2,
    Cause.HOST_OOM: 1,
    Cause.GPU_OOM: 1,
    Cause.NUMERICS: 0,
    Cause.USER_ERROR: 0,
    Cause.OPERATOR: 0,
}
BREAKER_ATTEMPTS: Final = 3
# Slurm starts the job that preempted ours only after ours has gone. Asked sooner what is free,
# it would count the very GPUs that are about to be taken.
PREEMPTOR_S: Final = 6.0
EXCLUDE_S: Final = 6 * 3600.0
EXCLUDED_MAX: Final = 16
# One hang or broken connection may be anybody's; the second in a row of one host is its own.
SUSPICIONS_MAX: Final = 2
BACKOFF_S_MAX: Final = 600.0
BACKOFF_DOUBLINGS_MAX: Final = 6
# These come from outside; waiting longer and longer for them would only waste the cluster.
# The scheduler is asked again about a refused job after this, and each time after twice as long.
REFUSAL_WAIT_S: Final = 10.0
REFUSAL_WAIT_S_MAX: Final = 600.0
# A refusal that can pass is waited out for this long, like a place in a queue.
REFUSED_S_MAX: Final = 7 * 24 * 3600.0
# Other refusals are the spec's own fault, or the machine's.
REFUSALS_MAX: Final = 3
_NO_BACKOFF: Final = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.OPERATOR})
_SUSPICIOUS: Final = frozenset({Cause.HANG, Cause.INFRASTRUCTURE, Cause.UNKNOWN})
_RESTARTABLE: Final = frozenset({Cause.INFRASTRUCTURE, Cause.UNKNOWN, Cause.HANG})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next, and why. `delay_s` is seconds to wait before doing it."""

    action: Action
    reason: str
    gpus: int = 0
    exclude: tuple[str, ...] = ()
    delay_s: float = 0.0


def fits_any(_gpus: int) -> bool:
    """What is known of a run without a checkpoint: it fits every GPU count."""
    return True


def decide(
    history: RunHistory,
    capacity: int | None,
    *,
    now: float,
    fits: Callable[[int], bool] = fits_any,
) -> Decision:
    """What the supervisor does with a run that it finds in this condition.

    `capacity` is the number of GPUs free now (None: unknown or unbounded), `now` Unix seconds;
    `fits` says whether the newest checkpoint can go on at a GPU count.
    """
    last, spec = history.last_asked, history.spec
    if last is not None and not last.state.is_terminal:
        return Decision(action="wait", reason=f"attempt {last.number} is {last.state}")
    is_completed = last is not None and last.state is AttemptState.COMPLETED
    if is_completed and not takes_up_completed(history.pending_request):
        return Decision(action="stop", reason="completed")
    held = _operator_word(history, capacity, fits)
    if held is not None:
        return held
    if last is None:
        return Decision(action="relaunch", gpus=spec.gpus, reason="first")
    return _after(history, last, capacity, now, fits)


def _operator_word(
    history: RunHistory, capacity: int | None, fits: Callable[[int], bool]
) -> Decision | None:
    """The decision that an operator's unanswered request makes by itself.

    A policy's own stop request for more GPUs is no more than a stop request: what is free by now
    decides.
    """
    request = history.pending_request
    if request is None:
        return None
    action, by = str(request["action"]), str(request.get("by", "an operator"))
    if action == "pause":
        return Decision(action="wait", reason=f"paused by {by}")
    if action in {"stop", "cancel"}:
        return Decision(action="stop", reason=f"{action} by {by}")
    last = history.last_asked
    before = last.world_size if last is not None else 0
    gpus = int(request.get("gpus") or before or history.spec.gpus)
    if by == GROWER and capacity is not None:
        free = [size for size in allowed_sizes(history.spec) if size <= min(gpus, capacity)]
        gpus = max(filter(fits, free), default=before or gpus)
    return Decision(action="relaunch", gpus=gpus, reason=f"{action} at {gpus} GPUs by {by}")


def _after(
    history: RunHistory,
    last: AttemptView,
    capacity: int | None,
    now: float,
    fits: Callable[[int], bool],
) -> Decision:
    """What follows an attempt that ended and of which no operator has said anything."""
    cause = last.cause or Cause.UNKNOWN
    if cause is Cause.OPERATOR:
        return Decision(action="stop", reason="cancelled from outside Holdfast")
    spent = _spent(history.attempts, history, cause)
    budget = history.spec.supervision.budgets.get(cause, BUDGETS[cause])
    if spent > budget:
        again = f" ({spent} times, {budget} forgiven)" if budget else ""
        return Decision(action="stop", reason=f"{cause}{again}: {_why(last)}")
    if len(history.attempts) >= history.spec.supervision.attempts_max:
        limit = history.spec.supervision.attempts_max
        return Decision(action="stop", reason=f"supervision.attempts_max {limit} is reached")
    stuck = _attempts_without_progress(history)
    if stuck >= BREAKER_ATTEMPTS:
        return Decision(
            action="stop",
            reason=f"{stuck} attempts in a row committed no new step, the last ended by {cause}; "
            "`holdfast relaunch` goes on once the reason is mended",
        )
    gpus, why = choose_gpus(
        history.spec,
        current=last.world_size or history.spec.gpus,
        preemptions=_spent(history.attempts, history, Cause.PREEMPTION),
        after_preemption=cause is Cause.PREEMPTION,
        capacity=capacity,
        fits=fits,
    )
    return Decision(
        action="relaunch",
        gpus=gpus,
        exclude=excluded_hosts(history.attempts, now),
        delay_s=_delay_s(history, last, spent, capacity),
        reason=f"after {cause} of attempt {last.number}: {gpus} GPUs ({why})",
    )


def _why(last: AttemptView) -> str:
    return last.evidence[0] if last.evidence else f"attempt {last.number} {last.state}"


def _spent(attempts: Sequence[AttemptView], history: RunHistory, cause: Cause) -> int:
    """How often `cause` has ended an attempt since an operator last set the run going."""
    since = max(
        (
            int(event.data.get("after_attempt", 0))
            for event in history.events
            if event.kind == "operator_request"
            and event.data.get("action") == "relaunch"
            and event.data.get("by") != GROWER
        ),
        default=0,
    )
    return sum(
        1
        for a in attempts
        if a.number > since
        and a.state.is_terminal
        and a.cause is cause
        and a.was_submitted
        # The ranks themselves count rollbacks, and say when there have been enough.
        and not (cause is Cause.NUMERICS and goes_on_after_numerics(history.events, a.number))
    )


def _attempts_without_progress(history: RunHistory) -> int:
    """Attempts at the end of the run, in a row, that committed no step newer than all before.

    Operators' own relaunches are no sign of trouble, and begin the count again. A preemption says
    nothing of the run, so it is not counted.
    """
    newest, stuck = -1, 0
    committed = _committed_steps(history)
    for attempt in history.attempts:
        step = committed.get(attempt.number, -1)
        if not attempt.was_submitted:
            continue
        if attempt.cause is Cause.OPERATOR or step > newest:
            stuck = 0
        elif attempt.cause is not Cause.PREEMPTION:
            stuck += 1
        newest = max(newest, step)
    return stuck


def _committed_steps(history: RunHistory) -> dict[int, int]:
    """The newest committed step of each attempt, from outcomes, endings and journal lines.

    Steps that a rollback took off the run's branch are no progress.
    """
    steps: dict[int, int] = {}
    excluded = excluded_checkpoints(history.events)
    parsed = [CheckpointName.parse(name) for name in excluded]
    undone = {(name.attempt, name.step) for name in parsed if name is not None}

    def note(attempt: int, step: object) -> None:
        if isinstance(step, int):
            steps[attempt] = max(steps.get(attempt, -1), step)

    for attempt in history.attempts:
        told = [attempt.facts.get("committed_step")]
        told += [attempt.outcome.committed_step] if attempt.outcome else []
        for step in told:
            if (attempt.number, step) not in undone:
                note(attempt.number, step)
    for event in history.events:
        is_told = event.kind == "committed" and "attempt" in event.data
        if is_told and event.data.get("checkpoint") not in excluded:
            note(int(event.data["attempt"]), event.data.get("step"))
    return steps


def excluded_hosts(attempts: Sequence[AttemptView], now: float) -> tuple[str, ...]:
    """Hosts that failed within `EXCLUDE_S` seconds, newest first, `EXCLUDED_MAX` at most.

    A host is shut out when it was lost, when the evidence names a fault of its hardware, and
    when ranks there failed first `SUSPICIONS_MAX` times by a hang or by what comes from
    outside the program.
    """
    hosts: list[str] = []
    suspicions: Counter[str] = Counter()
    for attempt in reversed(attempts):
        if attempt.ended_at is not None and now - attempt.ended_at > EXCLUDE_S:
            continue
        if attempt.cause is Cause.NODE_FAILURE:
            lost = attempt.facts.get("lost_hosts")
            named = lost if lost is not None else attempt.hosts
            # Without the name of the one that failed, all of a large job would be shut out.
            hosts += named if lost or len(named) == 1 else ()
        suspect = _suspect(attempt)
        if suspect and attempt.cause in _SUSPICIOUS:
            suspicions[suspect] += 1
            is_faulty = names_hardware(attempt.evidence)
            hosts += [suspect] if is_faulty or suspicions[suspect] >= SUSPICIONS_MAX else []
    return tuple(dict.fromkeys(hosts))[:EXCLUDED_MAX]


def _suspect(attempt: AttemptView) -> str | None:
    """The host of the rank that failed first, where one is named."""
    named = attempt.outcome.failed_host if attempt.outcome else None
    return named or attempt.facts.get("failed_host")


def _delay_s(history: RunHistory, last: AttemptView, spent: int, capacity: int | None) -> float:
    """Seconds between the end of an attempt and the next one; no capacity, no preemptor."""
    if last.cause is Cause.PREEMPTION and capacity is not None:
        return PREEMPTOR_S
    return backoff_s(history, last, spent)


def backoff_s(history: RunHistory, last: AttemptView, spent: int) -> float:
    """Seconds to wait before the next attempt: doubling, with a jitter that is always the same."""
    if last.cause in _NO_BACKOFF:
        return 0.0
    doublings = min(max(spent - 1, 0), BACKOFF_DOUBLINGS_MAX)
    seed = f"{history.record.uid}:{last.number}".encode()
    jitter = 0.75 + 0.5 * hashlib.sha256(seed).digest()[0] / 255
    base: float = history.spec.supervision.backoff_s * 2.0**doublings * jitter
    return round(min(base, BACKOFF_S_MAX), 3)


def wait_after_refusal(tried: SubmissionTry, *, now: float) -> float | None:
    """Seconds until a refused job is submitted again, 0 when it is due; None to give it up."""
    if not tried.may_pass:
        return None if tried.refusals >= REFUSALS_MAX else 0.0
    if now - (tried.refused_since or now) > REFUSED_S_MAX:
        return None
    doublings = min(max(tried.refusals - 1, 0), BACKOFF_DOUBLINGS_MAX)
    wait_s = min(REFUSAL_WAIT_S * 2.0**doublings, REFUSAL_WAIT_S_MAX)
    # A clock that was set back does not make the wait longer than that.
    return min(max(tried.tried_at + wait_s - now, 0.0), wait_s)


def decide_in_place(
    ending: Ending,
    *,
    restarts: int,
    restarts_max: int,
    lost_nodes: Sequence[str] = (),
    gained_steps: bool = True,
    hangs: int = 0,
    hangs_max: int = BUDGETS[Cause.HANG],
    rolled_back: bool = False,
) -> Decision:
    """Whether torchrun is started again on the nodes that the attempt still has.

    `ending` is how the launch ended. A killed process, a broken connection or a hang is worth
    another start; the program's own error, a lack of memory, a lost or a faulty node are not.
    Without new steps only one restart is granted, and no more than `hangs_max` for the `hangs` of
    this attempt. A loss that is not to be trusted is worth one where ranks have `rolled_back`.
    """
    why = ending.evidence[0] if ending.evidence else "no evidence"
    if lost_nodes:
        return Decision(action="stop", reason=f"nodes {', '.join(lost_nodes)} are lost")
    if restarts >= restarts_max:
        return Decision(action="stop", reason=f"{restarts} restarts in place of {restarts_max}")
    if restarts > 0 and not gained_steps:
        return Decision(action="stop", reason="the last restart in place gained no step")
    if ending.cause is Cause.HANG and hangs > hangs_max:
        return Decision(action="stop", reason=f"hung {hangs} times, {hangs_max} forgiven: {why}")
    if ending.cause is Cause.NUMERICS and rolled_back:
        return Decision(action="restart", reason=f"{ending.cause}: {why}")
    if ending.cause not in _RESTARTABLE or names_hardware(ending.evidence):
        return Decision(action="stop", reason=f"{ending.cause}: {why}")
    return Decision(action="restart", reason=f"{ending.cause}: {why}")
