"""What the journals of a live run say that needs a person. Pure functions.

A finding has `kind`, `level`, `text`, `since` (Unix seconds or None), `action`, and `mark`, which
changes when the same problem comes again. Other users write journals, so no value is trusted.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records import protection
from holdfast.contracts.states import AttemptState, RunState

REPEATS_MIN: Final = 2
# A job may wait for so long before it is reported, and one that cannot start by itself.
PENDING_S: Final = 1800.0
STUCK_S: Final = 120.0
# A run between two attempts.
WAITING_S: Final = 1800.0
# The newest checkpoint is too old, and a copy to the mirror is late, after a multiple of the usual
# time, and never sooner than this.
LATE_TIMES: Final = 3.0
LATE_S: Final = 600.0
GAPS_MAX: Final = 10
# Of one journal line.
HOSTS_MAX: Final = 16

RELAUNCH: Final = "check that host; Relaunch continues from the newest checkpoint"

_BAD_ENDINGS: Final = frozenset({"crashed", "hung"})
_LIMITS: Final = {
    "checkpoint_age_max_min": "checkpoint_old",
    "gpu_hours_max": "budget_spent",
    "ettr_min": "goodput_low",
}
# What helps a pending job, by the reason that Slurm gives. The first match counts; `True` if the
# job does not start without a person.
_ADVICE: Final[tuple[tuple[re.Pattern[str], bool, str], ...]] = tuple(
    (re.compile(pattern), is_stuck, text)
    for pattern, is_stuck, text in (
        (r"JobHeld(User|Admin)", True, "release the job with `scontrol release JOB`"),
        (r"DependencyNeverSatisfied", True, "Relaunch submits a job without the dependency"),
        (
            r"Partition(NodeLimit|TimeLimit)|BadConstraints|InvalidAccount|InvalidQOS|JobLaunch",
            True,
            "no node can ever run this job: correct `resources` and submit it again",
        ),
        (r"Partition(Down|Inactive)", True, "ask the administrators about the partition"),
        (r"ReqNodeNotAvail|NodeDown|Nodes required", False, "`sinfo -R` lists why nodes are down"),
        (
            r"Assoc\w*|QOS\w*|Max\w*PerAccount",
            False,
            "a limit of the account or QOS holds the job: end other jobs, or use another account",
        ),
        (r"Reservation", False, "wait for the reservation, or relaunch without it"),
    )
)


class Finding(TypedDict):
    """Something that needs a person."""

    kind: str
    level: str
    text: str
    since: float | None
    action: str
    mark: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a live run. Times are Unix seconds, and events are oldest first.

    `alerts` are of the kinds of `contracts.alerts`, `saves` of `SAVES`, `queue` of `QUEUE` and
    `protection` of `PROTECTION`.
    `interval_s` is the interval of the spec, if it is a time.
    """

    state: str
    now: float
    reason: str | None = None
    job_id: str | None = None
    alerts: Sequence[Event] = ()
    saves: Sequence[Event] = ()
    queue: Sequence[Event] = ()
    protection: Sequence[Event] = ()
    committed_at: float | None = None
    step: int | None = None
    is_supervised: bool = True
    has_mirror: bool = False
    interval_s: float | None = None


SAVES: Final = (
    EventKind.RESUMED,
    EventKind.COMMITTED,
    EventKind.MIRRORED,
    EventKind.MIRROR_FAILED,
)
QUEUE: Final = (
    EventKind.ATTEMPT_SUBMITTED,
    EventKind.ATTEMPT_STATE,
    EventKind.ATTEMPT_ENDED,
    EventKind.OPERATOR_REQUEST,
)
PROTECTION: Final = (*protection.LAUNCHES, EventKind.PROTECTION)


def find(facts: RunFacts) -> list[Finding]:
    """Return what the journals of a live run say that needs a person."""
    hung, limits = list(_hang(facts.alerts)), list(_limits(facts.alerts))
    found = [
        *hung,
        *_loop(facts.alerts, facts.step),
        *_dead_agent(facts),
        *_nodes(facts),
        *_protection(facts),
        *_saves(facts.alerts, facts.committed_at),
        *_metrics(facts.alerts),
        *limits,
        *_mirror(facts),
        *_queue(facts),
    ]
    # A hung run commits nothing, and a limit of the spec is the user's own measure.
    if not hung and not any(one["kind"] == "checkpoint_old" for one in limits):
        found += _late_checkpoint(facts)
    return found


def finding(
    kind: str,
    level: str,
    text: str,
    since: float | None,
    action: str,
    *,
    mark: object = None,
) -> Finding:
    """Return a finding. Its mark is the time of its beginning unless one is given."""
    own = since if mark is None else mark
    own = int(own) if isinstance(own, float) else own
    return Finding(
        kind=kind, level=level, text=text, since=since, action=action, mark=str(own or "")
    )


def _hang(events: Sequence[Event]) -> Iterable[Finding]:
    open_: Event | None = None
    for event in events:
        if event.kind in {EventKind.HANG_CLEARED, EventKind.LAUNCH_STARTED}:
            open_ = None
        elif event.kind in {EventKind.HANG_SUSPECTED, EventKind.HANG_CONFIRMED}:
            open_ = open_ or event
    if open_ is not None:
        text = f"ranks are silent: {open_.data.get('finding')}"
        yield finding("hung", "bad", text, open_.time, "read the stacks in the run's notices")


def _loop(events: Sequence[Event], step: int | None) -> Iterable[Finding]:
    """Report launches in a row that failed without a step that an earlier one had not reached."""
    furthest, times, since = -1, 0, 0.0
    for event in events:
        if event.kind is not EventKind.LAUNCH_ENDED:
            continue
        reached = event.data.get("last_step")
        if str(event.data.get("ending")) not in _BAD_ENDINGS:
            times = 0
        elif isinstance(reached, int) and reached > furthest:
            furthest, times, since = reached, 1, event.time
        else:
            times, since = times + 1, since or event.time
    if times >= REPEATS_MIN and (step is None or step <= furthest):
        where = f"step {furthest}" if furthest >= 0 else "its first step"
        text = f"{times} launches in a row failed, and none got past {where}"
        action = "Pause the run, and read the traceback or the stacks"
        yield finding("restart_loop", "bad", text, since, action)


def _nodes(facts: RunFacts) -> Iterable[Finding]:
    """Report nodes of the newest attempt whose heartbeats stopped, or that are slow."""
    silent: dict[str, float] = {}
    slow: dict[str, Event] = {}
    link: Event | None = None
    for event in facts.alerts:
        if event.kind is EventKind.LAUNCH_STARTED:
            silent, slow, link = {}, {}, None
        elif event.kind is EventKind.NODE_SILENT:
            hosts = event.data.get("nodes")
            for host in hosts[:HOSTS_MAX] if isinstance(hosts, list) else ():
                if event.data.get("silent"):
                    silent.setdefault(str(host), event.time)
                else:
                    silent.pop(str(host), None)
        elif event.kind is EventKind.NODE_SLOW:
            if event.data.get("slow"):
                slow.setdefault(str(event.data.get("host")), event)
            else:
                slow.pop(str(event.data.get("host")), None)
        elif event.kind is EventKind.LINK_SLOW:
            link = event if event.data.get("slow") else None
    if facts.state != RunState.RUNNING:
        return
    for host, since in silent.items():
        text = f"{host} sends no heartbeats; its agent or the node may be gone"
        action = f"check {host}; the attempt ends or continues without it after its time limit"
        yield finding("node_silent", "bad", text, since, action, mark=f"{host}-{since:.0f}")
    for host, event in slow.items():
        action = f"check {host}: clocks, ECC errors, other processes"
        text, mark = str(event.data.get("text")), f"{host}-{event.time:.0f}"
        yield finding("node_slow", "warn", text, event.time, action, mark=mark)
    if link is not None:
        action = "check the network between the nodes, and the storage of the data"
        yield finding("link_slow", "warn", str(link.data.get("text")), link.time, action)


def _dead_agent(facts: RunFacts) -> Iterable[Finding]:
    """Report that the last attempt ended because its agent was killed, until the next one."""
    ended = [event for event in facts.queue if event.kind is EventKind.ATTEMPT_ENDED]
    if facts.state != RunState.WAITING or not ended:
        return
    data, number = ended[-1].data, ended[-1].data.get("attempt")
    # Without a start, the job ended before its agent began.
    if data.get("state") != AttemptState.LOST or data.get("started_at") is None:
        return
    since, last = ended[-1].time, data.get("ended_at")
    if isinstance(last, int | float) and 0 <= last <= TIME_MAX:
        since = float(last)
    hosts = data.get("hosts")
    agent = agent_on(hosts if isinstance(hosts, list) else (), attempt=number)
    text = f"{agent} is dead: no heartbeats since {clock_time(since)}, and no recorded outcome"
    if facts.is_supervised:
        action = "the supervisor starts the next attempt; check that host if this happens again"
        yield finding("silent", "warn", text, since, action, mark=number)
    else:
        yield finding("silent", "bad", text, since, RELAUNCH, mark=number)


def agent_on(hosts: Sequence[object], *, attempt: object) -> str:
    """Return words for the agent that leads an attempt on `hosts`; the first of them leads."""
    on = f" on {hosts[0]}" if hosts else ""
    of = f" ({len(hosts)} nodes)" if len(hosts) > 1 else ""
    return f"the agent{on} of attempt {attempt}{of}"


def clock_time(at: float) -> str:
    """Return the time of day of `at`, which is in Unix seconds."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))


def _protection(facts: RunFacts) -> Iterable[Finding]:
    """Report a running launch that the loss of a node would set back further than expected."""
    if facts.state != RunState.RUNNING:
        return
    lacking = protection.unprotected_in(facts.protection)
    for kind, lacks in (("unprotected", protection.COPIES), ("spares_used", protection.SPARES)):
        if one := protection.summary_of(lacking, lacks):
            yield finding(kind, "warn", one["text"], one["at"], one["action"])


def _saves(events: Sequence[Event], committed_at: float | None) -> Iterable[Finding]:
    failed = [
        event
        for event in events
        if event.kind is EventKind.SAVE_FAILED and event.time > (committed_at or 0.0)
    ]
    if failed:
        saves = counted(len(failed), "save")
        text = f"{saves} failed since the newest checkpoint: {failed[-1].data.get('error')}"
        yield finding("saves_fail", "bad", text, failed[0].time, "check the run's storage")


def _metrics(events: Sequence[Event]) -> Iterable[Finding]:
    """Report metrics of the spec that the program does not log."""
    missing: dict[tuple[str, str], Event] = {}
    for event in events:
        if event.kind is EventKind.METRIC_MISSING:
            both = str(event.data.get("key")), str(event.data.get("metric"))
            if event.data.get("missing"):
                missing.setdefault(both, event)
            else:
                missing.pop(both, None)
    for (key, metric), event in missing.items():
        action = f"log {metric} in the program, or correct {key} of the spec"
        text, mark = str(event.data.get("text")), f"{key}-{metric}"
        yield finding("metric_missing", "warn", text, event.time, action, mark=mark)


def _limits(events: Sequence[Event]) -> Iterable[Finding]:
    newest = {
        str(event.data.get("limit")): event
        for event in events
        if event.kind is EventKind.LIMIT_PASSED
    }
    for limit, event in newest.items():
        if event.data.get("passed"):
            kind = _LIMITS.get(limit, "limit")
            action = f"compare with alerts.{limit} of the spec"
            yield finding(kind, "warn", str(event.data.get("text")), event.time, action)


def _late_checkpoint(facts: RunFacts) -> Iterable[Finding]:
    """Report a run that trains for much longer than usual without a checkpoint."""
    if facts.state != RunState.RUNNING:
        return
    began = [event.time for event in facts.saves if event.kind is EventKind.RESUMED]
    commits = [event.time for event in facts.saves if event.kind is EventKind.COMMITTED]
    if not began:
        # The program has not started to train, or it has no Session.
        return
    here = [time for time in commits if time >= began[-1]]
    gaps = [after - before for before, after in itertools.pairwise(here)][-GAPS_MAX:]
    usual_s = statistics.median(gaps) if gaps else facts.interval_s
    since = max(began[-1], *here, facts.committed_at or 0.0)
    if usual_s is None or facts.now - since <= max(LATE_TIMES * usual_s, LATE_S):
        return
    age, usual = map(_duration, (facts.now - since, usual_s))
    text = f"no checkpoint for {age}, where one usually comes every {usual}"
    action = "read the run's notices about saves, and check its storage"
    yield finding("checkpoint_old", "warn", text, since, action)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def _mirror(facts: RunFacts) -> Iterable[Finding]:
    """Report copies to the mirror that fail, or that are much later than usual."""
    if not facts.has_mirror:
        return
    copied: Event | None = None
    failed: list[Event] = []
    waiting: list[Event] = []
    for event in facts.saves:
        if event.kind is EventKind.MIRRORED:
            copied, failed = event, []
            waiting = [one for one in waiting if _step(one) > _step(event)]
        elif event.kind is EventKind.MIRROR_FAILED:
            failed.append(event)
        elif event.kind is EventKind.COMMITTED:
            waiting.append(event)
    where = f"step {_step(copied)}" if copied is not None else "none"
    if failed:
        why = failed[-1].data.get("error")
        text = f"{_copies(len(failed))} to the mirror failed; newest copy: {where}; {why}"
        action = "check the mirror's address, its credentials and its space"
        yield finding("mirror_behind", "bad", text, failed[0].time, action)
        return
    took = copied.data.get("seconds") if copied is not None else None
    limit_s = max(LATE_TIMES * took if isinstance(took, int | float) else 0.0, LATE_S)
    if waiting and facts.now - waiting[0].time > limit_s:
        many = counted(len(waiting), "checkpoint")
        text = f"the mirror lacks {many}; newest copy: {where}"
        action = "check the network to the mirror and its load"
        yield finding("mirror_behind", "warn", text, waiting[0].time, action)


def _copies(number: int) -> str:
    return "1 copy" if number == 1 else f"{number} copies"


def _step(event: Event) -> int:
    step = event.data.get("step")
    return step if isinstance(step, int) else -1


def _queue(facts: RunFacts) -> Iterable[Finding]:
    """Report a job that is pending, and a run that waits between attempts, for too long."""
    since = waiting_since(facts.state, facts.queue)
    if since is None:
        return
    if facts.state == RunState.QUEUED:
        why, _ = pending_reason(facts.queue)
        is_stuck, action = advice(why, facts.job_id)
        if facts.now - since > (STUCK_S if is_stuck else PENDING_S):
            text = f"the job{_named(facts.job_id)} is pending: {why or 'no reason is known'}"
            level = "bad" if is_stuck else "warn"
            yield finding("pending_long", level, text, since, action)
    elif facts.now - since > WAITING_S:
        text = f"no attempt has followed: {facts.reason or 'no reason is recorded'}"
        action = "read the decisions in the run's events; Relaunch tries it now"
        yield finding("waiting_long", "warn", text, since, action)


def waiting_since(state: str, queue: Sequence[Event]) -> float | None:
    """Return when the job of a queued run was submitted, or when a waiting run's attempt ended."""
    if state == RunState.QUEUED:
        return _last_time(queue, EventKind.ATTEMPT_SUBMITTED)
    kinds = (EventKind.ATTEMPT_ENDED, EventKind.OPERATOR_REQUEST, EventKind.ATTEMPT_STATE)
    return _last_time(queue, *kinds) if state == RunState.WAITING else None


def advice(reason: str, job_id: str | None = None) -> tuple[bool, str]:
    """Return whether a pending job needs a person to start, and what helps, by Slurm's reason."""
    for pattern, is_stuck, text in _ADVICE:
        if pattern.search(reason):
            return is_stuck, text.replace("JOB", job_id or "JOB")
    return False, "wait, or Relaunch at fewer GPUs, which may start sooner"


def pending_reason(events: Sequence[Event]) -> tuple[str, float | None]:
    """Return Slurm's reason for a pending job, and when Slurm expects it to start."""
    states = [event for event in events if event.kind is EventKind.ATTEMPT_STATE]
    newest = states[-1].data if states else {}
    if newest.get("state") != AttemptState.PENDING:
        return "", None
    starts_at = newest.get("starts_at")
    is_time = type(starts_at) in {int, float}
    return str(newest.get("detail") or ""), starts_at if is_time else None


def _named(job_id: str | None) -> str:
    return f" {job_id}" if job_id else ""


def _last_time(events: Sequence[Event], *kinds: EventKind) -> float | None:
    times = [event.time for event in events if event.kind in kinds]
    return times[-1] if times else None
