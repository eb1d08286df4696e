"""The watch: updates the index from disk while the server runs, and publishes the changes.

One thread checks the runs' folders for changes, which takes a few `stat` calls per run, and
ingests the runs that changed. It checks live runs in every round, with their `signs` of life, and
`QUIET_PER_ROUND_MAX` of the others. A second thread reconciles live runs with disk and scheduler,
which may be slow.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from holdfast.api.hub import Hub
from holdfast.api.problems import LOG
from holdfast.api.signs import LifeSigns
from holdfast.api.store import IndexStore
from holdfast.contracts.disk.bounds import STEP_MAX
from holdfast.contracts.disk.journal import Event, read_journal
from holdfast.contracts.disk.journal_follow import KEPT
from holdfast.contracts.disk.paths import RunPaths, has_spec, real_folder
from holdfast.contracts.disk.visits import Visit, visit
from holdfast.contracts.errors import HoldfastError, LineageError
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.redaction import redact
from holdfast.lineage.ingest.metrics import follow_metrics
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import views
from holdfast.lineage.queries.run_queries import RunRef
from holdfast.workers.nodes.heartbeats import NodeBeat, heartbeat_stamp, read_heartbeats
from holdfast.workers.runs.reconcile import reconcile

WRITER: Final = "api"
ROUND_S: Final = 0.5
QUIET_PER_ROUND_MAX: Final = 200
ELSEWHERE_S: Final = 10.0
RECONCILE_S: Final = 15.0
JOIN_S: Final = 5.0
PROBLEM_CHARACTERS_MAX: Final = 1000
# In one round.
LOGGED_MAX: Final = 20
# The note of `session.steps`.
_DECLARED: Final = re.compile(r"loops over (\d{1,18}) steps$")

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class LivePace:
    """A live run's progress in its newest heartbeat; `step_s` is the median step duration.

    `steps_total` is the number of steps that the program declared, or None.
    """

    step: int | None
    step_s: float | None
    steps_total: int | None = None


@dataclass
class _Seen:
    """The state of a run at its last check."""

    paths: RunPaths
    stamp: Stamp | None = None
    signs: LifeSigns = field(default_factory=LifeSigns)
    is_live: bool = True
    ref: RunRef | None = None
    offsets: dict[Path, int] = field(default_factory=dict)
    steps_total: int | None = None
    declared_for: tuple[int | None, int] | None = None


class Watch:
    """Watches every run under `roots`, and the live runs of other roots in the index."""

    def __init__(self, store: IndexStore, hub: Hub, roots: tuple[Path, ...]) -> None:
        self._store, self._hub, self._roots = store, hub, roots
        self._runs: dict[Path, _Seen] = {}
        self._paces: dict[str, LivePace] = {}
        self._signs: dict[str, LifeSigns] = {}
        # Grows whenever a process of a run is found missing, or is seen again.
        self.turns = 0
        self._quiet: list[Path] = []
        self._asked_elsewhere = -ELSEWHERE_S
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._urgent: set[Path] = set()
        # Live runs to reconcile before their turn.
        self._doubted: set[Path] = set()
        self._doubt = threading.Event()
        self._files = store.index.files
        self._threads: list[threading.Thread] = []
        self._began = time.monotonic()
        self.problems: dict[str, str] = {}
        self._logged: dict[str, str] = {}
        self.round_ended_at: float | None = None
        self.round_s = 0.0

    def start(self) -> None:
        for work in (self._follow, self._reconcile):
            thread = threading.Thread(target=work, name=f"holdfast{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop both threads; wait up to `JOIN_S` seconds for each."""
        self._stop.set()
        self._wake.set()
        self._doubt.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def touch(self, paths: RunPaths) -> None:
        """Check one run now, because it has just changed."""
        self._urgent.add(paths.directory)
        self._wake.set()

    def lag_s(self) -> float | None:
        """Return the seconds since the end of the last complete round; None before the first."""
        return None if self.round_ended_at is None else time.monotonic() - self.round_ended_at

    def age_s(self) -> float:
        return time.monotonic() - self._began

    def pace(self, uid: str) -> LivePace | None:
        """Return a live run's progress, or None if it is not live or has no heartbeat yet."""
        return self._paces.get(uid)

    def signs(self, uid: str) -> LifeSigns | None:
        """Return a live run's signs of life, or None before its first check."""
        return self._signs.get(uid)

    def unreadable(self) -> dict[Path, str]:
        """Return the runs' folders that could not be read at the last check, with the reasons."""
        found = [(Path(name), reason) for name, reason in list(self.problems.items())]
        return {path: reason for path, reason in found if path in self._runs}

    def unreadable_count(self) -> int:
        """Return the number of roots and runs that cannot be read. Deleted runs do not count."""
        problems = list(self.problems)
        roots = {str(root) for root in self._roots}
        return sum(name in roots or Path(name) in self._runs for name in problems)

    def look(self) -> None:
        """Do one round: check every run that is due."""
        began = time.monotonic()
        self._find_runs(began)
        self._notice_new_index()
        due = [path for path, seen in self._runs.items() if seen.is_live]
        looked = dict.fromkeys([*_take_all(self._urgent), *due, *self._next_quiet()])
        seen = [self._runs[path].paths for path in looked if path in self._runs]
        for one in visit(seen, self._look_at):
            self._note_problem(one)
            if self._stop.is_set():
                return
        self.round_s = time.monotonic() - began
        if "database" not in self.problems:
            self.round_ended_at = time.monotonic()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                self.problems.pop("watch", None)
            # An unexpected error in one round must not end the thread.
            except Exception as error:
                LOG.exception("a round of the watch over the runs failed")
                self.problems["watch"] = f"{type(error).__name__}: {error}"
            self._log_changes()
            self._wake.wait(ROUND_S)
            self._wake.clear()

    def _log_changes(self) -> None:
        """Write to the log which problems are new, and which have gone, since the last call."""
        former, self._logged = self._logged, dict(self.problems)
        lines = [f"{name}: {text}" for name, text in self._logged.items() if name not in former]
        lines += [f"{name}: works again" for name in former if name not in self._logged]
        for line in lines[:LOGGED_MAX]:
            LOG.warning("%s", plain_line(line))
        if len(lines) > LOGGED_MAX:
            LOG.warning(
                "%d more such lines; `holdfast runs` lists the runs", len(lines) - LOGGED_MAX
            )

    def _find_runs(self, now: float) -> None:
        found: set[Path] = set()
        for root in self._roots:
            try:
                with os.scandir(root) as entries:
                    found.update(Path(entry.path) for entry in entries)
                self.problems.pop(str(root), None)
            except OSError as error:
                self.problems[str(root)] = f"the root cannot be read: {error.strerror}"
        # After the roots, because live runs of other roots are found in the index only.
        live = self._live_elsewhere(now)
        # A folder that appears after the first round counts as live: its run has just started.
        is_start = not self._runs
        for path in (found | live) - self._runs.keys():
            if has_spec(path):
                is_live = path in live or not is_start
                self._runs[path] = _Seen(RunPaths(path), is_live=is_live)

    def _live_elsewhere(self, now: float) -> set[Path]:
        """Return the live runs in the index; none within `ELSEWHERE_S` of the last query."""
        if now - self._asked_elsewhere < ELSEWHERE_S:
            return set()
        try:
            live = {Path(row["path"]) for row in self._store.live_runs()}
        except LineageError as error:
            self.problems["database"] = str(error)
            return set()
        self._asked_elsewhere = now
        self.problems.pop("database", None)
        return live

    def _notice_new_index(self) -> None:
        """Ingest every run again if the index file was replaced."""
        files = self._store.index.files
        if files != self._files:
            for seen in self._runs.values():
                if seen.stamp is not None:
                    # The new index is empty, so every run must be ingested again, see decision 20.
                    seen.stamp, seen.is_live = (), True
            self._files = files

    def _next_quiet(self) -> list[Path]:
        """Return the ended runs to check in this round."""
        if not self._quiet:
            self._quiet = [path for path, seen in self._runs.items() if not seen.is_live]
        turn, self._quiet = self._quiet[:QUIET_PER_ROUND_MAX], self._quiet[QUIET_PER_ROUND_MAX:]
        return turn

    def _look_at(self, paths: RunPaths) -> None:
        seen = self._runs[paths.directory]
        stamp = take_stamp(paths)
        if not stamp:
            self._forget(paths.directory)
            return
        if stamp != seen.stamp:
            self._ingest(seen)
            seen.stamp = stamp
        if seen.is_live:
            self._look_for_life(seen)
        self.problems.pop(str(paths.directory), None)

    def _note_problem(self, one: Visit[None]) -> None:
        if isinstance(one.error, LineageError):
            self.problems["database"] = plain_line(one.error)
        elif one.error is not None:
            problem = plain_line(f"skipped: {one.reason}")[:PROBLEM_CHARACTERS_MAX]
            self.problems[str(one.paths.directory)] = problem

    def _forget(self, folder: Path) -> None:
        del self._runs[folder]
        text = "the run's folder was deleted, or this account may no longer enter it"
        self.problems[str(folder)] = text

    def _ingest(self, seen: _Seen) -> None:
        """Update the run's rows in the index, then publish its new journal lines."""
        is_first = seen.stamp is None
        # A run that was there at the start is announced only if it is live.
        is_news = not is_first or seen.is_live
        # Before the ingest: a line that is written meanwhile is published by the next check.
        lines = list(_new_lines(seen, is_first=is_first))
        ingest_run(self._store.index.open(), seen.paths)
        self.problems.pop("database", None)
        seen.ref = ref = self._store.by_folder(seen.paths.directory)
        seen.is_live = ref.state.is_live
        if seen.is_live:
            self._signs[ref.uid] = seen.signs
        else:
            self._paces.pop(ref.uid, None)
            self._signs.pop(ref.uid, None)
            seen.signs = LifeSigns()
        facts = {"run": ref.run, "uid": ref.uid, "state": str(ref.state)}
        secrets = self._store.secrets(ref.uid) if lines else ()
        for journal, attempt, event in lines:
            line = event.model_dump(mode="json", include={"opening", "sequence", "data"})
            line |= {"journal": journal, "attempt": attempt, "kind": str(event.kind)}
            # The stream reaches every page, so secrets are masked here as well.
            line["data"] = redact(line["data"], secrets)
            line["time"] = views.iso_time(event.time)
            self._hub.publish("journal", {**facts, **line}, ref.uid)
        if is_news or ref.state.is_live:
            self._hub.publish("run", facts, ref.uid)

    def _look_for_life(self, seen: _Seen) -> None:
        """Look for the supervisor and the agents, and publish that one is missing or is back."""
        signs, before, was_late = seen.signs, seen.signs.missing, seen.signs.is_late
        signs.probe(seen.paths.flow_lock, time.monotonic())
        self._publish_beat(seen)
        if signs.is_late and not was_late:
            self._doubted.add(seen.paths.directory)
            self._doubt.set()
        if seen.ref is not None and signs.missing != before:
            self.turns += 1
            facts = {"run": seen.ref.run, "uid": seen.ref.uid, "state": str(seen.ref.state)}
            self._hub.publish("run", facts, seen.ref.uid)

    def _publish_beat(self, seen: _Seen) -> None:
        """Publish the progress of the live attempt if node 0 has written a new heartbeat."""
        attempt = _newest_attempt(seen.paths)
        beat = _new_beat(seen, attempt) if seen.ref and attempt is not None else None
        if seen.ref is None or beat is None:
            return
        if seen.declared_for != (attempt, beat.launch):
            # The program declares its steps before the first one.
            seen.steps_total = declared_steps(seen.paths)
            started = any(rank.step >= 0 for rank in beat.ranks)
            seen.declared_for = (attempt, beat.launch) if started else None
        pace = replace(pace_of(beat), steps_total=seen.steps_total)
        self._paces[seen.ref.uid] = pace
        # New metrics do not change a journal, so they are ingested with each heartbeat.
        follow_metrics(self._store.index.open(), seen.paths, seen.ref.uid)
        data: dict[str, Any] = {
            "run": seen.ref.run,
            "uid": seen.ref.uid,
            "attempt": attempt,
            "step": pace.step,
            "phase": beat.ranks[0].phase if beat.ranks else None,
            "step_time_s": beat.ranks[0].step_time_s if beat.ranks else None,
        }
        self._hub.publish("beat", data, seen.ref.uid)

    def _reconcile(self) -> None:
        """Reconcile all live runs every `RECONCILE_S`, and one whose heartbeat is late at once."""
        due = time.monotonic() + RECONCILE_S
        while not self._stop.is_set():
            self._doubt.wait(max(0.0, due - time.monotonic()))
            self._doubt.clear()
            doubted = _take_all(self._doubted)
            is_due = time.monotonic() >= due
            due = time.monotonic() + RECONCILE_S if is_due else due
            live = [seen.paths for seen in list(self._runs.values()) if seen.is_live]
            chosen = [paths for paths in live if is_due or paths.directory in doubted]
            for one in visit(chosen, self._reconcile_own):
                if one.error is not None:
                    problem = plain_line(one.reason)[:PROBLEM_CHARACTERS_MAX]
                    LOG.warning("%s: cannot reconcile: %s", plain_line(one.paths.name), problem)

    def _reconcile_own(self, paths: RunPaths) -> None:
        # Do not write into another user's folder unless a user asks for it.
        if not self._stop.is_set() and paths.is_mine():
            reconcile(paths, writer=WRITER)


def _take_all(shared: set[Path]) -> set[Path]:
    """Empty a set to which other threads add, and return what was in it."""
    taken = set()
    # `pop` and `add` are atomic. A new set would lose what a thread adds to the old one.
    while shared:
        taken.add(shared.pop())
    return taken


def _new_beat(seen: _Seen, attempt: int) -> NodeBeat | None:
    """Return node 0's heartbeat if it changed since the last call, and is valid."""
    paths = seen.paths.attempt(attempt)
    if not seen.signs.hear(attempt, heartbeat_stamp(paths), time.monotonic()):
        return None
    beats = read_heartbeats(paths)
    if not beats:
        return None
    seen.signs.every_s = beats[0].every_s
    return beats[0] if beats[0].node == 0 else None


def pace_of(beat: NodeBeat) -> LivePace:
    """Return the newest step of a node's ranks and the median step duration of the first one."""
    first = beat.ranks[0] if beat.ranks else None
    return LivePace(
        step=max((rank.step for rank in beat.ranks if rank.step >= 0), default=None),
        step_s=(first.step_p50_s or first.step_time_s or None) if first else None,
    )


def declared_steps(paths: RunPaths) -> int | None:
    """Return the number of steps that the program of the newest attempt declared, or None.

    The line is one of the first of rank 0's journal, and a later one replaces it.
    """
    newest = _newest_attempt(paths)
    if newest is None:
        return None
    try:
        events = KEPT.read(paths.attempt(newest).rank_journal)
    except (OSError, HoldfastError):
        return None
    texts = [str(e.data.get("text")) for e in events if e.data.get("promised")]
    found = _DECLARED.search(texts[-1]) if texts else None
    return int(found[1]) if found and int(found[1]) <= STEP_MAX else None


def take_stamp(paths: RunPaths) -> Stamp:
    """Return a value that changes when the run changes; empty if the folder has no run.

    It costs a few `stat` calls. The journals' sizes show most changes. The modification times of
    folders show the changes that have no journal line.
    """
    if not has_spec(paths.directory):
        return ()
    kept = map(real_folder, (paths.checkpoints, paths.tombstones))
    seen = [paths.spec, paths.attempts, *kept]
    folders = [paths.journal]
    newest = _newest_attempt(paths)
    if newest is not None:
        attempt = paths.attempt(newest)
        seen += [attempt.request, attempt.submission, attempt.claim, attempt.outcome]
        folders.append(attempt.journal)
    return tuple(sorted([*_stats(seen), *(one for f in folders for one in _sizes(f))]))


def _stats(files: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for path in files:
        try:
            facts = path.lstat()
        except OSError:
            continue
        yield str(path), facts.st_size, facts.st_mtime_ns


def _sizes(folder: Path) -> list[tuple[str, int, int]]:
    try:
        with os.scandir(folder) as entries:
            # Hidden files are locks and unfinished files.
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            found = [(entry.path, entry.stat(follow_symlinks=False)) for entry in seen]
            return [(path, facts.st_size, facts.st_mtime_ns) for path, facts in found]
    except OSError:
        return []


def _newest_attempt(paths: RunPaths) -> int | None:
    try:
        return max((attempt.number for attempt in paths.list_attempts()), default=None)
    except OSError:
        return None


def _new_lines(seen: _Seen, *, is_first: bool) -> Iterator[tuple[str, int | None, Event]]:
    """Yield (journal, attempt, event) for the lines since the last check; none at the first."""
    folders: list[tuple[Path, int | None]] = [(seen.paths.journal, None)]
    newest = _newest_attempt(seen.paths)
    if newest is not None:
        folders.append((seen.paths.attempt(newest).journal, newest))
    for folder, attempt in folders:
        for name, size, _ in _sizes(folder):
            path = Path(name)
            if path.suffix != ".jsonl":
                continue
            if is_first:
                seen.offsets[path] = size
                continue
            start = seen.offsets.get(path, 0)
            if size < start:
                start = 0
            if size == start:
                continue
            events, seen.offsets[path] = read_journal(path, start)
            for event in events:
                number = attempt if attempt is not None else event.data.get("attempt")
                journal = path.relative_to(seen.paths.directory).as_posix()
                yield journal, number if isinstance(number, int) else None, event
