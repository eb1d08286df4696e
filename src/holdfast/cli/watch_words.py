"""What the watches over ranks and nodes noticed, from the journal, for `holdfast show`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from holdfast.contracts.journal import Event, EventKind

SHOWN_MAX: Final = 8


def noticed(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The newest `SHOWN_MAX` hangs, slow ranks, silent nodes, bad losses; of silences the last.

    Each has `kind`, `attempt`, `at` (Unix seconds), `text` and `dumps` (paths in the run's folder).
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        words = _words(event)
        if words:
            facts = event.data
            dumps = list(facts.get("dumps", ()))
            # A silence that proved to be a hang is told as that alone.
            key = (facts.get("attempt"), *(dumps or (event.kind, event.time, words)))
            found.pop(key, None)
            found[key] = {
                "kind": event.kind.value,
                "attempt": facts.get("attempt"),
                "at": event.time,
                "text": words,
                "dumps": dumps,
            }
    return list(found.values())[-SHOWN_MAX:]


def _words(event: Event) -> str:
    facts = event.data
    if event.kind is EventKind.HANG_SUSPECTED:
        return f"silent ranks were looked into: {facts['finding']}"
    if event.kind is EventKind.HANG_CONFIRMED:
        return f"hung and ended: {facts['finding']}"
    if event.kind is EventKind.STRAGGLER:
        slow = f"rank {facts['rank']} is slow: {facts['own_s']:.3g} s of its own in a step"
        return f"{slow}, its peers {facts['peers_s']:.3g} s"
    if event.kind is EventKind.NODE_SILENT:
        state = "no heartbeat any more" if facts["silent"] else "heartbeats again"
        return f"{state}: {', '.join(facts['nodes'])}"
    if event.kind is EventKind.NUMERICS:
        return f"{facts['action']}: {facts['reason']}"
    return ""
