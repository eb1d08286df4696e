"""A short summary of a run, for the flow's result, its log and `--wait`."""

from __future__ import annotations

from typing import Any

from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.redaction import redact_text
from holdfast.contracts.spec.secrets import known_secrets
from holdfast.contracts.states import RunState
from holdfast.workers.nodes.heartbeats import trained_step

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


def table_of_attempts(history: RunHistory) -> list[str]:
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
