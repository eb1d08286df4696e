"""Alerts about ranks, nodes and saves, computed from the journal. Pure functions."""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.contracts.disk.journal import Event, EventKind

SHOWN_MAX: Final = 8
FAILED_SAVES_MAX: Final = 10
# The kinds of journal lines that this module reads.
KINDS: Final = (
    EventKind.SAVE_FAILED,
    EventKind.HANG_SUSPECTED,
    EventKind.HANG_CLEARED,
    EventKind.HANG_CONFIRMED,
    EventKind.STRAGGLER,
    EventKind.NODE_SILENT,
    EventKind.NODE_SLOW,
    EventKind.LINK_SLOW,
    EventKind.NODE_UNHEALTHY,
    EventKind.LIMIT_PASSED,
    EventKind.METRIC_MISSING,
    EventKind.NUMERICS,
    EventKind.ROLLED_BACK,
    EventKind.LAUNCH_STARTED,
    EventKind.LAUNCH_ENDED,
)
_WITH_TEXT: Final = frozenset(
    {
        *(EventKind.LIMIT_PASSED, EventKind.METRIC_MISSING),
        *(EventKind.NODE_SLOW, EventKind.LINK_SLOW),
    }
)


def noticed(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the newest `SHOWN_MAX` alerts, oldest first.

    Alerts are hangs, slow ranks and links, slow, silent or unhealthy nodes, bad losses, restarts in
    place, blamed checkpoints, limits of the spec that were passed, and metrics of the spec that the
    program does not log.
    Repeated silences of the same ranks count as one alert, the last one.

    Each has `kind`, `attempt`, `at` (Unix seconds), `text` and `dumps` (paths in the run's folder).
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    crashed: dict[Any, dict[str, Any]] = {}
    for event in events:
        text = _alert_text(event) or _restart_text(event, crashed)
        if text:
            facts = event.data
            dumps = list(facts.get("dumps", ()))
            # A confirmed hang has the dumps of the suspected one and replaces it.
            key = (facts.get("attempt"), *(dumps or (event.kind, event.time, text)))
            if event.kind is EventKind.METRIC_MISSING:
                # Each launch reports it again, until the program logs the metric.
                key = (event.kind, str(facts["key"]), str(facts["metric"]))
            # Removed first, so that a repeated alert moves to the end: the newest ones are shown.
            found.pop(key, None)
            found[key] = {
                "kind": str(event.kind),
                "attempt": facts.get("attempt"),
                "at": event.time,
                "text": text,
                "dumps": dumps,
            }
    return list(found.values())[-SHOWN_MAX:]


def failed_saves(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the last `FAILED_SAVES_MAX` failed saves with their errors; `at` is Unix seconds."""
    found = {
        str(event.data["checkpoint"]): {
            "checkpoint": event.data["checkpoint"],
            "step": event.data["step"],
            "error": event.data["error"],
            "at": event.time,
        }
        for event in events
        if event.kind is EventKind.SAVE_FAILED
    }
    return list(found.values())[-FAILED_SAVES_MAX:]


def crashes(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the rank that failed first in each crashed launch, oldest first.

    Each has `attempt`, `launch`, `rank`, `host`, `signal` (a name such as SIGKILL, or None) and
    `exit_code`, which is None for a rank that a signal killed.
    """
    return [
        {"attempt": facts["attempt"], "launch": facts["launch"], **first}
        for event in events
        if event.kind is EventKind.LAUNCH_ENDED
        and (first := _first_failure(facts := event.data)) is not None
        and isinstance(facts.get("attempt"), int)
        and isinstance(facts.get("launch"), int)
    ]


def _first_failure(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rank that failed first in a launch, or None if the line does not name it."""
    rank, code = facts.get("rank"), facts.get("rank_exit_code")
    if not isinstance(rank, int) or type(code) is not int:
        return None
    signal = signal_name(-code) if code < 0 else None
    exit_code = code if code >= 0 else None
    return {"rank": rank, "host": facts.get("host"), "signal": signal, "exit_code": exit_code}


def signal_name(number: int) -> str:
    """Return `signal 9 (SIGKILL)`, or only `signal 99` for one without a name."""
    try:
        return f"signal {number} ({signals.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _first_failure_text(facts: Mapping[str, Any]) -> str:
    """Return ` (rank 1 on host-a: killed by signal 9 (SIGKILL))`, or ''."""
    first = _first_failure(facts)
    if first is None:
        return ""
    on = f" on {first['host']}" if first["host"] else ""
    how = f"killed by {first['signal']}" if first["signal"] else f"exit status {first['exit_code']}"
    return f" (rank {first['rank']}{on}: {how})"


def _restart_text(event: Event, crashed: dict[Any, dict[str, Any]]) -> str:
    """Return the text for another launch after a crash or a drain, else an empty string.

    `crashed` maps each attempt to the last launch that ended so. The function updates it.
    """
    facts = event.data
    if event.kind is EventKind.LAUNCH_ENDED and facts.get("ending") in {"crashed", "drained"}:
        crashed[facts.get("attempt")] = facts
    before = None
    if event.kind is EventKind.LAUNCH_STARTED:
        before = crashed.pop(facts.get("attempt"), None)
    if before is None:
        return ""
    step = before.get("last_step")
    at = "" if step is None else f" at step {step}"
    what = "was restarted in place"
    keys = ("lost", "joined", "drained")
    lost, joined, drained = (", ".join(map(str, facts.get(key) or ())) for key in keys)
    on = f"with {joined}" if joined else f"on {facts.get('nodes')} nodes"
    if drained:
        which = facts.get("reason") or drained
        kind = "slow" if facts.get("slow") == facts.get("drained") else "drained"
        besides = f", without {lost}" if lost else ""
        left = f"launch {before.get('launch')} left {kind} nodes{at}: {which}"
        return f"{left}; it continued {on}{besides}"
    if facts.get("way"):
        what = f"continued {on}, without {lost}"
    return f"launch {before.get('launch')} crashed{at}{_first_failure_text(before)} and {what}"


def _alert_text(event: Event) -> str:
    facts = event.data
    if event.kind is EventKind.HANG_SUSPECTED:
        return f"silent ranks were examined: {facts['finding']}"
    if event.kind is EventKind.HANG_CONFIRMED:
        return f"hung and ended: {facts['finding']}"
    if event.kind is EventKind.STRAGGLER:
        own, peers = _duration(facts["own_s"]), _duration(facts["peers_s"])
        return f"rank {facts['rank']} is slow: {own} of compute per step, its peers {peers}"
    if event.kind is EventKind.NODE_SILENT:
        state = "heartbeats stopped" if facts["silent"] else "heartbeats resumed"
        return f"{state}: {', '.join(facts['nodes'])}"
    if event.kind is EventKind.NODE_UNHEALTHY:
        return f"{facts['host']} is unhealthy: {facts['check']}: {facts.get('detail', '')}"
    if event.kind in _WITH_TEXT:
        return str(facts["text"])
    if event.kind is EventKind.NUMERICS:
        return f"{facts['action']}: {facts['reason']}"
    if event.kind is EventKind.ROLLED_BACK and facts.get("crash"):
        return str(facts.get("reason"))
    return ""


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def text_of(event: Event) -> str:
    """Return a readable sentence about a journal line, as in a notification."""
    facts = event.data
    where = f"attempt {facts['attempt']}: " if facts.get("attempt") else ""
    if event.kind is EventKind.RUN_ENDED:
        return f"the run {facts.get('state')}: {facts.get('reason', '')}"
    if event.kind is EventKind.ATTEMPT_ENDED:
        step, saved = facts.get("last_step"), facts.get("committed_step")
        return f"{where}{facts['state']} after step {step}; step {saved} is committed"
    if event.kind is EventKind.NODE_LOST:
        return f"{where}node {facts['host']} was lost: {facts.get('detail', '')}"
    if event.kind is EventKind.VERIFIED:
        return f"{facts.get('checkpoint')} is damaged: {', '.join(facts.get('damaged', ()))}"
    if event.kind in {EventKind.SAVE_FAILED, EventKind.MIRROR_FAILED}:
        what = "saved" if event.kind is EventKind.SAVE_FAILED else "copied to the mirror"
        return f"{where}{facts.get('checkpoint')} was not {what}: {facts.get('error', '')}"
    if event.kind is EventKind.DECISION:
        return f"{facts['action']}: {facts.get('reason', '')}"
    if event.kind is EventKind.ROLLED_BACK:
        return f"{where}back to {facts.get('to')}: {facts.get('reason', '')}"
    return f"{where}{_alert_text(event)}"
