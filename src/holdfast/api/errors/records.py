"""The errors that the journal of an attempt records, as records of one kind. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.api.errors.models import ErrorSource
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records.alerts import text_of
from holdfast.workers.decisions.causes import RankFailure

BAD_ENDINGS: Final = frozenset({"crashed", "hung", "killed"})
BAD_STATES: Final = frozenset({"failed", "hung", "node_failed", "lost"})
EVIDENCE_CHARACTERS_MAX: Final = 600
HOSTS_MAX: Final = 16
RANKS_MAX: Final = 10_000
_WRITERS: Final = {
    "flow": "the supervisor",
    "cli": "a command",
    "api": "the server",
}
# Lines that are errors, or that say how a launch or an attempt ended.
KINDS: Final = (
    EventKind.LAUNCH_STARTED,
    EventKind.LAUNCH_ENDED,
    EventKind.ATTEMPT_ENDED,
    EventKind.NODE_LOST,
    EventKind.NODE_UNHEALTHY,
    EventKind.NODE_SILENT,
    EventKind.HANG_SUSPECTED,
    EventKind.HANG_CLEARED,
    EventKind.HANG_CONFIRMED,
    EventKind.NUMERICS,
    EventKind.ROLLED_BACK,
    EventKind.SAVE_FAILED,
    EventKind.MIRROR_FAILED,
    EventKind.STOP_FAILED,
)


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """One recorded error. `launch` is 0 outside any launch, and `at` is Unix seconds or 0.

    `clock` is the host or the journal whose clock `at` is. `place` orders the records of one
    `journal`. Both are empty for a record of a file. `blamed` are ranks that a journal line blames.
    """

    attempt: int
    launch: int
    source: ErrorSource
    kind: str
    text: str
    clock: str = ""
    at: float = 0.0
    journal: str = ""
    place: tuple[int, int] | tuple[()] = ()
    host: str = ""
    failure: RankFailure | None = None
    blamed: tuple[int, ...] = ()
    traceback: str = ""
    file: str = ""

    @property
    def is_end(self) -> bool:
        """True for the end of a launch or an attempt, which follows all its errors."""
        return self.kind in {EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_ENDED}


@dataclass(frozen=True, kw_only=True)
class LaunchEnd:
    """How a launch ended, from its journal line.

    `rank` failed first with the exit code `code`, None if the line names no rank.
    """

    number: int
    ending: str
    cause: str
    rank: int | None = None
    code: int | None = None
    host: str = ""
    started_at: float = 0.0


def launch_ends(events: Iterable[Event]) -> dict[int, LaunchEnd]:
    """Return the ends of an attempt's launches; `ending` is empty for one without an end."""
    found: dict[int, LaunchEnd] = {}
    for event in events:
        number = event.data.get("launch")
        if type(number) is not int or number < 0:
            continue
        if event.kind is EventKind.LAUNCH_STARTED:
            found.setdefault(number, _end(number, {}, event.time))
        elif event.kind is EventKind.LAUNCH_ENDED:
            before = found.get(number)
            found[number] = _end(number, event.data, before.started_at if before else 0.0)
    return dict(sorted(found.items()))


def _end(number: int, facts: Mapping[str, Any], started_at: float) -> LaunchEnd:
    rank, code = facts.get("rank"), facts.get("rank_exit_code")
    return LaunchEnd(
        number=number,
        ending=str(facts.get("ending") or ""),
        cause=str(facts.get("cause") or ""),
        rank=rank if type(rank) is int and rank >= 0 else None,
        code=code if type(code) is int else None,
        host=str(facts.get("host") or ""),
        started_at=started_at,
    )


def of_journal(
    attempt: int, events: Sequence[Event], hosts: Mapping[int, str]
) -> list[ErrorRecord]:
    """Return the errors among an attempt's journal lines. `hosts` are the nodes' by number."""
    found = []
    places = _launches(events)
    answered = _answered(events)
    for event in events:
        text = _text(event, answered)
        if text:
            record = ErrorRecord(
                attempt=attempt,
                launch=places[_key(event)],
                source=ErrorSource.JOURNAL,
                kind=str(event.kind),
                text=plain_line(text),
                clock=clock_of(event.writer, hosts),
                at=event.time,
                journal=event.writer,
                place=(event.opening, event.sequence),
                host=_host(event),
                blamed=_blamed(event),
            )
            found.append(record)
    return found


def clock_of(writer: str, hosts: Mapping[int, str]) -> str:
    """Return the host that writes a journal, or a name for it if the host is not known."""
    if writer in _WRITERS:
        return _WRITERS[writer]
    name, _, number = writer.partition("-")
    node = 0 if writer == "rank0" else int(number) if number.isdecimal() else None
    is_of_node = writer == "rank0" or name in {"node", "mirror"}
    return (hosts.get(node) if is_of_node and node is not None else None) or writer


def _key(event: Event) -> tuple[str, int, int]:
    return event.writer, event.opening, event.sequence


def _launches(events: Sequence[Event]) -> dict[tuple[str, int, int], int]:
    """Return the launch of each line: the one that it names, else the one that ran then.

    A lead's own lines are in order, so no clock decides there.
    """
    started = [event for event in events if event.kind is EventKind.LAUNCH_STARTED]
    leads = {event.writer for event in started}
    running: dict[str, int] = {}
    found = {}
    for event in sorted(events, key=_key):
        number = event.data.get("launch")
        if type(number) is not int:
            by_time = [one.data.get("launch") for one in started if one.time <= event.time]
            number = max((one for one in by_time if type(one) is int), default=0)
            if event.writer in leads:
                number = running.get(event.writer, 0)
        if event.kind is EventKind.LAUNCH_STARTED:
            running[event.writer] = number
        found[_key(event)] = max(0, number)
    return found


def _answered(events: Iterable[Event]) -> set[tuple[str, ...]]:
    """Return the dumps of suspected hangs of which a later line says what became of them."""
    after = {EventKind.HANG_CLEARED, EventKind.HANG_CONFIRMED}
    return {tuple(event.data.get("dumps") or ()) for event in events if event.kind in after}


def _text(event: Event, answered: set[tuple[str, ...]]) -> str:
    """Return what a line says as a sentence, or '' if it is not an error."""
    facts = event.data
    if event.kind in {EventKind.LAUNCH_STARTED, EventKind.HANG_CLEARED}:
        return ""
    if event.kind is EventKind.LAUNCH_ENDED:
        return _launch_text(facts) if facts.get("ending") in BAD_ENDINGS else ""
    if event.kind is EventKind.ATTEMPT_ENDED:
        return _attempt_text(facts) if facts.get("state") in BAD_STATES else ""
    if event.kind is EventKind.HANG_SUSPECTED and tuple(facts.get("dumps") or ()) in answered:
        return ""
    if event.kind is EventKind.NODE_SILENT and not facts.get("silent"):
        return ""
    if event.kind is EventKind.ROLLED_BACK and not facts.get("crash"):
        return ""
    if event.kind is EventKind.STOP_FAILED:
        return f"the nodes found no step to stop after: {facts.get('reason') or ''}"
    # Each entry names its attempt itself.
    rest = {key: value for key, value in facts.items() if key != "attempt"}
    return text_of(event.model_copy(update={"data": rest}))


def _launch_text(facts: Mapping[str, Any]) -> str:
    step, code, cause = facts.get("last_step"), facts.get("exit_code"), facts.get("cause")
    parts = [
        f"launch {facts.get('launch')} {facts.get('ending')}",
        "" if step is None else f"after step {step}",
        "" if code is None else f"torchrun ended with exit status {code}",
        f"cause: {str(cause).replace('_', ' ')}" if cause else "",
    ]
    said = ", ".join(part for part in parts[2:] if part)
    return " ".join(filter(None, parts[:2])) + (f"; {said}" if said else "")


def _attempt_text(facts: Mapping[str, Any]) -> str:
    state, cause = str(facts["state"]).replace("_", " "), facts.get("cause")
    because = f", cause {str(cause).replace('_', ' ')}" if cause else ""
    evidence = "; ".join(map(str, facts.get("evidence") or ()))[:EVIDENCE_CHARACTERS_MAX]
    return f"the attempt ended as {state}{because}" + (f": {evidence}" if evidence else "")


def _host(event: Event) -> str:
    """Return the host that a line is about; '' if it names none or several."""
    nodes = event.data.get("nodes")
    if event.kind is EventKind.NODE_SILENT and isinstance(nodes, list):
        return ", ".join(map(str, nodes[:HOSTS_MAX]))
    return str(event.data.get("host") or "")


def _blamed(event: Event) -> tuple[int, ...]:
    """Return the ranks for which the others wait, as flight records show them."""
    found = event.data.get("blamed")
    ranks = found[:RANKS_MAX] if isinstance(found, list) else []
    return tuple(rank for rank in ranks if type(rank) is int and rank >= 0)
