"""The history of one run, read again and again, as its supervisor does.

A turn costs shared storage a few listings, however many attempts, nodes and lines a run has. Only
new lines are read, and an attempt that ended a while ago is checked only now and then, for lines
that came late. The frequent lines are added up and forgotten, see `tally`. So neither the time nor
the memory of a turn grows with the number of saves.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from holdfast.contracts.disk.journal import Event
from holdfast.contracts.disk.journal_follow import JournalPlace, follow
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, has_spec
from holdfast.contracts.errors import reading_run
from holdfast.contracts.records import history
from holdfast.contracts.records.documents import Request, RunRecord
from holdfast.contracts.records.tally import Tally, subject_of, total
from holdfast.contracts.spec.run_spec import RunSpec

# Nodes may still write lines for this long after an attempt has ended.
SETTLED_S: Final = 120.0
AGAIN_S: Final = 600.0
# The number of attempts that ended long ago and are checked in one turn.
AGAIN_MAX: Final = 8

# Lines of runs without a supervisor in this process. A line takes about two kilobytes.
KEPT_MAX: Final = 10_000

# A line and what orders it: the newest time of its journal so far, the writer and its numbers.
_Line = tuple[tuple[float, str, int, int], Event]


def load_tallied(paths: RunPaths, *, late: bool = True) -> history.RunHistory:
    """Return the history of a run from all its files, as `HistoryReader` does. Raises like it.

    If this process has read the run before, only new lines are read.
    """
    history = _READERS.of(paths.directory).load(late=late)
    return history if history.paths == paths else replace(history, paths=paths)


class HistoryReader:
    """Loads a run's history. Thread-safe."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._identity: tuple[RunRecord, RunSpec] | None = None
        self._is_first = True
        self._run = _Folder(paths.journal)
        self._attempts: dict[int, _Attempt] = {}
        self._excluded: frozenset[str] = frozenset()
        self._past = _Sum()
        self._all = _Sum()

    def share(self) -> None:
        """Have `load_tallied` use this reader while it exists."""
        _READERS.share(self._paths.directory, self)

    @property
    def kept(self) -> int:
        """The number of lines in memory."""
        return len(self._all.lines)

    def load(self, *, late: bool = False) -> history.RunHistory:
        """Return the history, with a tally in place of the frequent lines. Raises `HoldfastError`.

        Lines that are added to an attempt long after its end may be missing for `AGAIN_S` seconds,
        unless `late`.
        """
        with self._lock:
            if late or self._identity is None or not has_spec(self._paths.directory):
                self._identify()
            assert self._identity is not None
            with reading_run(self._paths.directory):
                return self._load(*self._identity, late=late)

    def _identify(self) -> None:
        """Read which run this is. Forget everything about another run in the same folder."""
        identity = history.load_identity(self._paths)
        # A folder can be deleted and created again under the same name. The record's uid tells.
        if self._identity is not None and self._identity[0] != identity[0]:
            self._run, self._attempts = _Folder(self._paths.journal), {}
            self._excluded, self._past, self._all = frozenset(), _Sum(), _Sum()
            self._is_first = True
        self._identity = identity

    def _load(self, record: RunRecord, spec: RunSpec, *, late: bool) -> history.RunHistory:
        now = time.monotonic()
        self._attempts = {
            number: self._attempts.get(number) or _Attempt.of(self._paths.attempt(number))
            for number in self._paths.attempt_numbers()
        }
        self._follow(now, late=late)
        # The first read may find a rollback, and the tallies were made without it.
        excluded = self._all.excluded
        if excluded != self._excluded:
            self._exclude(excluded)
            self._follow(now, late=late)
        self._look(now, late=late)
        return history.RunHistory(
            paths=self._paths,
            record=record,
            spec=spec,
            attempts=tuple(one.view for one in self._attempts.values() if one.view is not None),
            events=self._all.events,
            tallied=self._all.tally,
            grouped=self._all.grouped,
            past=frozenset(n for n, one in self._attempts.items() if one.is_past(now)),
        )

    def _look(self, now: float, *, late: bool) -> None:
        """Make the views of attempts that are new, live, or have changed."""
        former: history.AttemptView | None = None
        by_attempt = self._all.grouped.by_attempt
        for number, one in self._attempts.items():
            events = by_attempt.get(number, [])
            if not one.is_past(now) or (late and one.has_changed(events)):
                one.look(events, now, former)
                # The nodes of a former attempt wrote their last lines long ago.
                one.is_old |= self._is_first and len(self._attempts) > number
            former = one.view
        self._is_first = False

    def _follow(self, now: float, *, late: bool) -> None:
        """Read the new lines, and add up everything that is known."""
        self._run.follow(self._excluded)
        open_: list[_Folder] = [self._run]
        past: list[_Folder] = []
        again = 0
        for one in self._attempts.values():
            is_past = one.is_past(now)
            (past if is_past else open_).append(one.folder)
            is_late = is_past and one.read_at is not None
            if is_late and not late:
                # An attempt that ended long ago gets lines only by exception, so a few are read in
                # each turn.
                if again >= AGAIN_MAX or now - (one.read_at or 0.0) < AGAIN_S:
                    continue
                again += 1
            one.folder.follow(self._excluded)
            one.read_at = now
        if self._past.add_up(past):
            for folder in past:
                folder.keep_recent(self._past.tally)
        self._all.add_up([self._past, *open_])

    def _exclude(self, excluded: frozenset[str]) -> None:
        """Count the commits again in the journals whose newest checkpoint was rolled back."""
        is_more = excluded >= self._excluded
        for folder in (self._run, *(one.folder for one in self._attempts.values())):
            # Only a tally whose newest checkpoint was excluded is wrong. Older steps do not count
            # anyway.
            if is_more and not folder.tally.has_counted(excluded):
                folder.tally.excluded = excluded
            else:
                folder.clear()
        for one in self._attempts.values():
            one.read_at = one.read_at if one.folder.places else None
        self._excluded = excluded


class _ReplacedError(Exception):
    """A journal is not the one that was read before."""


def _refuse() -> None:
    raise _ReplacedError


def _nothing() -> None:
    """A journal that was never read is read from its start."""


@dataclass
class _Newest:
    """The newest time of a journal so far."""

    at: float


@dataclass(frozen=True, slots=True)
class _Known:
    """A journal up to a place, and its newest time."""

    place: JournalPlace
    at: float


@dataclass
class _Folder:
    """The journals of one folder: their tally, and the lines that are kept, by their subject.

    `changes` counts the changes of the kept lines.
    """

    directory: Path
    places: dict[str, _Known] = field(default_factory=dict)
    kept: dict[Hashable, _Line] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    changes: int = 0

    @property
    def lines(self) -> Iterable[_Line]:
        return self.kept.values()

    def clear(self) -> None:
        """Forget everything, so that the journals are read from their start."""
        self.places, self.kept, self.tally = {}, {}, Tally()
        self.changes += 1

    def follow(self, excluded: frozenset[str]) -> None:
        """Read the new lines. Raises like `read_journal`."""
        try:
            self._read(excluded)
        except _ReplacedError:
            self.clear()
            self._read(excluded)
        except BaseException:
            # Added twice, they would count twice.
            # Some lines of a journal may be counted already. A second read would count them twice.
            self.clear()
            raise

    def _read(self, excluded: frozenset[str]) -> None:
        self.tally.excluded = excluded
        found = sorted(self.directory.glob("*.jsonl"))
        if self.places.keys() - {path.name for path in found}:
            raise _ReplacedError
        for path in found:
            known = self.places.get(path.name)
            place = follow(
                path,
                known.place if known else None,
                begin=_nothing if known is None else _refuse,
                take=partial(self._take, newest := _Newest(known.at if known else 0.0)),
            )
            if place is not None:
                self.places[path.name] = _Known(place, newest.at)

    def _take(self, newest: _Newest, event: Event) -> None:
        # The lines of one journal keep their order, whatever its clock did.
        newest.at = max(newest.at, event.time)
        if not self.tally.add(event):
            return
        line = (newest.at, event.writer, event.opening, event.sequence), event
        subject = subject_of(event)
        former = self.kept.get(subject)
        if former is None or former[0] <= line[0]:
            self.kept[subject] = line
            self.changes += 1

    def keep_recent(self, of_all: Tally) -> None:
        """Forget the recent commits that are not among those of the run."""
        mine = self.tally.recent
        if mine and max(mine) < of_all.recent[0]:
            self.tally.recent = ()


@dataclass
class _Sum:
    """The kept lines, in order and by attempt, and the tally of some folders or sums."""

    lines: list[_Line] = field(default_factory=list)
    events: tuple[Event, ...] = ()
    grouped: history.Lines = field(default_factory=lambda: history.Lines(()))
    excluded: frozenset[str] = frozenset()
    tally: Tally = field(default_factory=Tally)
    changes: int = 0
    _kept: tuple[object, ...] = ()
    _counted: tuple[object, ...] = ()

    def add_up(self, parts: Sequence[_Folder | _Sum]) -> bool:
        """Add up the parts; return whether they have changed."""
        kept = tuple((id(part), part.changes) for part in parts)
        counted = tuple(part.tally.lines for part in parts)
        if (kept, counted) == (self._kept, self._counted):
            return False
        if kept != self._kept:
            self.changes += 1
            self.lines = sorted(chain.from_iterable(part.lines for part in parts), key=_order)
            self.events = tuple(event for _, event in self.lines)
            self.grouped = history.Lines(self.events)
            self.excluded = history.excluded_checkpoints(self.events)
        self.tally = total(part.tally for part in parts)
        self._kept, self._counted = kept, counted
        return True


def _order(line: _Line) -> tuple[float, str, int, int]:
    return line[0]


@dataclass
class _Attempt:
    """One attempt as it was last seen. Times are of the monotonic clock."""

    paths: AttemptPaths
    folder: _Folder
    view: history.AttemptView | None = None
    # The documents and the lines from which the view was made.
    documents: tuple[object, ...] = ()
    events: Sequence[Event] = ()
    ended_since: float | None = None
    # It had ended before this process started.
    is_old: bool = False
    read_at: float | None = None

    @classmethod
    def of(cls, paths: AttemptPaths) -> _Attempt:
        return cls(paths, _Folder(paths.journal))

    def is_past(self, now: float) -> bool:
        """Return True if it ended some time ago."""
        since = self.ended_since
        return since is not None and (self.is_old or now - since >= SETTLED_S)

    def has_changed(self, events: Sequence[Event]) -> bool:
        """Return True if the view is out of date, for example because the folder was replaced."""
        return self.documents != _stamps(self.paths) or self.events != events

    def look(self, events: Sequence[Event], now: float, former: history.AttemptView | None) -> None:
        """Make the view from the attempt's documents and lines."""
        self.documents, self.events = _stamps(self.paths), events
        view = history.view_attempt(self.paths, events)
        if view.state.is_terminal:
            self.ended_since = now if self.ended_since is None else self.ended_since
            view = _shared(view, former)
        else:
            self.ended_since, self.is_old = None, False
        self.view = view


def _stamps(paths: AttemptPaths) -> tuple[object, ...]:
    """Return the sizes and times of an attempt's documents."""
    found: list[object] = []
    for path in (paths.request, paths.submission, paths.claim, paths.outcome):
        try:
            facts = os.lstat(path)
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _shared(view: history.AttemptView, former: history.AttemptView | None) -> history.AttemptView:
    """Return the view with the parts of its request that equal those of the `former` attempt.

    Most of a request repeats the spec. A thousand attempts would need a thousand copies.
    """
    request, like = view.request, former.request if former else None
    if request is None or like is None:
        return view
    same = {
        name: value
        for name in Request.model_fields
        if (value := getattr(like, name)) == getattr(request, name)
    }
    return replace(view, request=request.model_copy(update=same))


class _Readers:
    """The readers of this process: those in use, and the last ones, by folder. Thread-safe."""

    def __init__(self) -> None:
        self._shared = WeakValueDictionary[str, HistoryReader]()
        self._recent: OrderedDict[str, HistoryReader] = OrderedDict()
        self._lock = threading.Lock()

    def share(self, directory: Path, reader: HistoryReader) -> None:
        with self._lock:
            # By the real path, because a run can be reached through several links.
            self._shared[os.path.realpath(directory)] = reader

    def of(self, directory: Path) -> HistoryReader:
        """Return the reader of a run. Drop the least recently used ones, if there are many."""
        key = os.path.realpath(directory)
        with self._lock:
            reader = self._shared.get(key)
            if reader is not None:
                return reader
            reader = self._recent.setdefault(key, HistoryReader(RunPaths(directory)))
            self._recent.move_to_end(key)
            while sum(one.kept for one in self._recent.values()) > KEPT_MAX:
                if len(self._recent) == 1:
                    break
                self._recent.popitem(last=False)
            return reader


_READERS: Final = _Readers()
