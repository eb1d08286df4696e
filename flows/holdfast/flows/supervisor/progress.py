"""A run's progress in one line, from its history and its agents' heartbeats."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.flows.supervisor.redactor import Log
from holdfast.workers.nodes.heartbeats import NodeBeat, newest_step, read_heartbeats

PROGRESS_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One line of text, and a `key` that changes with everything but the step."""

    text: str
    key: tuple[object, ...]


def recorded_progress(history: RunHistory) -> tuple[object, ...]:
    """Return a value that changes with the run's recorded progress. Reads no heartbeats."""
    last = history.last_attempt
    if last is None or last.state.is_terminal:
        return history.state, last.number if last else 0
    return last.number, last.state, _committed_step(history)


def describe_progress(history: RunHistory) -> Progress:
    """Return the run's progress. Reads the heartbeats of a live attempt."""
    name, last, key = history.paths.name, history.last_attempt, recorded_progress(history)
    if last is None or last.state.is_terminal:
        ending = f" after attempt {last.number} ({_ending(last)})" if last else ""
        return Progress(text=f"{name}: {history.state}{ending}", key=key)
    beats = read_heartbeats(history.paths.attempt(last.number))
    step, phase, committed = newest_step(beats), _common_phase(beats), _committed_step(history)
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
    return Progress(text=", ".join(parts), key=(*key, phase))


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
    """Return the phase that most ranks are in, in lower case."""
    phases = Counter(rank.phase.lower() for beat in beats for rank in beat.ranks)
    return phases.most_common(1)[0][0] if phases else ""


def _committed_step(history: RunHistory) -> int | None:
    """Return the newest step that the journal records as committed."""
    return history.tally.newest_step


def _ending(attempt: AttemptView) -> str:
    return f"{attempt.state}, {attempt.cause}" if attempt.cause else attempt.state.value
