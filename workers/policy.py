"""Decide what a run does next: a pure function of its records, the free GPUs and the time."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
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
from holdfast.contracts.journal import AUTOMATIC, FALLBACKS, GROWER
from holdfast.contracts.paths import CheckpointName
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.causes import Ending
from holdfast.workers.evidence import names_hardware
from holdfast.workers.fingerprints import failed_host, fingerprint, same_failure_elsewhere
from holdfast.workers.places import place_after
from holdfast.workers.sizes import allowed_sizes, choose_gpus

Action = Literal["relaunch", "restart", "wait", "stop"]

UNLIMITED: Final = 1_000_000
# Relaunches allowed per cause since an operator's last relaunch; a spec may change them.
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
# Slurm starts the job that preempted ours only after ours has ended. An earlier query would count
# as free the GPUs that the other job is about to take.
PREEMPTOR_S: Final = 6.0
EXCLUDE_S: Final = 6 * 3600.0
EXCLUDED_MAX: Final = 16
# One hang or broken connection may be another host's fault. The second on one host is its own.
SUSPICIONS_MAX: Final = 2
BACKOFF_S_MAX: Final = 600.0
BACKOFF_DOUBLINGS_MAX: Final = 6
# A refused job is submitted again after this time, which doubles with each refusal.
REFUSAL_WAIT_S: Final = 10.0
REFUSAL_WAIT_S_MAX: Final = 600.0
# A refusal that may pass is retried for this long.
REFUSED_S_MAX: Final = 7 * 24 * 3600.0
# Other refusals come from the spec or this machine, so more tries do not help.
REFUSALS_MAX: Final = 3
# These causes come from outside the program, so a longer wait would only waste the cluster.
_NO_BACKOFF: Final = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.OPERATOR})
_SUSPICIOUS: Final = frozenset({Cause.HANG, Cause.INFRASTRUCTURE, Cause.UNKNOWN})
_RESTARTABLE: Final = frozenset({Cause.INFRASTRUCTURE, Cause.UNKNOWN, Cause.HANG})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next, and why. `delay_s` is the number of seconds to wait before it.

    `place` is 0 for the first choice of `resources`, and n for the n-th fallback.
    """

    action: Action
    reason: str
    gpus: int = 0
    exclude: tuple[str, ...] = ()
    delay_s: float = 0.0
    place: int = 0


def fits_any(_gpus: int) -> bool:
    """Return True: a run without a checkpoint fits every GPU count."""
    return True


def decide(
    history: RunHistory, capacity: int | None, *, now: float, fits: Callable[[int], bool] = fits_any
) -> Decision:
    """Return what the supervisor does next with a run.

    `capacity` is the number of GPUs free now (None: unknown or unlimited). `now` is Unix seconds.
    `fits` returns whether the newest checkpoint can continue at a GPU count.
    """
    last, spec = history.last_asked, history.spec
    if last is not None and not last.state.is_terminal:
        return Decision(action="wait", reason=f"attempt {last.number} is {last.state}")
    is_completed = last is not None and last.state is AttemptState.COMPLETED
    if is_completed and not takes_up_completed(history.pending_request):
        return Decision(action="stop", reason="completed")
    requested = _decide_by_request(history, capacity, fits)
    if requested is not None:
        return requested
    if last is None:
        return Decision(action="relaunch", gpus=spec.gpus, reason="first")
    return _decide_after(history, last, capacity, now, fits)


def _decide_by_request(
    history: RunHistory, capacity: int | None, fits: Callable[[int], bool]
) -> Decision | None:
    """Return the decision that an operator's pending request makes, or None.

    A request that Holdfast itself made to grow the run only stops the attempt. The number of GPUs
    free now decides the next size.
    """
    request = history.pending_request
    if request is None:
        return None
    action, by = str(request["action"]), str(request.get("by", "an operator"))
    why = f": {request['reason']}" if request.get("reason") else ""
    if action == "pause":
        return Decision(action="wait", reason=f"paused by {by}{why}")
    if action in {"stop", "cancel"}:
        return Decision(action="stop", reason=f"{action} by {by}{why}")
    last = history.last_asked
    before = last.gpus if last is not None else 0
    gpus = int(request.get("gpus") or before or history.spec.gpus)
    if by == GROWER and capacity is not None:
        free = [size for size in allowed_sizes(history.spec) if size <= min(gpus, capacity)]
        gpus = max(filter(fits, free), default=before or gpus)
    place = int(request.get("place") or 0) if by == FALLBACKS else place_after(history, capacity)
    reason = f"{action} at {gpus} GPUs by {by}{why}"
    return Decision(action="relaunch", gpus=gpus, reason=reason, place=place)


def _decide_after(
    history: RunHistory,
    last: AttemptView,
    capacity: int | None,
    now: float,
    fits: Callable[[int], bool],
) -> Decision:
    """Return what follows an attempt that ended without an operator's request."""
    cause = last.cause or Cause.UNKNOWN
    if cause is Cause.OPERATOR:
        return Decision(action="stop", reason="cancelled from outside Holdfast")
    spent = _spent(history, cause)
    budget = history.spec.supervision.budgets.get(cause, BUDGETS[cause])
    if spent > budget:
        again = f" ({spent} times, {budget} allowed)" if budget else ""
        return Decision(action="stop", reason=f"{cause}{again}: {_why(last)}")
    if len(history.attempts) >= history.spec.supervision.attempts_max:
        limit = history.spec.supervision.attempts_max
        return Decision(action="stop", reason=f"supervision.attempts_max ({limit}) is reached")
    same = same_failure_elsewhere(_since_relaunch(history), last)
    if same is not None:
        return Decision(
            action="stop",
            reason=f"attempts {same.number} and {last.number} failed by the same error after step "
            f"{last.last_step}, on {failed_host(same)} and {failed_host(last)}, so no host is at "
            f"fault: {_why(last)}; fix the cause, then run `holdfast relaunch`",
        )
    stuck = _attempts_without_progress(history)
    if stuck >= BREAKER_ATTEMPTS:
        return Decision(
            action="stop",
            reason=f"{stuck} attempts in a row committed no new step, the last ended by {cause}; "
            "fix the cause, then run `holdfast relaunch`",
        )
    gpus, why = choose_gpus(
        history.spec,
        current=last.gpus or history.spec.gpus,
        preemptions=_spent(history, Cause.PREEMPTION),
        after_preemption=cause is Cause.PREEMPTION,
        capacity=capacity,
        fits=fits,
    )
    return Decision(
        action="relaunch",
        gpus=gpus,
        exclude=excluded_hosts(history.attempts, now),
        place=place_after(history, capacity),
        delay_s=_delay_s(history, last, spent, capacity),
        reason=f"after {cause} of attempt {last.number}: {gpus} GPUs ({why})",
    )


def _why(last: AttemptView) -> str:
    return last.evidence[0] if last.evidence else f"attempt {last.number} {last.state}"


def _since_relaunch(history: RunHistory) -> list[AttemptView]:
    """Return the attempts that have ended since an operator's last relaunch."""
    relaunches = [
        int(event.data.get("after_attempt", 0))
        for event in history.events
        if event.kind == "operator_request"
        and event.data.get("action") == "relaunch"
        and event.data.get("by") not in AUTOMATIC
    ]
    since = max(relaunches, default=0)
    return [a for a in history.attempts if a.number > since and a.state.is_terminal]


def _spent(history: RunHistory, cause: Cause) -> int:
    """Return how often `cause` ended an attempt since an operator's last relaunch."""
    return sum(
        # The ranks count rollbacks themselves and stop when there are too many.
        not (cause is Cause.NUMERICS and goes_on_after_numerics(history.events, a.number))
        for a in _since_relaunch(history)
        if a.cause is cause and a.was_submitted
    )


def _attempts_without_progress(history: RunHistory) -> int:
    """Return the number of last attempts in a row that committed no new step.

    An operator's relaunch is no failure and starts the count again. A preempted attempt says
    nothing about the run and is not counted.
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
    """Return each attempt's newest committed step, from outcomes, endings and journal lines.

    Steps that a rollback removed from the run's branch do not count.
    """
    excluded = excluded_checkpoints(history.events)
    parsed = [CheckpointName.parse(name) for name in excluded]
    undone = {(name.attempt, name.step) for name in parsed if name is not None}
    recorded: list[tuple[int, object]] = []
    for attempt in history.attempts:
        outcome_step = attempt.outcome.committed_step if attempt.outcome else None
        recorded += [(attempt.number, attempt.facts.get("committed_step"))]
        recorded += [(attempt.number, outcome_step)]
    recorded = [pair for pair in recorded if pair not in undone]
    for event in history.events:
        is_commit = event.kind == "committed" and "attempt" in event.data
        if is_commit and event.data.get("checkpoint") not in excluded:
            recorded.append((int(event.data["attempt"]), event.data.get("step")))
    steps: dict[int, int] = {}
    for number, step in recorded:
        if isinstance(step, int):
            steps[number] = max(steps.get(number, -1), step)
    return steps


def excluded_hosts(attempts: Sequence[AttemptView], now: float) -> tuple[str, ...]:
    """Return the hosts that failed within `EXCLUDE_S` seconds, newest first.

    At most `EXCLUDED_MAX` hosts are returned. A host is excluded if it was lost, if a health check
    failed on it, if the evidence names a hardware fault of it, or if its ranks failed first in
    `SUSPICIONS_MAX` attempts: by different errors, or by a hang or a cause outside the program.
    """
    hosts: list[str] = []
    suspicions: Counter[str] = Counter()
    errors: defaultdict[str, set[str]] = defaultdict(set)
    for attempt in reversed(attempts):
        if attempt.ended_at is not None and now - attempt.ended_at > EXCLUDE_S:
            continue
        hosts += attempt.facts.get("unhealthy_hosts") or ()
        if attempt.cause is Cause.NODE_FAILURE:
            lost = attempt.facts.get("lost_hosts")
            named = lost if lost is not None else attempt.hosts
            # If the lost host is unknown, do not exclude all hosts of a large job.
            hosts += named if lost or len(named) == 1 else ()
        suspect = failed_host(attempt)
        if suspect is None or attempt.cause in _NO_BACKOFF:
            continue
        errors[suspect] |= {fingerprint(attempt.traceback or "")} - {""}
        suspicions[suspect] += attempt.cause in _SUSPICIOUS
        is_faulty = attempt.cause in _SUSPICIOUS and names_hardware(attempt.evidence)
        count = max(suspicions[suspect], len(errors[suspect]))
        hosts += [suspect] if is_faulty or count >= SUSPICIONS_MAX else []
    return tuple(dict.fromkeys(hosts))[:EXCLUDED_MAX]


def _delay_s(history: RunHistory, last: AttemptView, spent: int, capacity: int | None) -> float:
    """Return the seconds between an attempt's end and the next one."""
    if last.cause is Cause.PREEMPTION and capacity is not None:
        return PREEMPTOR_S
    return backoff_s(history, last, spent)


def backoff_s(history: RunHistory, last: AttemptView, spent: int) -> float:
    """Return the seconds to wait: doubling with each failure, with a deterministic jitter."""
    if last.cause in _NO_BACKOFF:
        return 0.0
    doublings = min(max(spent - 1, 0), BACKOFF_DOUBLINGS_MAX)
    seed = f"{history.record.uid}:{last.number}".encode()
    jitter = 0.75 + 0.5 * hashlib.sha256(seed).digest()[0] / 255
    base: float = history.spec.supervision.backoff_s * 2.0**doublings * jitter
    return round(min(base, BACKOFF_S_MAX), 3)


def wait_after_refusal(tried: SubmissionTry, *, now: float) -> float | None:
    """Return the seconds until a refused job is submitted again (0: now), or None to give up."""
    if not tried.may_pass:
        return None if tried.refusals >= REFUSALS_MAX else 0.0
    if now - (tried.refused_since or now) > REFUSED_S_MAX:
        return None
    doublings = min(max(tried.refusals - 1, 0), BACKOFF_DOUBLINGS_MAX)
    wait_s = min(REFUSAL_WAIT_S * 2.0**doublings, REFUSAL_WAIT_S_MAX)
    # If the clock was set back, the wait still does not exceed `wait_s`.
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
    """Decide whether torchrun is restarted on the nodes that the attempt still has.

    `ending` is how the launch ended. A killed process, a broken connection or a hang allows a
    restart. The program's own error, a lack of memory and a lost or faulty node do not. After a
    restart that gained no step there is no other. The attempt's number of `hangs` may not exceed
    `hangs_max`. A bad loss allows a restart if the ranks have `rolled_back`.
    """
    why = ending.evidence[0] if ending.evidence else "no evidence"
    if lost_nodes:
        return Decision(action="stop", reason=f"lost nodes: {', '.join(lost_nodes)}")
    if restarts >= restarts_max:
        return Decision(action="stop", reason=f"used {restarts} of {restarts_max} restarts")
    if restarts > 0 and not gained_steps:
        return Decision(action="stop", reason="the last restart in place made no progress")
    if ending.cause is Cause.HANG and hangs > hangs_max:
        return Decision(action="stop", reason=f"hung {hangs} times, {hangs_max} allowed: {why}")
    if ending.cause is Cause.NUMERICS and rolled_back:
        return Decision(action="restart", reason=f"{ending.cause}: {why}")
    if ending.cause not in _RESTARTABLE or names_hardware(ending.evidence):
        return Decision(action="stop", reason=f"{ending.cause}: {why}")
    return Decision(action="restart", reason=f"{ending.cause}: {why}")
