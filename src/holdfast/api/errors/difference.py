"""What differs between a launch that failed and the last one before it that worked. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.api.errors.models import DifferingFact, LaunchDifference, LaunchName
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.plain_text import plain_line
from holdfast.lineage.queries.views import AttemptView

FACTS_MAX: Final = 60
VALUE_CHARACTERS_MAX: Final = 400
DEPTH_MAX: Final = 6
HOSTS_MAX: Final = 64
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
            "hosts": tuple(attempt["nodes"][:HOSTS_MAX]),
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
) -> LaunchDifference:
    """Return what differs. `requests` are the attempts' requests as JSON, without secrets."""
    facts: list[DifferingFact] = []
    if worked is not None:
        known = requests.get(worked.attempt), requests.get(failed.attempt)
        # Where one request cannot be read, the other one shows no difference.
        requested = known if all(known) else (None, None)
        before = _all_facts(worked, requested[0] or {}, failed)
        now = _all_facts(failed, requested[1] or {}, worked)
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                facts.append(DifferingFact(name=name, before=before.get(name), now=now.get(name)))
    return LaunchDifference(
        failed=LaunchName(attempt=failed.attempt, number=failed.number),
        worked=None if worked is None else LaunchName(attempt=worked.attempt, number=worked.number),
        reached=_reached(failed),
        facts=facts[:FACTS_MAX],
        left_out=max(0, len(facts) - FACTS_MAX),
    )


def _reached(launch: LaunchFacts) -> str:
    first, last = launch.reached
    if last is None or (first is not None and last < first):
        return "it finished no step"
    return f"it finished step {last}" if first in {None, last} else f"it finished {first} – {last}"


def _all_facts(
    one: LaunchFacts, request: Mapping[str, Any], other: LaunchFacts
) -> dict[str, str | None]:
    """Return the facts of a launch as text, those that people look for first.

    What is recorded of one of the two only is no difference.
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
