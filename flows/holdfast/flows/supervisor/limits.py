"""The limits of `alerts` in a run's spec: whether the run has passed them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.account.timeline import goodput_of
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.states import AttemptState
from holdfast.flows.supervisor.redactor import Log

# The account of a run with a thousand attempts takes a while.
LOOK_S: Final = 30.0
# Earlier, the start of the first attempt is most of the run's time.
ETTR_AFTER_S: Final = 3600.0
GPU_HOURS_SHARE: Final = 0.9


@dataclass(frozen=True)
class PassedLimit:
    """One limit, by its key in `alerts`. `text` is for people."""

    limit: str
    passed: bool
    value: float
    text: str


class LimitWatch:
    """Journals when a run passes a limit, and when it is within it again."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._look_at = 0.0

    def look(self, history: RunHistory, journal: JournalWriter) -> None:
        """Compare the run with its limits, every `LOOK_S` seconds."""
        given, now = history.spec.alerts, time.monotonic()
        limits = (given.ettr_min, given.checkpoint_age_max_min, given.gpu_hours_max)
        if limits == (None, None, None) or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        last = history.last_attempt
        for finding in new_findings(history, time.time()):
            journal.append(
                EventKind.LIMIT_PASSED,
                attempt=last.number if last else None,
                limit=finding.limit,
                passed=finding.passed,
                value=finding.value,
                text=finding.text,
            )
            self._log.warning("%s", finding.text)


def new_findings(history: RunHistory, now: float) -> list[PassedLimit]:
    """Return the limits whose state differs from what the journal says."""
    said = {
        event.data["limit"]: event.data["passed"]
        for event in history.events
        if event.kind is EventKind.LIMIT_PASSED
    }
    return [one for one in findings(history, now) if one.passed != said.get(one.limit, False)]


def findings(history: RunHistory, now: float) -> list[PassedLimit]:
    """Return a finding for each limit of the spec that can be judged at `now` (Unix seconds)."""
    given, found = history.spec.alerts, []
    if given.ettr_min is not None or given.gpu_hours_max is not None:
        goodput = goodput_of(history, until=now)
        if given.ettr_min is not None and goodput.total_s >= ETTR_AFTER_S:
            text = f"productive share of the time (ETTR): {goodput.ettr:.1%}"
            passed = goodput.ettr < given.ettr_min
            found.append(PassedLimit("ettr_min", passed, goodput.ettr, text))
        if given.gpu_hours_max is not None:
            hours = goodput.gpu_hours
            text = f"GPU hours: {hours:,.1f} of {given.gpu_hours_max:,.1f}"
            passed = hours >= GPU_HOURS_SHARE * given.gpu_hours_max
            found.append(PassedLimit("gpu_hours_max", passed, hours, text))
    age_s = _checkpoint_age_s(history, now)
    if given.checkpoint_age_max_min is not None and age_s is not None:
        minutes = age_s / 60.0
        text = f"training since the newest checkpoint: {minutes:.1f} min"
        passed = minutes > given.checkpoint_age_max_min
        found.append(PassedLimit("checkpoint_age_max_min", passed, minutes, text))
    return found


def _checkpoint_age_s(history: RunHistory, now: float) -> float | None:
    """Return how long the running attempt has trained without a commit; None if it does not."""
    last = history.last_attempt
    if last is None or last.state is not AttemptState.RUNNING:
        return None
    times = [
        event.time
        for event in history.events
        if event.kind is EventKind.RESUMED and event.data.get("attempt") == last.number
    ]
    if last.number in history.tally.commits:
        times.append(history.tally.commits[last.number].newest_at)
    return now - max(times) if times else None
