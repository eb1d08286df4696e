"""A short summary of a run, for the flow's result, its log and `--wait`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.redaction import redact_text
from holdfast.contracts.spec.secrets import known_secrets
from holdfast.contracts.states import RunState
from holdfast.flows.supervisor.redactor import Log
from holdfast.workers.nodes.heartbeats import NodeBeat, newest_step, read_heartbeats, trained_step

# A run's progress in one line, from its history and its agents' heartbeats.

PROGRESS_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """One line of text, and a `key` that changes with everything but the step."""

    text: str
    key: tuple[object, ...]


def recorded_progress(history: RunHistory) -> tuple[object, ...]:
    """Return a value that changes with the run's recorded progress. Reads no heartbeats."""
    last = history.last_attempt
    if last is None or last.state.is_terminal:
        return history.state, last.number if last else 0
    return last.number, last.state, history.tally.newest_step


def describe_progress(history: RunHistory) -> ProgressLine:
    """Return the run's progress. Reads the heartbeats of a live attempt."""
    name, last, key = history.paths.name, history.last_attempt, recorded_progress(history)
    if last is None or last.state.is_terminal:
        ending = f" after attempt {last.number} ({_ending(last)})" if last else ""
        return ProgressLine(text=f"{name}: {history.state}{ending}", key=key)
    beats = read_heartbeats(history.paths.attempt(last.number))
    step, phase, committed = newest_step(beats), _common_phase(beats), history.tally.newest_step
    parts = [f"{name}: attempt {last.number} {last.state}"]
    # An attempt that was just created has no request yet.
    if last.gpus:
        parts.append(counted(last.gpus, "GPU"))
    if step is not None:
        parts.append(f"step {step}")
    if phase:
        parts.append(phase)
    if committed is not None:
        parts.append(f"committed {committed}")
    return ProgressLine(text=", ".join(parts), key=(*key, phase))


class ProgressLog:
    """Logs a run's progress if more is recorded or `PROGRESS_S` have passed.

    Only then are the heartbeats read, which takes a while with thousands of ranks.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._shown: tuple[object, ...] | None = None
        self._shown_at = 0.0

    def show(self, history: RunHistory) -> None:
        """Log the progress, if it is time."""
        recorded, now = recorded_progress(history), time.monotonic()
        if recorded != self._shown or now - self._shown_at >= PROGRESS_S:
            self._log.info("%s", describe_progress(history).text)
            self._shown, self._shown_at = recorded, now


def _common_phase(beats: list[NodeBeat]) -> str:
    phases = Counter(rank.phase.lower() for beat in beats for rank in beat.ranks)
    return phases.most_common(1)[0][0] if phases else ""


def _ending(attempt: AttemptView) -> str:
    return f"{attempt.state}, {attempt.cause}" if attempt.cause else attempt.state.value


HEADINGS = ("attempt", "state", "cause", "GPUs", "steps", "resumed from", "job")


def summarize(history: RunHistory, reason: str) -> dict[str, Any]:
    """Return the run's state, its attempts and its steps.

    `step` means the same as in `holdfast runs`: the newest committed one, or the last one of a run
    that is completed.
    """
    committed, trained = history.committed_step, trained_step(history)
    last = trained if history.state is RunState.COMPLETED else None
    steps = [step for step in (committed, last) if step is not None]
    return {
        "run": history.paths.name,
        "uid": history.record.uid,
        "directory": str(history.paths.directory),
        "state": history.state.value,
        "reason": reason,
        "step": max(steps, default=None),
        "committed_step": committed,
        "trained_step": trained,
        "attempts": [_facts(attempt) for attempt in history.attempts],
    }


def _facts(attempt: AttemptView) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "state": attempt.state.value,
        "cause": attempt.cause.value if attempt.cause else None,
        "world_size": attempt.world_size,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "resumed_from": attempt.resumed_from,
        "job_id": attempt.job_id,
    }


def end_reason(history: RunHistory) -> str:
    """Return the reason of the last decision and the last attempt's cause, without secrets."""
    last = history.last_attempt
    decision = history.last_decision
    reason = str(decision["reason"]) if decision else history.state.value
    reason = redact_text(reason, known_secrets(history.record.spec, history.paths))
    if history.state is RunState.COMPLETED or last is None or last.cause is None:
        return reason
    return f"{reason} (attempt {last.number} ended {last.state}, cause {last.cause})"


def log_end(history: RunHistory, log: Log) -> None:
    for line in _table_of_attempts(history):
        log.info("%s", line)
    last = history.last_attempt
    if last is not None and last.traceback and not history.state.is_live:
        rank = last.outcome.failed_rank if last.outcome else None
        which = "" if rank is None else f" ({rank})"
        log.error("the first failing rank%s:\n%s", which, last.traceback)
    log.info("%s %s: %s", history.paths.name, history.state, end_reason(history))


def _table_of_attempts(history: RunHistory) -> list[str]:
    """Return the attempts as the lines of a table, with a heading."""
    rows = [HEADINGS, *(cells(attempt) for attempt in history.attempts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def cells(attempt: AttemptView) -> tuple[str, ...]:
    """Return an attempt in the columns of `HEADINGS`."""
    return (
        str(attempt.number),
        attempt.state.value,
        attempt.cause.value if attempt.cause else "-",
        str(attempt.gpus),
        f"{_or_dash(attempt.first_step)}–{_or_dash(attempt.last_step)}",
        attempt.resumed_from or "-",
        attempt.job_id or "-",
    )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
