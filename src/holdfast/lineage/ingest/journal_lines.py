"""Reads the journal lines that the index does not have yet.

The index knows how many lines of each journal it has. This process remembers where those lines end
in the file, so it need not read them again to count them. Only a limited number of lines is in
memory at a time: a long journal takes several transactions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import journal_follow
from holdfast.contracts.disk.journal import Event, each_line, open_journal
from holdfast.contracts.disk.paths import RunPaths

# A line takes a few kilobytes in memory.
LINES_MAX: Final = 4000
JOURNALS_KNOWN_MAX: Final = 20_000


@dataclass(frozen=True, kw_only=True)
class NewLines:
    """The lines of one journal after the first `lines - len(events)`.

    `attempt` is set for the journal of an attempt. With `is_replaced`, the journal has fewer lines
    than the index or other ones, so all lines in the index are wrong. Unless `is_whole`, more lines
    follow.
    """

    journal: str
    attempt: int | None
    lines: int
    events: tuple[Event, ...] = ()
    is_replaced: bool = False
    is_whole: bool = True


class LinePlaces:
    """Where the first lines of journals end, and how many these are. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[tuple[int, journal_follow.JournalPlace], ...]] = (
            OrderedDict()
        )
        self._lock = threading.Lock()

    def get(self, path: Path, most: int) -> tuple[int, journal_follow.JournalPlace | None]:
        """Return a number of lines, at most `most`, and where they end; else 0 and None."""
        with self._lock:
            known = self._known.get(path, ())
        return max((one for one in known if one[0] <= most), key=_lines, default=(0, None))

    def put(self, path: Path, lines: int, place: journal_follow.JournalPlace) -> None:
        """Remember where the first `lines` lines of a journal end, and the place before."""
        with self._lock:
            # The index may not get the lines that were read last.
            # Two places are kept: a transaction that fails leaves the index at the one before.
            self._known[path] = (*self._known.get(path, ())[-1:], (lines, place))
            self._known.move_to_end(path)
            while len(self._known) > JOURNALS_KNOWN_MAX:
                self._known.popitem(last=False)


def read_new_lines(
    paths: RunPaths, counts: Mapping[str, int], attempts: Iterable[int]
) -> Iterator[NewLines]:
    """Yield each journal of the run and of `attempts`, with at most `LINES_MAX` lines together.

    `counts` has the number of lines of each journal that are known.
    """
    left = LINES_MAX
    for path, number in paths.list_journals_of(attempts):
        name = path.relative_to(paths.directory).as_posix()
        count = counts.get(name, 0)
        found = NewLines(journal=name, attempt=number, lines=count)
        found = _read(path, found, left)
        # The journal was replaced. Read it from its start.
        if found.lines < count or (found.is_replaced and count):
            found = replace(_read(path, replace(found, lines=0), left), is_replaced=True)
        left -= len(found.events)
        yield found


def _read(path: Path, before: NewLines, most: int) -> NewLines:
    """Return the lines after the first `before.lines`, or fewer lines if there are not so many.

    `is_replaced` is set if lines that this process has read before are no longer there.
    """
    lines, place = PLACES.get(path, before.lines)
    if place is not None and lines == before.lines and journal_follow.is_unchanged(path, place):
        return before
    events: list[Event] = []
    with open_journal(path) as stream:
        if stream is None:
            return replace(before, lines=0)
        facts = journal_follow.facts_of(stream)
        offset = journal_follow.start_of(stream, place)
        is_replaced = place is not None and not journal_follow.has_same_end(stream, place)
        lines = lines if offset else 0
        is_whole = True
        for found, end in each_line(stream, path, offset):
            if lines >= before.lines and found:
                if len(events) >= most:
                    is_whole = False
                    break
                events += found
            lines, offset = lines + len(found), end
        if not is_whole:
            # The size says that there is more.
            facts = (facts[0], -1, facts[2])
        PLACES.put(path, lines, journal_follow.place_at(stream, offset, facts))
    return replace(
        before, lines=lines, events=tuple(events), is_whole=is_whole, is_replaced=is_replaced
    )


def _lines(known: tuple[int, journal_follow.JournalPlace | None]) -> int:
    return known[0]


PLACES: Final = LinePlaces()
