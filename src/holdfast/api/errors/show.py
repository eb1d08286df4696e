"""Why an attempt of a run failed: what its records say, merged. Reads files within bounds."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.api.errors import models, stacks
from holdfast.api.errors.files import ErrorFiles, ReadBudget
from holdfast.api.errors.records import (
    BAD_ENDINGS,
    BAD_STATES,
    KINDS,
    ErrorRecord,
    LaunchEnd,
    launch_ends,
    of_journal,
)
from holdfast.api.errors.timeline import EqualErrors, failure_text, merge_errors, order_note
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import AttemptPaths, CheckpointName, RunPaths
from holdfast.contracts.errors import ForeignFileError, HoldfastError, NotFoundError
from holdfast.contracts.node.flight import span_text
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records.alerts import signal_name
from holdfast.contracts.records.documents import Request, read_document
from holdfast.contracts.redaction import redact, redact_text
from holdfast.lineage.queries.views import AttemptView, RunView, iso
from holdfast.workers.decisions.causes import RankFailure
from holdfast.workers.nodes.heartbeats import NodeBeat, clock_problems, read_heartbeats

ENTRIES_MAX: Final = 200
TRACEBACKS_MAX: Final = 40
TRACEBACK_CHARACTERS_MAX: Final = 20_000
TEXT_CHARACTERS_MAX: Final = 1_000
HOSTS_MAX: Final = 16
ATTEMPTS_MAX: Final = 100
# Returns the newest lines of these kinds, oldest first; with a number, those of that attempt.
EventsOf = Callable[[Sequence[EventKind], int | None], Sequence[Event]]

# What differs between a launch that failed and the last one before it that worked.

FACTS_MAX: Final = 60
VALUE_CHARACTERS_MAX: Final = 400
DEPTH_MAX: Final = 6
HOSTS_COMPARED_MAX: Final = 64
# Every request has other ones, or they follow from another key.
_LEFT_OUT: Final = frozenset(
    {
        *("attempt", "job_name", "created_at", "reason", "run", "run_uid", "run_directory"),
        *("hangs_before", "successor", "sources", "restart_of", "scheduler", "command_digest"),
    }
)
_NAMES: Final = {
    "provenance.code_commit": "commit of the code",
    "provenance.code_digest": "changes since the commit (digest)",
    "provenance.config_digest": "config (digest)",
    "provenance.data_digest": "data (digest)",
    "provenance.environment_digest": "environment (digest)",
}


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """A launch and what is recorded of it. `reached` are its first and last step, if it has any.

    With `has_loaded`, its program resumed from `resumed_from`, or began at step 0.
    """

    attempt: int
    number: int | None
    hosts: tuple[str, ...] = ()
    world_size: int | None = None
    resumed_from: str | None = None
    has_loaded: bool = False
    command_digest: str | None = None
    reached: tuple[int | None, int | None] = (None, None)
    argv: tuple[str, ...] = ()
    versions: Mapping[str, Any] = field(default_factory=dict)
    gpus: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.attempt, self.number or 0


def launches_of(attempts: Iterable[AttemptView], resumed: Iterable[Event]) -> list[LaunchFacts]:
    """Return all launches in order, and each attempt without one. `resumed` adds their argv."""
    lines = {_place(event): event.data for event in resumed if event.kind is EventKind.RESUMED}
    found = []
    for attempt in attempts:
        common: dict[str, Any] = {
            "attempt": attempt["number"],
            "hosts": tuple(attempt["nodes"][:HOSTS_COMPARED_MAX]),
        }
        for launch in attempt["launches"]:
            line = lines.get((attempt["number"], launch["number"]), {})
            argv = line.get("argv")
            found.append(
                LaunchFacts(
                    **common,
                    number=launch["number"],
                    world_size=launch["world_size"] or attempt["world_size"],
                    resumed_from=launch["resumed_from"],
                    has_loaded=bool(line) or launch["resumed_from"] is not None,
                    command_digest=launch["command_digest"],
                    reached=(launch["first_step"], launch["last_step"]),
                    argv=tuple(map(str, argv)) if isinstance(argv, list) else (),
                )
            )
        if not attempt["launches"]:
            found.append(
                LaunchFacts(**common, number=None, world_size=attempt["world_size"] or None)
            )
    return sorted(found, key=lambda one: one.key)


def last_that_worked(
    launches: Sequence[LaunchFacts], failed: LaunchFacts, committed: Iterable[str]
) -> LaunchFacts | None:
    """Return the last launch before `failed` that finished a new step, or saved one; or None.

    `committed` are directory names of committed checkpoints.
    """
    names = filter(None, map(CheckpointName.parse, committed))
    saved = {(name.attempt, name.launch) for name in names}
    newest, worked = -1, None
    for one in launches:
        if one.key >= failed.key:
            break
        last = one.reached[1]
        if one.key in saved or (last is not None and last > newest):
            worked = one
        newest = max(newest, -1 if last is None else last)
    return worked


def compare_launches(
    failed: LaunchFacts,
    worked: LaunchFacts | None,
    requests: Mapping[int, Mapping[str, Any]],
) -> models.LaunchDifference:
    """Return what differs. `requests` are the attempts' requests as JSON, without secrets."""
    facts: list[models.DifferingFact] = []
    if worked is not None:
        known = requests.get(worked.attempt), requests.get(failed.attempt)
        # Where one request cannot be read, the other one shows no difference.
        requested = known if all(known) else (None, None)
        before = _all_facts(worked, requested[0] or {}, failed)
        now = _all_facts(failed, requested[1] or {}, worked)
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                facts.append(
                    models.DifferingFact(name=name, before=before.get(name), now=now.get(name))
                )
    return models.LaunchDifference(
        failed=models.LaunchName(attempt=failed.attempt, number=failed.number),
        worked=None
        if worked is None
        else models.LaunchName(attempt=worked.attempt, number=worked.number),
        reached=_reached(failed),
        facts=facts[:FACTS_MAX],
        left_out=max(0, len(facts) - FACTS_MAX),
    )


def _reached(launch: LaunchFacts) -> str:
    first, last = launch.reached
    if last is None or (first is not None and last < first):
        return "it finished no step"
    one = first in {None, last}
    return f"it finished step {last}" if one else f"it finished steps {first} – {last}"


def _all_facts(
    one: LaunchFacts, request: Mapping[str, Any], other: LaunchFacts
) -> dict[str, str | None]:
    """Return the facts of a launch as text, those that people look for first.

    What is recorded of one of the two only is not a difference.
    """
    found: dict[str, str | None] = {
        "hosts": ", ".join(one.hosts) if one.hosts and other.hosts else None,
        "ranks": _text(one.world_size),
    }
    if one.has_loaded and other.has_loaded:
        found["loaded checkpoint"] = one.resumed_from or "none: it began at step 0"
    if one.command_digest and other.command_digest:
        found["command (digest)"] = one.command_digest
    if one.argv and other.argv:
        found["program and arguments"] = _text(one.argv)
    if one.versions and other.versions:
        found |= {f"version of {name}": _text(value) for name, value in one.versions.items()}
    for host in one.gpus.keys() & other.gpus.keys():
        found[f"GPUs of {host}"] = one.gpus[host]
    if one.attempt != other.attempt:
        for name, value in _flat("", request, 0):
            found.setdefault(_NAMES.get(name, name), _text(value))
    return found


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by their dotted names."""
    if isinstance(value, Mapping) and depth < DEPTH_MAX and value:
        for key, one in value.items():
            if depth or key not in _LEFT_OUT:
                yield from _flat(f"{name}.{key}" if name else str(key), one, depth + 1)
    else:
        yield name, value


def _text(value: Any) -> str | None:
    if value is None:
        return None
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return plain_line(said)[:VALUE_CHARACTERS_MAX]


def _place(event: Event) -> tuple[Any, Any]:
    return event.data.get("attempt"), event.data.get("launch")


# The errors of an attempt, merged.


@dataclass(frozen=True, kw_only=True)
class ErrorSources:
    """What is known of a run and of one of its attempts.

    `events` are the attempt's lines of `records.KINDS`. Of all launches, `resumed` are the lines
    about how they began, `committed` the names of their newest checkpoints, and `versions` those of
    libraries, by attempt and launch.
    """

    view: RunView
    known: Sequence[models.AttemptErrors]
    attempt: int
    events: Sequence[Event]
    resumed: Sequence[Event]
    committed: Sequence[str]
    versions: Mapping[tuple[int, int], Mapping[str, Any]]


def read_errors(
    paths: RunPaths,
    view: RunView,
    events_of: EventsOf,
    saved: Callable[[], Iterable[Mapping[str, Any]]],
    secrets: Sequence[str],
    *,
    attempt: int | None = None,
) -> models.RunErrors:
    """Return why an attempt failed, by default the newest that has errors.

    `saved` returns the rows of the newest checkpoints. Raises `NotFoundError` if the run has no
    such attempt.
    """
    ended = events_of((EventKind.LAUNCH_ENDED,), None)
    known, number = _choose_attempt(view, ended, attempt)
    if number is None:
        return no_errors(paths.name)
    committed = events_of((EventKind.COMMITTED,), None)
    sources = ErrorSources(
        view=view,
        known=known,
        attempt=number,
        events=events_of(KINDS, number),
        resumed=events_of((EventKind.RESUMED,), None),
        committed=[str(event.data.get("checkpoint")) for event in committed],
        versions=_versions_in(saved()),
    )
    return find_errors(paths, sources, secrets)


def _choose_attempt(
    view: RunView, ended: Iterable[Event], attempt: int | None
) -> tuple[list[models.AttemptErrors], int | None]:
    """Return the attempts with errors, and `attempt` or the newest of them.

    `ended` are lines about the ends of launches. Raises `NotFoundError` if the run has no such
    attempt.
    """
    known = attempts_with_errors(view["attempts"], ended)
    if attempt is None:
        return known, known[-1].number if known else None
    numbers = [one["number"] for one in view["attempts"]]
    if attempt not in numbers:
        last = f"the last one is {numbers[-1]}" if numbers else "it has none yet"
        raise NotFoundError(f"{view['run']} has no attempt {attempt}; {last}")
    return known, attempt


def find_errors(paths: RunPaths, sources: ErrorSources, secrets: Sequence[str]) -> models.RunErrors:
    """Return why an attempt failed, from what is known of it and from its files."""
    number, events = sources.attempt, sources.events
    row = next(one for one in sources.view["attempts"] if one["number"] == number)
    attempt = paths.attempt(number)
    budget, beats = ReadBudget(), _beats(attempt)
    hosts = {**dict(enumerate(row["nodes"])), **{beat.node: beat.host for beat in beats}}
    ends = launch_ends(events)
    failed = failed_launches(ends, row)
    records = of_journal(number, events, hosts)
    if failed or row["state"] in BAD_STATES:
        files = ErrorFiles(attempt, hosts, budget)
        records += [record for end in failed for record in files.of_ranks(end)]
        records += files.of_others()
        records += _by_outcome(records, row, failed)
    merged = merge_errors(records, {end.number: end for end in failed})
    entries = [_entry(one, secrets, n < TRACEBACKS_MAX) for n, one in enumerate(merged)]
    return models.RunErrors(
        run=paths.name,
        attempt=number,
        attempts=list(sources.known[-ATTEMPTS_MAX:]),
        first=next((one for one in reversed(entries) if one.is_first), None),
        entries=entries[:ENTRIES_MAX],
        left_out=max(0, len(entries) - ENTRIES_MAX),
        unread=budget.unread,
        order_note=order_note(merged, clock_problems(beats, time.time())),
        stacks=stacks.read_stacks(attempt, events, secrets, ReadBudget()),
        difference=_difference(paths, sources, failed, secrets) if entries else None,
    )


def attempts_with_errors(
    attempts: Iterable[AttemptView], events: Iterable[Event]
) -> list[models.AttemptErrors]:
    """Return the attempts that failed, and those with a launch that crashed or hung."""
    launches: dict[int, list[int]] = {}
    for event in events:
        number, launch = event.data.get("attempt"), event.data.get("launch")
        if event.data.get("ending") in BAD_ENDINGS and type(launch) is int and number is not None:
            launches.setdefault(number, []).append(launch)
    found = []
    for one in attempts:
        bad = launches.get(one["number"]) or [
            launch["number"] for launch in one["launches"] if launch["ending"] in BAD_ENDINGS
        ]
        if bad or one["state"] in BAD_STATES:
            state, cause = one["state"], one["cause"]
            found.append(
                models.AttemptErrors(
                    number=one["number"], state=state, cause=cause, launches=sorted({*bad})
                )
            )
    return found


def failed_launches(ends: Mapping[int, LaunchEnd], row: AttemptView) -> list[LaunchEnd]:
    """Return the launches that failed: by their ends, or the last one of an attempt that failed."""
    failed = [end for end in ends.values() if end.ending in BAD_ENDINGS]
    if row["state"] not in BAD_STATES or not ends:
        return failed
    last = ends[max(ends)]
    if last in failed:
        return failed
    return [*failed, replace(last, cause=last.cause or row["cause"] or "")]


def _by_outcome(
    records: Iterable[ErrorRecord], row: AttemptView, failed: Sequence[LaunchEnd]
) -> list[ErrorRecord]:
    """Return the error that the outcome has, unless a rank's own record says the same."""
    rank, traceback = row["failed_rank"], row["traceback"]
    if rank is None or not traceback or any(one.traceback for one in records if one.failure):
        return []
    kind, text = failure_text(1, traceback, traceback)
    record = ErrorRecord(
        attempt=row["number"],
        launch=failed[-1].number if failed else 0,
        source=models.ErrorSource.AGENT,
        kind=kind,
        text=text,
        failure=RankFailure(rank=rank, exit_code=1, traceback=traceback),
        traceback=traceback,
    )
    return [record]


def _entry(error: EqualErrors, secrets: Sequence[str], has_traceback: bool) -> models.ErrorEntry:
    leader, ranks = error.leader, error.ranks
    code = leader.failure.exit_code if leader.failure else None
    traceback = leader.traceback if has_traceback else ""
    # Masked first: a part could begin or end inside a secret.
    masked = redact_text(traceback, secrets)[-TRACEBACK_CHARACTERS_MAX:]
    until = error.until if len(error.records) > 1 and error.until > leader.at else None
    return models.ErrorEntry(
        attempt=leader.attempt,
        launch=leader.launch or None,
        source=leader.source,
        kind=leader.kind,
        is_first=error.is_first,
        is_secondary=error.is_secondary,
        text=redact_text(error.text, secrets)[:TEXT_CHARACTERS_MAX],
        ranks=span_text(ranks),
        ranks_count=len(ranks),
        hosts=error.hosts[:HOSTS_MAX],
        signal=signal_name(-code) if code is not None and code < 0 else None,
        exit_code=code if code is not None and code >= 0 else None,
        at=iso(leader.at or None),
        until=iso(until),
        clock=leader.clock or None,
        traceback=masked or None,
        file=leader.file or None,
    )


def _difference(
    paths: RunPaths, sources: ErrorSources, failed: Sequence[LaunchEnd], secrets: Sequence[str]
) -> models.LaunchDifference | None:
    """Return what differs between the last launch that failed and the last that worked before."""
    launches = launches_of(sources.view["attempts"], sources.resumed)
    mine = [one for one in launches if one.attempt == sources.attempt]
    last = failed[-1].number if failed else None
    one = next((one for one in mine if one.number == last), mine[-1] if mine else None)
    if one is None:
        return None
    worked = last_that_worked(launches, one, sources.committed)
    compared = [_with_more(paths, item, sources) for item in (one, worked) if item is not None]
    attempts = {item.attempt for item in compared} if len(compared) > 1 else set()
    requests = {attempt: _request(paths.attempt(attempt), secrets) for attempt in attempts}
    return compare_launches(compared[0], compared[1] if worked else None, requests)


def _with_more(paths: RunPaths, one: LaunchFacts, sources: ErrorSources) -> LaunchFacts:
    """Return a launch with its versions and GPUs."""
    gpus = {
        beat.host: ", ".join(gpu.uuid for gpu in beat.gpus)
        for beat in _beats(paths.attempt(one.attempt))
        if beat.gpus
    }
    return replace(one, versions=sources.versions.get(one.key, {}), gpus=gpus)


def _request(attempt: AttemptPaths, secrets: Sequence[str]) -> Mapping[str, Any]:
    """Return an attempt's request as JSON, with its secrets masked; {} if it cannot be read."""
    with contextlib.suppress(HoldfastError, OSError):
        if request := read_document(Request, attempt.request):
            masked: dict[str, Any] = redact(request.model_dump(mode="json"), secrets)
            return masked
    return {}


def _beats(attempt: AttemptPaths) -> list[NodeBeat]:
    try:
        return read_heartbeats(attempt)
    except (OSError, ForeignFileError):
        return []


def no_errors(run: str) -> models.RunErrors:
    """Return the answer for a run of which no attempt has errors."""
    return models.RunErrors(
        run=run,
        attempt=None,
        attempts=[],
        first=None,
        entries=[],
        left_out=0,
        unread=0,
        order_note="",
        stacks=[],
        difference=None,
    )


def _versions_in(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return the versions that each launch's checkpoints record, by attempt and launch."""
    return {(row["attempt"], row["launch"]): row["versions"] for row in rows if row.get("versions")}
