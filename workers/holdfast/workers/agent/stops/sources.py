"""The sources of stop requests: signals, notices, an operator's file and the time limit."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.filesystems import fetch_attributes, filesystem_of, is_there
from holdfast.contracts.disk.journal import Event, EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import HoldfastError, SchedulerError
from holdfast.contracts.node import clocks
from holdfast.contracts.records.documents import DrainedNodes, StopFile, read_document
from holdfast.contracts.spec.sections import Supervision
from holdfast.contracts.states import Cause
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.notices.notice import Notice
from holdfast.workers.agent.stops.signals import Judgement, judge
from holdfast.workers.decisions import grace
from holdfast.workers.runs.request import warning_lead_s
from holdfast.workers.schedulers import slurm_client

# The saves of this run so far, read from its growing journals.

# A save has a line when it is staged and one when it is committed, unless it fails.
LINES_KEPT_MAX = 4 * grace.SAVES_RECENT


class FlushLog:
    """Reads earlier attempts' journals once, and this attempt's own at each call."""

    def __init__(self, run: RunPaths, attempt: AttemptPaths) -> None:
        self._run, self._attempt = run, attempt
        self._offsets: dict[Path, int] = {}
        self._lines: list[Event] = []

    def forecast(self) -> grace.FlushForecast | None:
        """Return how long the next flush is expected to take, or None before any save."""
        attempts = [self._attempt] if self._offsets else self._run.list_attempts()
        fresh: list[Event] = []
        # Rank 0 journals every save.
        for path in [attempt.rank_journal for attempt in attempts]:
            events, self._offsets[path] = read_journal(path, self._offsets.get(path, 0))
            saves = {EventKind.STAGED, EventKind.COMMITTED}
            fresh += [event for event in events if event.kind in saves]
        fresh.sort(key=lambda event: event.time)
        self._lines = [*self._lines, *fresh][-LINES_KEPT_MAX:]
        return grace.forecast_flush(self._lines)


# The difference between Slurm's clock and this node's. Slurm's times are by its own clock.

CLOCKS_AGREE_S: Final = 3.0


def slurm_lead_s() -> float:
    """Return the seconds by which the controller's clock is ahead of `steady.now`.

    Slurm shows whole seconds, so small differences count as none. Raises like `slurm_client.call`.
    """
    out = slurm_client.call_briefly(["scontrol", "show", "config"])
    found = re.search(r"Configuration data as of (\S+)", out)
    theirs = slurm_client.parse_time(found[1]) if found else None
    lead_s = 0.0 if theirs is None else theirs - clocks.now()
    return lead_s if abs(lead_s) > CLOCKS_AGREE_S else 0.0


# How long nodes and flushers are waited for when an attempt stops. Times are Unix seconds.

# The part of the grace that is reserved for writing the outcome before the scheduler's KILL.
RESERVE_S: Final = 1.5
CRASH_DRAIN_S: Final = 300.0
# A lost node writes no more files, so only steps that are complete without it are waited for.
LOST_DRAIN_S: Final = 30.0


def kill_at(stop_request: StopRequest, supervision: Supervision, *, has_session: bool) -> float:
    """Return when processes that still run are killed.

    A program that never used the status table cannot stop with a checkpoint, so it gets only
    the grace. One that writes its own checkpoints counts as one with a session.
    """
    limit_s = supervision.flush_timeout_s if has_session else supervision.grace_s
    at, deadline = stop_request.requested_at + limit_s, stop_request.deadline
    return at if deadline is None else min(deadline - RESERVE_S, at)


def drain_until(
    began: float, supervision: Supervision, stop_request: StopRequest | None, *, is_lost: bool
) -> float:
    """Return until when flushers that drain since `began` are waited for.

    With `is_lost`, a node is lost.
    """
    longest_s = supervision.flush_timeout_s
    if is_lost:
        longest_s = min(longest_s, LOST_DRAIN_S)
    if stop_request is None:
        return began + min(CRASH_DRAIN_S, longest_s)
    if stop_request.deadline is None:
        return began + longest_s
    return max(began + 1.0, min(stop_request.deadline, began + longest_s))


FILE_POLL_S: Final = 0.5
# How often an agent looks for an operator's file on storage that many nodes share.
SHARED_FILE_POLL_S: Final = 10.0
LOOKS_PER_FILE: Final = 12
FORECAST_POLL_S: Final = 60.0
# Share of the time to the job's end after which the journals are read again. Far from the end,
# nothing depends on the forecast.
FORECAST_POLL_SHARE: Final = 0.1
LIMIT_POLL_S: Final = 5.0
# Unix seconds that Slurm 23.02 and later sets for a job.
START_VARIABLE: Final = "SLURM_JOB_START_TIME"
END_VARIABLE: Final = "SLURM_JOB_END_TIME"


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to stop the attempt. `deadline` is Unix seconds, or None without a deadline."""

    source: str
    name: str
    cause: Cause
    requested_at: float
    deadline: float | None
    detail: str = ""

    def with_deadline_of(self, other: StopRequest) -> StopRequest:
        """Return this request, with its own cause, and the earlier of both deadlines."""
        known = [d for d in (self.deadline, other.deadline) if d is not None]
        return replace(self, deadline=min(known, default=None))


class StopWatch:
    """Checks for stop requests; cheap enough to call many times a second.

    Only `from_file` and `look_at_saves` use the run's storage, so they may wait for it.
    """

    def __init__(self, context: AgentContext, step_s: Callable[[], float]) -> None:
        """`step_s` returns the current duration of a step in seconds."""
        self._context = context
        self._step_s = step_s
        self._flushes = FlushLog(context.run, context.attempt)
        self._on_slurm = context.request.executor == "slurm"
        is_shared = filesystem_of(context.attempt.directory).may_be_shared
        self._file_poll_s = SHARED_FILE_POLL_S if is_shared else FILE_POLL_S
        self._file_at = self._limit_at = self._saves_at = -math.inf
        self._file: StopFile | None = None
        self._changes: tuple[int, ...] = ()
        self._looks = 0
        # The job's nodes that are drained, with the reasons.
        self.drained: Mapping[str, str] = {}
        # By how much Slurm's clock is ahead of this node's. Slurm's times are by its own clock.
        self._lead_of_slurm_s = 0.0
        self._forecast: grace.FlushForecast | None = None
        self.end_at = self._find_end(context.started_at)

    def from_signal(self, name: str, heard_at: float) -> tuple[StopRequest | None, Judgement]:
        """Return the stop request of a signal; None if it only warns of the time limit."""
        request = self._context.request
        lead_s = self._lead_of_slurm_s
        by_slurm = judge(
            name,
            job=self._job(),
            on_slurm=self._on_slurm,
            now=heard_at + lead_s,
            grace_s=request.supervision.grace_s,
            end_at=None if self.end_at is None else self.end_at + lead_s,
            warning_s=warning_lead_s(request.supervision, request.resources),
            restarts=self._context.restarts,
        )
        judgement = replace(by_slurm, deadline=by_slurm.deadline - lead_s)
        if judgement.cause is None:
            self.end_at = judgement.deadline
            return None, judgement
        stop_request = StopRequest(
            source="signal",
            name=name,
            cause=judgement.cause,
            requested_at=heard_at,
            deadline=judgement.deadline,
            detail=judgement.detail,
        )
        return stop_request, judgement

    def from_file(self, now: float) -> StopRequest | None:
        """Return an operator's `stop.json` as a stop request, once for each request in it.

        A later request may end a stop that is under way sooner.
        """
        if now - self._file_at < self._file_poll_s:
            return None
        self._file_at = now
        if self._file_poll_s == SHARED_FILE_POLL_S and not self._may_have_file():
            return None
        self._look_for_drains()
        path = self._context.attempt.stop
        try:
            asked = read_document(StopFile, path) if is_there(path) else None
        except HoldfastError as error:
            # The file cannot be read, but it does request a stop.
            asked = self._file or StopFile(
                action="stop", by="?", requested_at=now, detail=str(error)
            )
        if asked is None or asked == self._file:
            return None
        self._file = asked
        # The clock of the operator's host may differ from this one by minutes.
        deadline = None if asked.deadline_s is None else now + asked.deadline_s
        return StopRequest(
            source="stop_file",
            name=asked.action,
            cause=Cause.OPERATOR,
            requested_at=now,
            deadline=deadline,
            detail=f"{asked.action} by {asked.by}" + (f": {asked.detail}" if asked.detail else ""),
        )

    def _look_for_drains(self) -> None:
        """Read which nodes are drained. A file that cannot be read changes nothing."""
        path = self._context.attempt.drained
        if self._context.nodes_of_job > 1 and is_there(path):
            with contextlib.suppress(HoldfastError):
                found = read_document(DrainedNodes, path)
                self.drained = {} if found is None else found.hosts

    def _may_have_file(self) -> bool:
        """Return False if the attempt's folder has not changed since the last two looks.

        That costs shared storage one question. Times may be as coarse as seconds, so one equal time
        is not enough. Some file systems do not keep the time of a folder, so every
        `LOOKS_PER_FILE`-th look returns True.
        """
        self._looks += 1
        folder = self._context.attempt.directory
        fetch_attributes(folder)
        self._changes = (*self._changes[-2:], folder.stat().st_mtime_ns)
        has_changed = len(set(self._changes)) > 1 or len(self._changes) < 3
        return has_changed or self._looks % LOOKS_PER_FILE == 0

    def look_at_saves(self, now: float) -> None:
        """Update the forecast of the last flush if the job has a time limit."""
        if self.end_at is None:
            return
        wait_s = max(FORECAST_POLL_S, FORECAST_POLL_SHARE * (self.end_at - now))
        if now - self._saves_at >= wait_s:
            self._saves_at = now
            self._forecast = self._flushes.forecast()

    @staticmethod
    def from_notice(notice: Notice, host: str, now: float) -> StopRequest:
        """Return the stop request for a cloud's notice that it will take `host` away."""
        return StopRequest(
            source="notice",
            name=f"{notice.cloud} on {host}",
            cause=Cause.PREEMPTION,
            requested_at=now,
            deadline=notice.deadline,
            detail=notice.detail,
        )

    def from_limit(self, now: float) -> StopRequest | None:
        """Return the attempt's own stop before its time is up, early enough for the last flush."""
        if self.end_at is None or now - self._limit_at < LIMIT_POLL_S:
            return None
        self._limit_at = now
        lead_s = self._lead_s()
        if now < self.end_at - lead_s:
            return None
        # Limits can change while a job runs, so check again when it matters.
        self.end_at = self._find_end(self._context.started_at, known=self.end_at)
        if self.end_at is None or now < self.end_at - lead_s:
            return None
        return StopRequest(
            source="time_limit",
            name="time limit",
            cause=Cause.TIME_LIMIT,
            requested_at=now,
            deadline=self.end_at,
            detail=f"the job's time is up in {self.end_at - now:.0f} s, and the last flush must "
            f"start {lead_s:.0f} s before that",
        )

    def _lead_s(self) -> float:
        """Return how many seconds before the end the stop starts."""
        grace_s = self._context.request.supervision.grace_s
        lead_s = grace.stop_lead_s(self._forecast, grace_s=grace_s, step_s=self._step_s())
        return lead_s + LIMIT_POLL_S

    def _find_end(self, started_at: float, known: float | None = None) -> float | None:
        """Return when the job's time is up (Unix seconds), or None without a limit.

        A container may have no `scontrol`. Then the end is the one that Slurm set at the job's
        start, or else follows from the requested limit.
        """
        if (job := self._job()) is not None:
            end_at = slurm_client.parse_time(job.get("EndTime", ""))
            with contextlib.suppress(SchedulerError):
                self._lead_of_slurm_s = slurm_lead_s()
            return None if end_at is None else end_at - self._lead_of_slurm_s
        if known is not None:
            return known
        if self._on_slurm and (end := os.environ.get(END_VARIABLE, "")).isdecimal():
            return float(end)
        limit = self._context.request.resources.time_limit_min
        began = os.environ.get(START_VARIABLE, "") if self._on_slurm else ""
        first = float(began) if began.isdecimal() else started_at
        return first + 60.0 * limit if limit else None

    def _job(self) -> Mapping[str, str] | None:
        """Return Slurm's current fields of this job; None off Slurm or without a timely answer."""
        if not self._on_slurm:
            return None
        try:
            line = slurm_client.show_job(self._context.job_id, slurm_client.call_briefly)
        except SchedulerError:
            return None
        return line.fields if line else None
