"""The events of the journals, from `event_book`."""

from __future__ import annotations

from holdfast.contracts.disk.journal import EventKind, needed_facts
from holdfast.flows.prefect_events import NAMES, PREFIX
from holdfast_docs.event_book import EVENTS, EventEntry
from holdfast_docs.markdown import code, section, sentence, table


def render() -> str:
    """A list of all kinds of events, then a section with the fields of each."""
    rows = [
        (f"[{code(kind)}](#{anchor(kind)})", entry.writer, sentence(entry.meaning))
        for kind, entry in EVENTS.items()
    ]
    parts = [table(("event", "written by", "meaning"), rows)]
    return "\n".join([*parts, *(_section(kind, entry) for kind, entry in EVENTS.items())])


def anchor(kind: str) -> str:
    """The name of an event's section, as a target of links."""
    return f"event-{kind.replace('_', '-')}"


def _prefect_name(kind: EventKind) -> str:
    """A sentence with the name of the Prefect event for a line; empty without one."""
    return f" In Prefect: {code(f'{PREFIX}.{NAMES[kind]}')}." if kind in NAMES else ""


def _section(kind: EventKind, entry: EventEntry) -> str:
    needed = needed_facts(kind)
    rows = [
        (code(name), one.type, "yes" if name in needed else "no", sentence(one.meaning))
        for name, one in entry.described.items()
    ]
    return section(
        2,
        code(kind),
        f"{sentence(entry.meaning)} Written by the {entry.writer}.{_prefect_name(kind)}",
        table(("field", "type", "always there", "meaning"), rows),
        anchor=anchor(kind),
    )
