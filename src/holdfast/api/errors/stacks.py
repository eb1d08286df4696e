"""The stacks and flight records of suspected hangs, with equal ones of several ranks as one."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from holdfast.api.errors.files import ReadBudget
from holdfast.api.errors.models import FlightGroup, StackDump, StackGroup
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.node.flight import GroupFlight, RankFlight, span_size, span_text
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.redaction import redact_text
from holdfast.lineage.queries.views import iso
from holdfast.workers.agent.watch.collectives import find_missing
from holdfast.workers.agent.watch.flight_recorder import read_summaries
from holdfast.workers.agent.watch.stack_text import Frame, RankStack, f_at, read_dump

DUMPS_MAX: Final = 3
GROUPS_MAX: Final = 32
FRAMES_MAX: Final = 64
FRAME_CHARACTERS_MAX: Final = 300
TEXT_BYTES_MAX: Final = 1024 * 1024
NAMES_MAX: Final = 100_000
# Of all process groups of a dump together. Other users write the records.
MEMBERS_MAX: Final = 1_000_000
_FOLDER: Final = re.compile(r"node-[0-9]{4,7}-([0-9]{2,6})")
_RANK: Final = re.compile(r"rank-([0-9]{5,9})\.([1-9])\.txt")
_STATES: Final = {
    EventKind.HANG_CONFIRMED: "confirmed",
    EventKind.HANG_SUSPECTED: "suspected",
    EventKind.HANG_CLEARED: "cleared",
}
_SHOWN_FIRST: Final = ("confirmed", "suspected", "unreported", "cleared")


@dataclass(frozen=True)
class _Finding:
    """What the journal says about a dump."""

    state: str = "unreported"
    text: str = ""
    launch: int | None = None
    at: float | None = None


def read_stacks(
    attempt: AttemptPaths, events: Iterable[Event], secrets: Sequence[str], budget: ReadBudget
) -> list[StackDump]:
    """Return the dumps of an attempt, hangs that were confirmed first, and then the newest."""
    folders: dict[int, list[Path]] = defaultdict(list)
    for name in _names(attempt.dumps):
        if match := _FOLDER.fullmatch(name):
            folders[int(match[1])].append(attempt.dumps / name)
    found = _findings(events)
    order = sorted(
        folders,
        key=lambda number: (_SHOWN_FIRST.index(found.get(number, _Finding()).state), -number),
    )
    return [
        _read(attempt, number, sorted(folders[number]), found.get(number), secrets, budget)
        for number in order[:DUMPS_MAX]
    ]


def _findings(events: Iterable[Event]) -> dict[int, _Finding]:
    """Return what the journal says about each dump; its last line counts."""
    found: dict[int, _Finding] = {}
    for event in events:
        state = _STATES.get(event.kind) if isinstance(event.kind, EventKind) else None
        for folder in event.data.get("dumps") or () if state else ():
            match = _FOLDER.fullmatch(str(folder).rpartition("/")[2])
            if match is None or state is None:
                continue
            number = int(match[1])
            before, launch = found.get(number, _Finding()), event.data.get("launch")
            found[number] = _Finding(
                state=state,
                text=str(event.data.get("finding") or before.text),
                launch=launch if type(launch) is int else before.launch,
                at=event.time,
            )
    return found


def _read(
    attempt: AttemptPaths,
    number: int,
    folders: Sequence[Path],
    finding: _Finding | None,
    secrets: Sequence[str],
    budget: ReadBudget,
) -> StackDump:
    finding, run = finding or _Finding(), attempt.run.directory
    unread = budget.unread
    stacks = [one for folder in folders for one in _stacks_in(folder, run, budget)]
    records = [one for folder in folders for one in read_summaries(folder, below=run) or ()]
    blame = blame_text(records)
    return StackDump(
        attempt=attempt.number,
        launch=finding.launch,
        number=number,
        at=iso(finding.at),
        state=finding.state,
        finding=redact_text(plain_line(finding.text), secrets),
        groups=group_stacks(stacks),
        flights=group_flights(records),
        flight_finding=redact_text(plain_line(blame), secrets) if blame else None,
        files=[folder.relative_to(run).as_posix() for folder in folders[:GROUPS_MAX]],
        unread=budget.unread - unread,
    )


def _stacks_in(
    folder: Path, run: Path, budget: ReadBudget
) -> Iterable[tuple[RankStack, list[Frame]]]:
    """Yield the newest stack of each rank in one node's folder."""
    newest: dict[int, int] = {}
    for name in _names(folder):
        if match := _RANK.fullmatch(name):
            rank, sample = int(match[1]), int(match[2])
            newest[rank] = max(newest.get(rank, 0), sample)
    for rank, sample in sorted(newest.items()):
        if not budget.take():
            continue
        path = folder / f"rank-{rank:05d}.{sample}.txt"
        try:
            text = read_bounded(path, TEXT_BYTES_MAX, below=run).decode(errors="replace")
        except (OSError, ForeignFileError):
            # Only the run's user may read stacks.
            budget.unread += 1
            continue
        yield read_dump(rank, text)


def group_stacks(stacks: Iterable[tuple[RankStack, list[Frame]]]) -> list[StackGroup]:
    """Return the ranks by equal stack, the largest group first.

    Stacks are equal if their functions are, and the program's innermost line. Addresses, values
    and lines inside of libraries do not count.
    """
    groups: dict[tuple[str, str, str], list[tuple[RankStack, list[Frame]]]] = defaultdict(list)
    for stack, frames in stacks:
        groups[stack.functions, stack.place, stack.problem].append((stack, frames))
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0][0].rank))
    largest = len(ordered[0]) if ordered else 0
    found = []
    for group in ordered[:GROUPS_MAX]:
        first, frames = group[0]
        ranks = sorted(stack.rank for stack, _ in group)
        lines = [f"{one.name} ({f_at(one)})" for one in frames[:FRAMES_MAX]]
        found.append(
            StackGroup(
                ranks=span_text(ranks),
                ranks_count=len(ranks),
                frames=[plain_line(line)[:FRAME_CHARACTERS_MAX] for line in lines],
                waits=first.waits,
                is_odd=len(group) < largest,
                problem=plain_line(first.problem) or None,
            )
        )
    return found


def group_flights(records: Sequence[RankFlight]) -> list[FlightGroup]:
    """Return where the ranks are in each process group with an unfinished call."""
    by_group: dict[tuple[str, str], dict[tuple[Any, ...], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    is_open: set[tuple[str, str]] = set()
    for record in records:
        for one in record.groups:
            group = (one.name, one.members)
            by_group[group][_call(one)].append(record.rank)
            if one.first is not None:
                is_open.add(group)
    found = []
    for group in sorted(is_open, key=lambda key: -sum(map(len, by_group[key].values()))):
        calls = sorted(by_group[group].items(), key=lambda pair: -len(pair[1]))
        for (about, call, state, place), ranks in calls:
            found.append(
                FlightGroup(
                    group=plain_line(about)[:FRAME_CHARACTERS_MAX],
                    ranks=span_text(sorted(ranks)),
                    ranks_count=len(ranks),
                    call=plain_line(call)[:FRAME_CHARACTERS_MAX],
                    state=plain_line(state)[:FRAME_CHARACTERS_MAX],
                    place=plain_line(place)[:FRAME_CHARACTERS_MAX],
                    is_odd=len(ranks) < len(calls[0][1]),
                )
            )
    return found[:GROUPS_MAX]


def _call(one: GroupFlight) -> tuple[str, str, str, str]:
    call = one.first or one.newest
    state = call.state if one.first else "completed"
    return one.title, f"{call.name} {call.sequence}", state, call.place


def blame_text(records: Sequence[RankFlight]) -> str:
    """Return which ranks the others wait for, by their flight records; '' if they show none."""
    try:
        members = {(one.name, one.members) for record in records for one in record.groups}
        if sum(span_size(text) for _, text in members) > MEMBERS_MAX:
            return "the flight records have too many process groups to merge them here"
        blame = find_missing(records)
    except (ValueError, LookupError):
        return ""
    return blame.finding if blame else ""


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; nothing for a link, which may lead out of the run."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, NAMES_MAX))
    except OSError:
        return []
