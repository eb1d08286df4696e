"""A run as one trace: the spans of the run, its attempts, launches, loads and saves.

They come from the run's files, so a training step never waits for them. The ids are digests of the
run's uid and of what the span is about, so a second export names the same spans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.redaction import redact, redact_text
from holdfast.contracts.states import AttemptState, RunState

ATTRIBUTE_CHARACTERS_MAX: Final = 1000
_KINDS: Final = frozenset(
    {
        *(EventKind.LAUNCH_STARTED, EventKind.LAUNCH_ENDED, EventKind.RESUMED),
        *(EventKind.STAGED, EventKind.COMMITTED, EventKind.SAVE_FAILED),
    }
)
_FAILED: Final = frozenset(
    {AttemptState.FAILED, AttemptState.HUNG, AttemptState.LOST, AttemptState.NODE_FAILED}
)


@dataclass(frozen=True)
class RunSpan:
    """One span. Times are Unix seconds; `problem` is set if what it is about failed."""

    key: str
    parent: str | None
    name: str
    started_at: float
    ended_at: float
    attributes: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def trace_id(uid: str) -> int:
    """Return the id of a run's trace, which is the same at each export."""
    return int.from_bytes(hashlib.sha256(f"holdfast trace {uid}".encode()).digest()[:16]) or 1


def span_id(uid: str, key: str) -> int:
    """Return the id of a span of the run."""
    return int.from_bytes(hashlib.sha256(f"{uid} {key}".encode()).digest()[:8]) or 1


def redacted(span: RunSpan, secrets: Sequence[str]) -> RunSpan:
    """Return the span without the run's secrets."""
    attributes = redact(span.attributes, secrets)
    return replace(span, attributes=attributes, problem=redact_text(span.problem, secrets))


def spans_of(history: RunHistory, events: Iterable[Event], *, now: float) -> Iterator[RunSpan]:
    """Yield the spans of a run, each after its parent. What has not ended ends at `now`."""
    record = history.record
    ordered = sorted((one for one in events if one.kind in _KINDS), key=lambda one: one.time)
    ended_at = now if history.state.is_live else _end_of(history, ordered, record.created_at)
    problem = "the run failed" if history.state is RunState.FAILED else ""
    yield _span(
        "run", None, f"run {record.run}", record.created_at, ended_at,
        {"holdfast.state": str(history.state)}, problem,
    )  # fmt: skip
    for attempt in history.attempts:
        own = [one for one in ordered if one.data.get("attempt") == attempt.number]
        yield from _attempt_spans(attempt, own, ended_at)


def _end_of(history: RunHistory, ordered: Sequence[Event], created_at: float) -> float:
    """Return when an ended run ended, as far as its files say."""
    times = [one.ended_at for one in history.attempts if one.ended_at is not None]
    return max([created_at, *times, *(one.time for one in ordered[-1:])])


def _attempt_spans(attempt: AttemptView, own: Sequence[Event], until: float) -> Iterator[RunSpan]:
    key = f"attempt {attempt.number}"
    times = [one.time for one in own]
    begins = [attempt.submitted_at, attempt.started_at, *times[:1]]
    began = min((one for one in begins if one is not None), default=until)
    end = max(attempt.ended_at or until, began)
    facts = {
        "holdfast.attempt": attempt.number,
        "holdfast.state": str(attempt.state),
        "holdfast.cause": str(attempt.cause or ""),
        "holdfast.gpus": attempt.gpus,
        "holdfast.job_id": attempt.job_id or "",
        "holdfast.hosts": list(attempt.hosts)[:100],
    }
    problem = "; ".join(attempt.evidence) or str(attempt.state)
    problem = problem if attempt.state in _FAILED else ""
    yield _span(key, "run", key, began, end, facts, problem)
    starts = [one for one in own if one.kind == EventKind.LAUNCH_STARTED]
    for event in starts:
        number = event.data.get("launch")
        ended = _first(own, EventKind.LAUNCH_ENDED, number)
        last = ended.time if ended else end
        name = f"launch {number}"
        yield _span(f"{key} {name}", key, name, event.time, last, {"holdfast.launch": number})
    known = {one.data.get("launch") for one in starts}
    done = {
        one.data.get("checkpoint"): one
        for one in own
        if one.kind in {EventKind.COMMITTED, EventKind.SAVE_FAILED}
    }
    for event in own:
        launch = event.data.get("launch")
        parent = f"{key} launch {launch}" if launch in known else key
        yield from _step_span(event, done, key, parent)


def _step_span(event: Event, ends: Mapping[Any, Event], key: str, parent: str) -> Iterator[RunSpan]:
    """Yield the span of a load or a save, or nothing for another line."""
    facts = event.data
    shared = {"holdfast.step": facts.get("step"), "holdfast.checkpoint": facts.get("checkpoint")}
    if event.kind == EventKind.RESUMED and facts.get("checkpoint"):
        began = event.time - max(0.0, facts.get("load_s") or 0.0)
        about = f"{key} load {facts.get('launch')}"
        yield _span(about, parent, "load", began, event.time, shared)
    elif event.kind == EventKind.STAGED:
        done = ends.get(facts.get("checkpoint"))
        blocked = max(0.0, facts.get("blocked_s") or 0.0)
        problem = "it was not committed" if done is None else str(done.data.get("error") or "")
        end = event.time if done is None else done.time
        shared |= {"holdfast.bytes": facts.get("bytes"), "holdfast.blocked_s": blocked}
        about = f"{key} save {facts.get('checkpoint')}"
        yield _span(about, parent, "save", event.time - blocked, end, shared, problem)


def _first(events: Sequence[Event], kind: EventKind, launch: Any) -> Event | None:
    found = (one for one in events if one.kind == kind and one.data.get("launch") == launch)
    return next(found, None)


def _span(
    key: str,
    parent: str | None,
    name: str,
    began: float,
    end: float,
    attributes: dict[str, Any],
    problem: str = "",
) -> RunSpan:
    kept = {
        name: value[:ATTRIBUTE_CHARACTERS_MAX] if isinstance(value, str) else value
        for name, value in attributes.items()
        if value not in (None, "")
    }
    # The clocks of two machines may differ, and a span cannot end before it begins.
    return RunSpan(
        key, parent, name, began, max(began, end), kept, problem[:ATTRIBUTE_CHARACTERS_MAX]
    )
