"""The run under drill, observed from outside: its progress and its processes.

Process ids come from the run's own records (the claim, the heartbeats, the supervisor's journal
line) and from parent processes. No process is found by its program's name.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import psutil

from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.node.flusher_process import MODULE
from holdfast.contracts.records.documents import (
    Submission,
    Term,
    newest_term,
    read_claim,
    read_document,
)
from holdfast.workers.nodes.heartbeats import read_heartbeats
from holdfast.workers.nodes.processes import ProcessName, boot_id, find_process
from holdfast_bench.live_drills.process_list import LaunchPlace, marked_processes, place_of

# On a busy machine, a start takes minutes.
WAIT_S: Final = 300.0
POLL_S: Final = 0.05
# A restarted run counts as training after this many steps.
STEPS_STEADY: Final = 3
# The job of a process of Slurm.
JOB: Final = "SLURM_JOB_ID"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProgressMark:
    """A run's progress at one time (Unix seconds): its newest step and the launch that did it."""

    place: LaunchPlace
    step: int
    time: float


@dataclass
class TargetRun:
    """One run under drill. Its steps come from the heartbeats."""

    paths: RunPaths
    events: list[Event] = field(default_factory=list)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _newest: ProgressMark | None = None
    _firsts: dict[LaunchPlace, ProgressMark] = field(default_factory=dict)

    def look(self) -> None:
        """Read what is new in the journals and about the steps."""
        self._read_journals()
        marks = self._read_steps()
        if marks:
            # The line about the resume before these steps may have been written just now.
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
        self.events += sorted(new, key=lambda e: (e.time, e.writer, e.opening, e.sequence))

    def _read_steps(self) -> list[ProgressMark]:
        attempts = self.paths.list_attempts()
        marks = []
        for beat in read_heartbeats(attempts[-1]) if attempts else []:
            place = LaunchPlace(beat.attempt, beat.launch)
            marks += [
                ProgressMark(place=place, step=rank.step, time=beat.time)
                for rank in beat.ranks
                if rank.phase == "train" and rank.step > self.resumed_step(place)
            ]
        return marks

    # --- progress -------------------------------------------------------------------------

    @property
    def newest(self) -> ProgressMark | None:
        """The newest step of the newest launch that has done a step."""
        return self._newest

    def first_of(self, place: LaunchPlace) -> ProgressMark | None:
        """The first step of a launch."""
        return self._firsts.get(place)

    def newest_step_of(self, place: LaunchPlace) -> int:
        """Return the last step that any rank of the launch finished; -1 if there is none."""
        return self._newest.step if self._newest and self._newest.place == place else -1

    @property
    def attempt(self) -> AttemptPaths:
        """The newest attempt. Raises `ServiceError` if there is none."""
        attempts = self.paths.list_attempts()
        if not attempts:
            raise ServiceError(
                f"{self.paths.name} has no attempt yet; expected a run that is training"
            )
        return attempts[-1]

    def events_of(self, kind: EventKind, since: float = 0.0) -> list[Event]:
        """Return the journal lines of one kind from `since` (Unix seconds) on."""
        return [e for e in self.events if e.kind is kind and e.time >= since]

    def resumed_step(self, place: LaunchPlace) -> int:
        """Return the step from which a launch resumed, or 0 if that is not recorded."""
        steps = (
            int(e.data["step"])
            for e in reversed(self.events)
            if e.kind is EventKind.RESUMED and place_of(e) == place
        )
        return next(steps, 0)

    def started_place(self) -> LaunchPlace | None:
        """Return the newest launch that was started."""
        started = self.events_of(EventKind.LAUNCH_STARTED)
        return max((place_of(e) for e in started), default=None)

    # --- waiting --------------------------------------------------------------------------

    def wait_for(self, what: str, is_so: Callable[[], T | None], wait_s: float = WAIT_S) -> T:
        """Wait until `is_so` returns a true value, and return it.

        Raises `ServiceError` after `wait_s` seconds.
        """
        give_up = time.monotonic() + wait_s
        while time.monotonic() < give_up:
            self.look()
            found = is_so()
            if found:
                return found
            time.sleep(POLL_S)
        raise ServiceError(f"{self.paths.name}: {what} did not happen within {wait_s:.0f} s")

    def steady(
        self, *, after: LaunchPlace | None = None, commits: bool = True
    ) -> ProgressMark | None:
        """Return the newest step if the newest launch trains and its attempt has committed a step.

        With `after`, the launch must be newer than that one. Without `commits`, no committed step
        is needed, for runs that save rarely.
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

    # --- processes ------------------------------------------------------------------------

    def agent(self) -> psutil.Process:
        """Return the agent that leads the newest attempt. Raises `ServiceError` if it is gone."""
        term = newest_term(self.attempt)
        process = self._agent_of(term) if term else self._claimant()
        if process is None:
            raise ServiceError(f"{self.paths.name}: its agent is not a process of this machine")
        return process

    def _claimant(self) -> psutil.Process | None:
        claim = read_claim(self.attempt)
        name = claim and ProcessName(claim.pid, claim.process_start_s, claim.boot_id)
        return find_process(name) if name else None

    def _agent_of(self, term: Term) -> psutil.Process | None:
        """Return the agent that has taken a term, by its heartbeat."""
        for beat in read_heartbeats(self.attempt):
            if beat.node == term.node and beat.boot_id == boot_id():
                with contextlib.suppress(psutil.NoSuchProcess):
                    return psutil.Process(beat.agent_pid)
        return None

    def lead_host(self) -> str:
        """Return the name of the node that leads the newest attempt, or ''."""
        found = newest_term(self.attempt) or read_claim(self.attempt)
        return found.host if found else ""

    def job_processes(self) -> list[psutil.Process]:
        """Return the newest attempt's processes on this machine that Slurm owns."""
        claim = read_claim(self.attempt)
        if claim is None or self.attempt.outcome.exists():
            return []
        found = []
        for one in marked_processes(self.paths):
            with contextlib.suppress(psutil.Error):
                if one.process.environ().get(JOB) == claim.job_id:
                    found.append(one.process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Return by rank the processes in the heartbeats that descend from the agent.

        Raises `ServiceError` if there are none.
        """
        below = {p.pid: p for p in self.agent().children(recursive=True)}
        beats = read_heartbeats(self.attempt)
        found = {r.rank: below[r.pid] for beat in beats for r in beat.ranks if r.pid in below}
        if not found:
            raise ServiceError(f"{self.paths.name}: no heartbeat names a rank on this machine")
        return found

    def torchrun(self) -> psutil.Process:
        """Return the ranks' parent process."""
        parent = next(iter(self.ranks().values())).parent()
        if parent is None:
            raise ServiceError(f"{self.paths.name}: the ranks have no parent")
        return parent

    def flusher(self) -> psutil.Process:
        """Return the agent's child process that writes the checkpoints."""
        found = [p for p in self.agent().children() if MODULE in _argv(p)]
        if not found:
            raise ServiceError(f"{self.paths.name}: its agent has no flusher")
        return found[0]

    def controller(self) -> psutil.Process | None:
        """Return the first process of the local job: an ancestor of the agent in its session."""
        submission = read_document(Submission, self.attempt.submission)
        if submission is None:
            return None
        started, boot = submission.process_start_s or 0.0, submission.boot_id or ""
        if submission.pid is not None:
            found = find_process(ProcessName(submission.pid, started, boot))
            if found is not None:
                return found
        # After an interrupted submission, only the claim may be known, or a launcher that has
        # ended. The launcher led the session.
        try:
            agent = self.agent()
            session = os.getsid(agent.pid)
            above = [p for p in agent.parents() if os.getsid(p.pid) == session]
        except (ServiceError, OSError, psutil.NoSuchProcess):
            return None
        return above[-1] if above else None

    def flow(self) -> psutil.Process | None:
        """Return the newest supervisor if it still runs on this machine."""
        lines = self.events_of(EventKind.SUPERVISED)
        if not lines:
            return None
        try:
            process = psutil.Process(int(lines[-1].data["pid"]))
            # A process that started after the line was written has reused the id.
            mine = process.create_time() <= lines[-1].time
            return process if mine and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def _argv(process: psutil.Process) -> list[str]:
    """Return a process's arguments; none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
