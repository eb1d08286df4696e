"""Decide what a run does next: a pure function of its records, the free GPUs and the time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.contracts.disk.journal import AUTOMATIC, FALLBACKS, GROWER
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import SubmissionTry
from holdfast.contracts.records.history import (
    AttemptView,
    RunHistory,
    excluded_checkpoints,
    goes_on_after_numerics,
    takes_up_completed,
)
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions import attempt_limit, evidence, exclusions, places, sizes
from holdfast.workers.decisions.blame import blames, forgiven_until
from holdfast.workers.decisions.causes import Ending
from holdfast.workers.schedulers.base import BECAUSE_EXCLUDED

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
BACKOFF_S_MAX: Final = 600.0
BACKOFF_DOUBLINGS_MAX: Final = 6
# A refused job is submitted again after this time, which doubles with each refusal.
REFUSAL_WAIT_S: Final = 10.0
REFUSAL_WAIT_S_MAX: Final = 600.0
# A refusal that may pass is retried for about a week. No clock counts it.
PASSING_REFUSALS_MAX: Final = 1000
# Other refusals come from the spec or this machine, so more tries do not help.
REFUSALS_MAX: Final = 3
# What to do after a cause that does not pass without a person.
_ADVICE: Final[dict[Cause, str]] = {
    Cause.STORAGE_FULL: "; free space (`holdfast prune {run}`) or have the quota raised, then run "
    "`holdfast relaunch {run}`"
}
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
    history: RunHistory,
    capacity: exclusions.Capacity,
    *,
    now: float,
    fits: Callable[[int], bool] = fits_any,
) -> Decision:
    """Return what the supervisor does next with a run.

    `capacity` is the number of GPUs free now at the first choice (None: unknown or unlimited), or a
    function that returns the room at a place. It is called only if the answer matters, and what it
    raises is raised. `now` is Unix seconds. `fits` returns whether the newest checkpoint can
    continue at a GPU count.
    """
    last, spec = history.last_asked, history.spec
    if last is not None and not last.state.is_terminal:
        return Decision(action="wait", reason=f"attempt {last.number} is {last.state}")
    is_completed = last is not None and last.state is AttemptState.COMPLETED
    # A `relaunch` that came before the run completed has nothing left to continue.
    if is_completed and not takes_up_completed(history.pending_request):
        return Decision(action="stop", reason="completed")
    rooms = exclusions.Rooms(capacity)
    requested = _decide_by_request(history, rooms, now, fits)
    if requested is not None:
        return requested
    if last is None:
        return Decision(action="relaunch", gpus=spec.gpus, reason="first")
    if exclusions.is_refused_exclusion(last):
        return _repeat(history, last, rooms, now)
    return _decide_after(history, last, rooms, now, fits)


def _decide_by_request(
    history: RunHistory, rooms: exclusions.Rooms, now: float, fits: Callable[[int], bool]
) -> Decision | None:
    """Return the decision that an operator's pending request makes, or None.

    The number of GPUs that a person gives is kept. Otherwise the nodes of the place limit the size,
    and for growth also the GPUs that are free now.
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
    asked = int(request.get("gpus") or before or history.spec.gpus)
    gpus = sizes.nearest_fitting(history.spec, asked, fits)
    if by == FALLBACKS:
        place = int(request.get("place") or 0)
        if history.spec.resources.problem_at(place):
            # An earlier version asked for it, and its supervisor could not submit there.
            place = history.spec.resources.next_place(place) or 0
    else:
        place = (
            places.place_of(last) if by == GROWER else places.place_after(history, rooms, now=now)
        )

    def choose(exclude: tuple[str, ...]) -> tuple[int, str]:
        if by not in AUTOMATIC and request.get("gpus"):
            return gpus, ""
        spec = history.spec
        most = (
            None
            if sizes.is_single(spec)
            else sizes.without_spares(spec, rooms.largest_job(place, exclude))
        )
        free = sizes.without_spares(spec, rooms.free(place, exclude)) if by == GROWER else None
        if free is not None:
            return sizes.largest_within(spec, min(gpus, free), fits) or before or gpus, ""
        if most is None or gpus <= most:
            return gpus, ""
        return sizes.largest_within(spec, most, fits) or gpus, ""

    found = exclusions.choose_nodes(history, rooms, place, choose, now=now)
    reason = f"{action} at {counted(found.gpus, 'GPU')} by {by}{why}"
    return _relaunch(found, place, reason)


def _relaunch(
    found: exclusions.SizeChoice, place: int, reason: str, delay_s: float = 0.0
) -> Decision:
    if found.waits_for:
        return Decision(action="wait", reason=f"{reason}{found.text}; {found.waits_for}")
    return Decision(
        action="relaunch",
        gpus=found.gpus,
        exclude=found.exclude,
        place=place,
        delay_s=delay_s,
        reason=f"{reason}{found.text}",
    )


def _repeat(
    history: RunHistory, last: AttemptView, rooms: exclusions.Rooms, now: float
) -> Decision:
    """Return the same attempt with fewer exclusions, because Slurm refused it with them."""
    place = places.place_of(last)
    found = exclusions.choose_nodes(history, rooms, place, lambda _: (last.gpus, ""), now=now)
    return _relaunch(found, place, f"{counted(last.gpus, 'GPU')} as for attempt {last.number}")


def _decide_after(
    history: RunHistory,
    last: AttemptView,
    rooms: exclusions.Rooms,
    now: float,
    fits: Callable[[int], bool],
) -> Decision:
    """Return what follows an attempt that ended without an operator's request."""
    cause, spec = last.cause or Cause.UNKNOWN, history.spec
    spent = spent_on(history, cause)
    if reason := _why_stop(history, last, cause, spent):
        return Decision(action="stop", reason=reason)
    place, asked = places.place_after(history, rooms, now=now), _size_not_started(history)

    def choose(exclude: tuple[str, ...]) -> tuple[int, str]:
        if asked is not None and fits(asked):
            return asked, "as asked, and no attempt has started since"
        # A run of one size continues without an answer of the scheduler.
        free = most = None
        if not sizes.is_single(spec):
            free = sizes.without_spares(spec, rooms.free(place, exclude))
            most = sizes.without_spares(spec, rooms.largest_job(place, exclude))
        return sizes.choose_gpus(
            spec,
            current=last.gpus or spec.gpus,
            preemptions=spent_on(history, Cause.PREEMPTION),
            after_preemption=cause is Cause.PREEMPTION,
            capacity=free,
            most=most,
            fits=fits,
        )

    found = exclusions.choose_nodes(history, rooms, place, choose, now=now)
    reason = f"after {cause} of attempt {last.number}: {counted(found.gpus, 'GPU')} ({found.why})"
    reason += f"; {blamed}" if (blamed := _blamed_by(history, last)) else ""
    has_queue = rooms.is_known or spec.resources.executor == "slurm"
    # Only a cluster with a queue has a preempting job that still has to start, see decision 6.
    is_early = cause is Cause.PREEMPTION and has_queue
    delay_s = PREEMPTOR_S if is_early else backoff_s(history, last, spent)
    return _relaunch(found, place, reason, delay_s)


def _blamed_by(history: RunHistory, last: AttemptView) -> str:
    """Return which checkpoint was blamed for the end of the last attempt, or ''."""
    if forgiven_until(history.events) < last.number:
        return ""
    return str(blames(history.events)[-1].get("reason") or "")


def _size_not_started(history: RunHistory) -> int | None:
    """Return the GPUs of a person's newest order if no attempt has started since; else None.

    The scheduler may lose the job that answers a relaunch. The next one has the same size.
    """
    for event in reversed(history.events):
        data = event.data
        if event.kind != "operator_request" or data.get("by") in AUTOMATIC:
            continue
        after = int(data.get("after_attempt") or 0)
        has_started = any(a.number > after and a.started_at is not None for a in history.attempts)
        return None if has_started else data.get("gpus")
    return None


def _why_stop(history: RunHistory, last: AttemptView, cause: Cause, spent: int) -> str:
    """Return why the run ends after its last attempt, or '' if another one follows."""
    if cause is Cause.OPERATOR:
        return "cancelled from outside Holdfast"
    budget = history.spec.supervision.budgets.get(cause, BUDGETS[cause])
    advice = _ADVICE.get(cause, "").format(run=history.record.name)
    if spent > budget:
        again = f" ({counted(spent, 'time')}, {budget} allowed)" if budget else ""
        return f"{cause}{again}: {_why(last)}{advice}"
    # The next attempt would train the same steps and lose them again, see decision 92.
    if cause is Cause.STORAGE_FULL and _lost_all_steps(history, last):
        return (
            f"{cause}: attempt {last.number} could save none of its steps, and the next one would "
            f"only train them again: {_why(last)}{advice}"
        )
    if not attempt_limit.may_try_again(history):
        return f"supervision.attempts_max ({history.spec.supervision.attempts_max}) is reached"
    # On two hosts, so no host is at fault, and a further attempt would fail the same way.
    same = evidence.same_failure_elsewhere(_since_relaunch(history), last)
    if same is not None:
        return (
            f"attempts {same.number} and {last.number} failed by the same error after step "
            f"{last.last_step}, on {evidence.failed_host(same)} and "
            f"{evidence.failed_host(last)}, so no host is at fault: {_why(last)}; fix the cause, "
            "then run `holdfast relaunch`"
        )
    stuck = _attempts_without_progress(history)
    if stuck >= BREAKER_ATTEMPTS:
        return (
            f"{counted(stuck, 'attempt')} in a row committed no new step, the last ended by "
            f"{cause}; "
            "fix the cause, then run `holdfast relaunch`"
        )
    return ""


def _lost_all_steps(history: RunHistory, last: AttemptView) -> bool:
    """Return True if the attempt trained, and nothing that it trained was committed."""
    has_trained = last.last_step is not None and last.last_step >= (last.first_step or 1)
    return has_trained and last.number not in _committed_steps(history)


def _why(last: AttemptView) -> str:
    return last.evidence[0] if last.evidence else f"attempt {last.number} {last.state}"


def _since_relaunch(history: RunHistory) -> list[AttemptView]:
    """Return the attempts that have ended since an operator's last relaunch."""
    relaunches = [0] + [
        int(event.data.get("after_attempt", 0))
        for event in history.events
        if event.kind == "operator_request"
        and event.data.get("action") == "relaunch"
        and event.data.get("by") not in AUTOMATIC
    ]
    # A blamed checkpoint explains the crashes before, and the next attempt has another one.
    since = max(*relaunches, forgiven_until(history.events))
    return [a for a in history.attempts if a.number > since and a.state.is_terminal]


def spent_on(history: RunHistory, cause: Cause) -> int:
    """Return how often `cause` ended an attempt since an operator's last relaunch.

    Hangs after which the agent restarted in place count as well.
    """
    counted_attempts = [a for a in _since_relaunch(history) if _counts(a)]
    if cause is Cause.HANG:
        return sum(map(_hangs_of, counted_attempts))
    return sum(
        # The ranks count rollbacks themselves and stop when there are too many.
        not (cause is Cause.NUMERICS and goes_on_after_numerics(history.events, a.number))
        for a in counted_attempts
        if a.cause is cause
    )


def _hangs_of(attempt: AttemptView) -> int:
    """Return how many launches of an attempt hung. Its own cause is that of the last one."""
    launches = attempt.outcome.launches if attempt.outcome else ()
    return sum(one.cause is Cause.HANG for one in launches[:-1]) + (attempt.cause is Cause.HANG)


def _counts(attempt: AttemptView) -> bool:
    """Return False for an attempt that ended by a choice of Holdfast before the job existed."""
    return attempt.was_submitted and not exclusions.is_refused_exclusion(attempt)


def _attempts_without_progress(history: RunHistory) -> int:
    """Return the number of last attempts in a row that committed no new step.

    An operator's relaunch is not a failure and starts the count again. So does a checkpoint that
    was blamed for the crashes before. A preempted attempt says nothing about the run and is not
    counted. Neither is one that ended by the failure of nodes that had failed before: the run had
    to use them again, because it had too few others.
    """
    newest, stuck = -1, 0
    forgiven = forgiven_until(history.events)
    committed = _committed_steps(history)
    faulty: set[str] = set()
    for attempt in history.attempts:
        step = committed.get(attempt.number, -1)
        if not _counts(attempt):
            continue
        failed = {*(attempt.facts.get("unhealthy_hosts") or ())}
        failed |= {*(attempt.facts.get("lost_hosts") or ())}
        # The run had to use nodes that had failed before, so their failure is no lack of progress.
        is_known = attempt.cause is Cause.NODE_FAILURE and bool(failed) and failed <= faulty
        faulty |= failed
        is_forgiven = attempt.number <= forgiven
        if attempt.cause is Cause.OPERATOR or step > newest or is_forgiven:
            stuck = 0
        elif attempt.cause is not Cause.PREEMPTION and not is_known:
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
    # A rolled-back step is no progress, although its attempt recorded the commit.
    recorded = [pair for pair in recorded if pair not in undone]
    recorded += [
        (number, found.branch_step)
        for number, found in history.tally.commits.items()
        if number is not None
    ]
    steps: dict[int, int] = {}
    for number, step in recorded:
        if isinstance(step, int):
            steps[number] = max(steps.get(number, -1), step)
    return steps


def backoff_s(history: RunHistory, last: AttemptView, spent: int) -> float:
    """Return the seconds to wait: doubling with each failure, with a deterministic jitter."""
    # These causes come from outside, so a longer wait would only waste the cluster. A lost node is
    # excluded, or waited for in the scheduler's queue.
    is_first_loss = last.cause is Cause.NODE_FAILURE and spent <= 1
    if last.cause in exclusions.FROM_OUTSIDE or is_first_loss:
        return 0.0
    doublings = min(max(spent - 1, 0), BACKOFF_DOUBLINGS_MAX)
    # Deterministic, so `decide` stays a pure function. It spreads runs that failed together.
    seed = f"{history.record.uid}:{last.number}".encode()
    jitter = 0.75 + 0.5 * hashlib.sha256(seed).digest()[0] / 255
    base: float = history.spec.supervision.backoff_s * 2.0**doublings * jitter
    return round(min(base, BACKOFF_S_MAX), 3)


def wait_after_refusal(tried: SubmissionTry, *, now: float) -> float | None:
    """Return the seconds until a refused job is submitted again (0: now), or None to give up.

    If the hosts that the request excludes may be the reason, another attempt follows without them.
    """
    if not tried.may_pass:
        is_over = tried.refusals >= REFUSALS_MAX or BECAUSE_EXCLUDED in tried.refused
        return None if is_over else 0.0
    if tried.refusals > PASSING_REFUSALS_MAX:
        return None
    doublings = min(max(tried.refusals - 1, 0), BACKOFF_DOUBLINGS_MAX)
    wait_s = min(REFUSAL_WAIT_S * 2.0**doublings, REFUSAL_WAIT_S_MAX)
    waited_s = now - tried.tried_at
    # If a clock was set back, the job is submitted now, which renews that time.
    return wait_s - waited_s if 0 <= waited_s < wait_s else 0.0


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
    blamed: str = "",
) -> Decision:
    """Decide whether torchrun is restarted on the nodes that the attempt still has.

    `ending` is how the launch ended. A killed process, a broken connection or a hang allows a
    restart. The program's own error, a lack of memory and a lost or faulty node do not. After a
    restart that gained no step there is no other. The run's number of `hangs` may not exceed
    `hangs_max`. A bad loss allows a restart if the ranks have `rolled_back`. So does any crash for
    which a checkpoint is `blamed`, because the next launch resumes from another one.
    """
    why = ending.evidence[0] if ending.evidence else "no evidence"
    if lost_nodes:
        return Decision(action="stop", reason=f"lost nodes: {', '.join(lost_nodes)}")
    if restarts >= restarts_max:
        return Decision(action="stop", reason=f"used {restarts} of {restarts_max} restarts")
    if blamed:
        return Decision(action="restart", reason=blamed)
    # A second restart of the same launch would only repeat the failure. A new attempt can use other
    # nodes.
    if restarts > 0 and not gained_steps:
        return Decision(action="stop", reason="the last restart in place made no progress")
    if ending.cause is Cause.HANG and hangs > hangs_max:
        return Decision(
            action="stop", reason=f"hung {counted(hangs, 'time')}, {hangs_max} allowed: {why}"
        )
    if ending.cause is Cause.NUMERICS and rolled_back:
        return Decision(action="restart", reason=f"{ending.cause}: {why}")
    if ending.cause not in _RESTARTABLE or evidence.names_hardware(ending.evidence):
        return Decision(action="stop", reason=f"{ending.cause}: {why}")
    return Decision(action="restart", reason=f"{ending.cause}: {why}")
