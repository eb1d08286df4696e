"""Conversion of journal lines to the launches that `goodput` accounts for. Pure functions.

The SQL index and the disk both provide the lines as `TimelineMark`s, so both give the same account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.contracts.account.goodput import Goodput, KnownSpans, account, prices_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.records.tally import FINAL, Blocked, LaunchSpan, Span, seconds_in
from holdfast.contracts.states import Cause

KINDS: Final = (
    EventKind.LAUNCH_STARTED.value,
    EventKind.LAUNCH_ENDED.value,
    EventKind.RESUMED.value,
    EventKind.STAGED.value,
    EventKind.STOP_AGREED.value,
    EventKind.HANG_SUSPECTED.value,
    EventKind.HANG_CLEARED.value,
    EventKind.HANG_CONFIRMED.value,
)
RECORDED: Final = ("started_at", "trained_from", "ended_at", "resumed_step", "last_step")


@dataclass(frozen=True)
class TimelineMark:
    """A journal line about an attempt. `time` is Unix seconds."""

    attempt: int
    kind: str
    time: float
    data: Mapping[str, Any]


def launches_of(
    marks: Iterable[TimelineMark],
    records: Iterable[tuple[int, int, Mapping[str, Any]]] = (),
    blocked: Mapping[tuple[int, int], Blocked] | None = None,
) -> dict[int, tuple[LaunchSpan, ...]]:
    """Return the launches of each attempt, in order. Invalid marks are ignored.

    `marks` are in order of time. `records` are (attempt, launch, facts) of the launches in an
    outcome or in the index. They supply facts that no line contains. `blocked` has the sums of the
    saves that are not among the marks, by attempt and launch.
    """
    blocked = blocked or {}
    found: defaultdict[int, dict[int, LaunchSpan]] = defaultdict(dict)
    held: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for mark in marks:
        own = found[mark.attempt]
        number = _whole(mark.data.get("launch"))
        if number is None:
            # The agents' `stop_agreed` line has no launch. It is about the newest one.
            number = max(own, default=None)
        if number is None:
            continue
        launch = own.get(number, LaunchSpan())
        if _is_hold(mark):
            # Collected in a list: a long run has tens of thousands of them, and updating a launch
            # copies it.
            held[mark.attempt, number].extend(_hold(mark))
            own[number] = launch
        else:
            own[number] = _update(launch, mark)
    for attempt, number in blocked:
        found[attempt].setdefault(number, LaunchSpan())
    # A launch that only an outcome or the index knows still held its GPUs.
    for attempt, number, facts in records:
        found[attempt][number] = _complete(found[attempt].get(number, LaunchSpan()), facts)
    return {
        attempt: tuple(
            replace(
                launches[number],
                held=tuple(held.get((attempt, number), ())),
                blocked=blocked.get((attempt, number)),
            )
            for number in sorted(launches)
        )
        for attempt, launches in found.items()
    }


def _complete(launch: LaunchSpan, facts: Mapping[str, Any]) -> LaunchSpan:
    """Return the launch with the recorded facts that no line contained."""
    missing: dict[str, Any] = {
        key: facts.get(key) for key in RECORDED if getattr(launch, key) is None
    }
    return replace(launch, **missing)


class KnownAccount:
    """What the account of a run needs again: the spans of attempts that have not changed."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[AttemptView, Span]] = {}
        self.folded = KnownSpans()


def spans_of(history: RunHistory, known: KnownAccount | None = None) -> list[Span]:
    """Return the attempts of a run in order, from disk.

    With `known`, the lines of a past attempt whose view has not changed are not read again.
    """
    spans = {} if known is None else known.spans
    views = [
        view
        for view in history.attempts
        if (one := spans.get(view.number)) is None or one[0] is not view
    ]
    launches = _launches_in(history, views)
    fresh = {
        view.number: (view, _span(history, view, launches.get(view.number, ()))) for view in views
    }
    found = [(fresh.get(view.number) or spans[view.number])[1] for view in history.attempts]
    # Only past attempts: the lines of the current one may still grow.
    spans.update({number: one for number, one in fresh.items() if number in history.past})
    return found


def _launches_in(
    history: RunHistory, views: Sequence[AttemptView]
) -> dict[int, tuple[LaunchSpan, ...]]:
    marks = (
        TimelineMark(view.number, str(event.kind), event.time, event.data)
        for view in views
        for event in history.lines.by_attempt.get(view.number, ())
        if str(event.kind) in KINDS and _whole(event.data.get("attempt")) is not None
    )
    records = (
        (view.number, record.number, record.model_dump())
        for view in views
        for record in (view.outcome.launches if view.outcome else ())
    )
    blocked = history.tallied.blocked if history.tallied else {}
    if len(views) < len(history.attempts):
        numbers = {view.number for view in views}
        blocked = {key: one for key, one in blocked.items() if key[0] in numbers}
    return launches_of(marks, records, blocked)


def _span(history: RunHistory, view: AttemptView, launches: tuple[LaunchSpan, ...]) -> Span:
    outcome = view.outcome
    place = view.request.place if view.request else 0
    return Span(
        gpus=history.spec.gpus_held(view.world_size or (outcome.world_size if outcome else 0)),
        place=place,
        gpu_hour=history.spec.resources.gpu_hour_at(place),
        is_preempted=view.cause is Cause.PREEMPTION,
        submitted_at=view.submitted_at,
        started_at=view.started_at,
        stop_requested_at=outcome.stop_requested_at if outcome else None,
        ended_at=view.ended_at,
        last_step=view.last_step,
        launches=launches,
    )


def safe_step_of(history: RunHistory) -> int:
    """Return the newest step that an attempt of the run committed, from disk; 0 for none."""
    steps = [view.facts.get("committed_step") for view in history.attempts]
    steps += [view.outcome.committed_step for view in history.attempts if view.outcome]
    steps.append(history.tally.newest_step)
    return max((step for value in steps if (step := _whole(value)) is not None), default=0)


def goodput_of(
    history: RunHistory,
    *,
    until: float,
    attempts: int | None = None,
    safe_step: int = 0,
    known: KnownAccount | None = None,
) -> Goodput:
    """Return the account of a run's time until `until` (Unix seconds), from disk.

    Only the first `attempts` attempts count, or all. `safe_step` is a step that is known to be
    committed, in addition to those in the history. `known` is from earlier calls for the run.
    """
    return account(
        spans_of(history, known)[:attempts],
        created_at=history.record.created_at,
        until=until,
        prices=prices_of(history.record.spec),
        safe_step=max(safe_step, safe_step_of(history)),
        known=known.folded if known else None,
    )


def _update(launch: LaunchSpan, mark: TimelineMark) -> LaunchSpan:
    """Return the launch with the facts of one line added. Most facts keep their first value."""
    data, time = mark.data, mark.time
    if mark.kind == EventKind.LAUNCH_STARTED:
        return replace(launch, started_at=_known(launch.started_at, time))
    if mark.kind == EventKind.RESUMED:
        load_s = seconds_in(data.get("load_s"))
        return replace(
            launch,
            loads_from=_known(launch.loads_from, time - load_s if load_s else None),
            trained_from=_known(launch.trained_from, time),
            resumed_step=_known(launch.resumed_step, _whole(data.get("step"))),
        )
    if mark.kind == EventKind.STAGED:
        # A final save: the time after the last step belongs to the end of the attempt.
        return replace(launch, trained_until=time - seconds_in(data.get("blocked_s")))
    if mark.kind == EventKind.STOP_AGREED:
        return replace(launch, trained_until=_known(launch.trained_until, time))
    if mark.kind in {EventKind.HANG_SUSPECTED, EventKind.HANG_CLEARED}:
        # A later line says whether they trained meanwhile: of this kind, or the launch's end.
        is_open = mark.kind == EventKind.HANG_SUSPECTED and "all_silent_s" in data
        since = time - seconds_in(data.get("all_silent_s"))
        return replace(launch, silent_from=since if is_open else None)
    if mark.kind == EventKind.HANG_CONFIRMED:
        silent = data.get("silent")
        ranks = [r for r in silent if isinstance(r, dict)] if isinstance(silent, list) else []
        longest_s = max((seconds_in(r.get("silent_s")) for r in ranks), default=0.0)
        return replace(launch, hangs_from=_known(launch.hangs_from, time - longest_s))
    last_step = _whole(data.get("last_step"))
    until = seconds_in(data.get("trained_until")) or None
    hangs_from = _known(launch.hangs_from, seconds_in(data.get("hangs_from")) or None)
    trained_until = _known(launch.trained_until, until)
    if hangs_from is not None and until is not None and hangs_from < trained_until:
        # Silent ranks did not stop when they were asked to.
        trained_until = until
    return replace(
        launch,
        hangs_from=hangs_from,
        silent_from=None,
        trained_until=trained_until,
        ended_at=_known(launch.ended_at, time),
        last_step=_known(launch.last_step, last_step if last_step and last_step > 0 else None),
    )


def _is_hold(mark: TimelineMark) -> bool:
    """Return True for a save that only blocks training, which then continues."""
    return mark.kind == EventKind.STAGED and mark.data.get("reason") != FINAL


def _hold(mark: TimelineMark) -> list[tuple[float, float]]:
    """Return the period for which a save blocked training, if any."""
    began = mark.time - seconds_in(mark.data.get("blocked_s"))
    return [(began, mark.time)] if began < mark.time else []


def _known(former: Any, new: Any) -> Any:
    return new if former is None else former


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
