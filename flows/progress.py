"""A run's progress in one line, from its history and its agents' heartbeats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.contracts.history import AttemptView, RunHistory
from holdfast.contracts.journal import EventKind
from holdfast.workers.heartbeats import NodeBeat, newest_step, read_heartbeats


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One line of text, and a `key` that changes with everything but the step."""

    text: str
    key: tuple[object, ...]
    step: int | None = None


def describe_progress(history: RunHistory) -> Progress:
    """Return the run's progress. Reads the heartbeats of a live attempt."""
    name, last = history.paths.name, history.last_attempt
    if last is None or last.state.is_terminal:
        number = last.number if last else 0
        text = f"{name}: {history.state}"
        if last is not None:
            text += f" after attempt {last.number} ({_ending(last)})"
        return Progress(text=text, key=(history.state, number))
    beats = read_heartbeats(history.paths.attempt(last.number))
    return _of_attempt(history, last, beats)


def _of_attempt(history: RunHistory, last: AttemptView, beats: list[NodeBeat]) -> Progress:
    step, phase = newest_step(beats), _common_phase(beats)
    committed = _committed_step(history)
    parts = [f"{history.paths.name}: attempt {last.number} {last.state}"]
    # An attempt that was just created has no request yet.
    if last.world_size:
        parts.append(f"{last.world_size} GPUs")
    if step is not None:
        parts.append(f"step {step}")
    if phase:
        parts.append(phase)
    if committed is not None:
        parts.append(f"committed {committed}")
    key = (last.number, last.state, phase, committed)
    return Progress(text=", ".join(parts), key=key, step=step)


def _common_phase(beats: list[NodeBeat]) -> str:
    """Return the phase that most ranks are in, in lower case."""
    phases = Counter(rank.phase.lower() for beat in beats for rank in beat.ranks)
    return phases.most_common(1)[0][0] if phases else ""


def _committed_step(history: RunHistory) -> int | None:
    """Return the newest step that the journal records as committed."""
    steps = [e.data.get("step") for e in history.events if e.kind is EventKind.COMMITTED]
    return max((step for step in steps if step is not None), default=None)


def _ending(attempt: AttemptView) -> str:
    return f"{attempt.state}, {attempt.cause}" if attempt.cause else attempt.state.value
