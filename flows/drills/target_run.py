"""The run that is drilled, seen from outside: where it stands, who its processes are.

Process numbers come from the run's own records, the claim, the heartbeats, the flow's line in the
journal, and from who is whose parent; nothing is looked up by a program's name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import psutil

from holdfast.contracts.attempt import Submission, read_claim, read_document
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.journal import Event, EventKind, read_journal
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.flows.drills.steps import Place, Records, Step, place_of
from holdfast.workers.agent.flusher_supervisor import MODULE
from holdfast.workers.heartbeats import read_heartbeats
from holdfast.workers.processes import ProcessName, find_process

# On a busy machine a start takes minutes.
WAIT_S: Final = 300.0
POLL_S: Final = 0.05
# Steps after which a run that was started again counts as training.
STEPS_STEADY: Final = 3
T = TypeVar("T")


class Cut(Exception):
    """The drill is to end now, in the middle of whatever it does."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a run stood at one moment: its newest step, and where that was done. Unix seconds."""

    place: Place
    step: int
    time: float


@dataclass
class TargetRun:
    """One run under drill. `records` is None for a program that leaves none: heartbeats then
    tell the steps, as coarsely as they come. `is_cut` tells that nothing more is to be waited for.
    """

    paths: RunPaths
    records: Records | None = None
    is_cut: Callable[[], bool] = lambda: False
    events: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _newest: Mark | None = None
    _firsts: dict[Place, Mark] = field(default_factory=dict)

    def look(self) -> None:
        """Read on in the journals and the records. Raises `Cut` when the drill is to end."""
        if self.is_cut():
            raise Cut
        self._read_journals()
        marks = self._read_steps()
        if marks:
            # Where these steps began from was told before them, and perhaps only just.
            self._read_journals()
        for mark in marks:
            self._firsts.setdefault(mark.place, mark)
            newest = self._newest
            if newest is None or (mark.place, mark.step) > (newest.place, newest.step):
                self._newest = mark

    def _read_journals(self) -> None:
        new: list[Event] = []
        for path in self.paths.list_journals():
            found, self._offsets[path] = read_journal(path, self._offsets.get(path, 0))
            new += found
        self.events += sorted(new, key=lambda e: (e.time, e.writer, e.launch, e.sequence))

    def _read_steps(self) -> list[Mark]:
        if self.records is not None:
            new = self.records.read_new()
            self.steps += new
            return [Mark(place=s.place, step=s.step, time=s.time) for s in new]
        attempts = self.paths.list_attempts()
        marks = []
        for beat in read_heartbeats(attempts[-1]) if attempts else []:
            place = Place(beat.attempt, beat.launch)
            marks += [
                Mark(place=place, step=rank.step, time=beat.time)
                for rank in beat.ranks
                if rank.phase == "train" and rank.step > self.resumed_step(place)
            ]
        return marks

    # --- where it stands ------------------------------------------------------------------

    @property
    def newest(self) -> Mark | None:
        """The newest step of the newest launch that did one."""
        return self._newest

    def first_of(self, place: Place) -> Mark | None:
        """The first step of a launch."""
        return self._firsts.get(place)

    def newest_step_of(self, place: Place) -> int:
        """The last step that any rank finished there; -1 when none did."""
        if self.records is not None:
            return max((s.step for s in self.steps if s.place == place), default=-1)
        return self._newest.step if self._newest and self._newest.place == place else -1

    @property
    def attempt(self) -> AttemptPaths:
        """The newest attempt. Raises `ServiceError` when there is none."""
        attempts = self.paths.list_attempts()
        if not attempts:
            raise ServiceError(f"{self.paths.name} has no attempt yet; drill a run that trains")
        return attempts[-1]

    def events_of(self, kind: EventKind, since: float = 0.0) -> list[Event]:
        """Journal lines of one kind that are not older than `since`, Unix seconds."""
        return [e for e in self.events if e.kind is kind and e.time >= since]

    def resumed_step(self, place: Place) -> int:
        """The step after which a launch began, 0 while nobody has said."""
        told = (
            int(e.data["step"])
            for e in reversed(self.events)
            if e.kind is EventKind.RESUMED and place_of(e) == place
        )
        return next(told, 0)

    def started_place(self) -> Place | None:
        """The newest launch that was started."""
        started = self.events_of(EventKind.LAUNCH_STARTED)
        return max((place_of(e) for e in started), default=None)

    # --- waiting --------------------------------------------------------------------------

    def wait_for(self, what: str, is_so: Callable[[], T | None], wait_s: float = WAIT_S) -> T:
        """What `is_so` returns once it is true. Raises `ServiceError` after `wait_s` seconds."""
        give_up = time.monotonic() + wait_s
        while time.monotonic() < give_up:
            self.look()
            found = is_so()
            if found:
                return found
            time.sleep(POLL_S)
        raise ServiceError(f"{self.paths.name}: {what} did not come within {wait_s:.0f} s")

    def steady(self, *, after: Place | None = None, commits: bool = True) -> Mark | None:
        """The newest step, once the newest launch trains and its attempt has committed one.

        With `after`, a launch newer than that. A run that commits seldom is not waited for
        without `commits`.
        """
        mark = self.newest
        started = self.started_place()
        if mark is None or started != mark.place or (after and mark.place <= after):
            return None
        if mark.step < self.resumed_step(mark.place) + STEPS_STEADY:
            return None
        if self.attempt.number != mark.place.attempt or self.attempt.outcome.exists():
            return None
        committed = self.events_of(EventKind.COMMITTED)
        mine = [e for e in committed if e.data.get("attempt") == mark.place.attempt]
        return mark if mine or not commits else None

    # --- its processes --------------------------------------------------------------------

    def agent(self) -> psutil.Process:
        """The agent that claimed the newest attempt. Raises `ServiceError` when it is gone."""
        claim = read_claim(self.attempt)
        name = claim and ProcessName(claim.pid, claim.process_started_at, claim.boot_id)
        process = find_process(name) if name else None
        if process is None:
            raise ServiceError(f"{self.paths.name}: the agent of its newest attempt is not here")
        return process

    def ranks(self) -> dict[int, psutil.Process]:
        """The training processes by rank, by the heartbeats; those below the agent are believed.

        Raises `ServiceError` when there are none.
        """
        below = {p.pid: p for p in self.agent().children(recursive=True)}
        beats = read_heartbeats(self.attempt)
        found = {r.rank: below[r.pid] for beat in beats for r in beat.ranks if r.pid in below}
        if not found:
            raise ServiceError(f"{self.paths.name}: no heartbeat names a rank that lives here")
        return found

    def torchrun(self) -> psutil.Process:
        """The ranks' parent."""
        parent = next(iter(self.ranks().values())).parent()
        if parent is None:
            raise ServiceError(f"{self.paths.name}: the ranks have no parent")
        return parent

    def flusher(self) -> psutil.Process:
        """The agent's child that writes the checkpoints."""
        found = [p for p in self.agent().children() if MODULE in _argv(p)]
        if not found:
            raise ServiceError(f"{self.paths.name}: its agent has no flusher now")
        return found[0]

    def controller(self) -> psutil.Process | None:
        """The local job's session leader, above the agent."""
        submission = read_document(Submission, self.attempt.submission)
        if submission is None:
            return None
        started, boot = submission.process_started_at or 0.0, submission.boot_id or ""
        if submission.pid is not None:
            found = find_process(ProcessName(submission.pid, started, boot))
            if found is not None:
                return found
        # A flow that took up another one's cut submission knows the claim alone, or the launcher,
        # which has ended since.
        try:
            return psutil.Process(os.getsid(self.agent().pid))
        except (ServiceError, OSError, psutil.NoSuchProcess):
            return None

    def flow(self) -> psutil.Process | None:
        """The newest flow that took the run up, when it still lives here."""
        told = self.events_of(EventKind.SUPERVISED)
        if not told:
            return None
        try:
            process = psutil.Process(int(told[-1].data["pid"]))
            # It wrote its line after it was started: a number used again began later.
            mine = process.create_time() <= told[-1].time
            return process if mine and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def _argv(process: psutil.Process) -> list[str]:
    """A process's arguments; none of one that has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
