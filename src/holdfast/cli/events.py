"""`holdfast events RUN`: print a run's journal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import typer

from holdfast.cli.shared.arguments import RunArgument, SinceOption
from holdfast.cli.shared.index import locate_run, look_at, secrets_in
from holdfast.cli.shared.output import AsJson, RootOption, answer, say, time_text
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records.history import load_events
from holdfast.contracts.redaction import redact

POLL_S: Final = 1.0


def events(
    run: RunArgument,
    kinds: Annotated[
        list[EventKind] | None, typer.Option("--kind", help="Print this kind only. Repeatable.")
    ] = None,
    since: SinceOption = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Print the last N events only.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events until the run has ended.")
    ] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="First send to Prefect the events it does not have.")
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Print the events in a run's journal, oldest first.

    With --json, print a list; with --json and --follow, print one JSON object per line.
    """
    paths = locate_run(run, root)
    if publish:
        from holdfast.flows.prefect_events import publish as send

        send(paths)
    secrets = secrets_in(paths)
    chosen = _Chosen(set(kinds or ()), since)
    found = chosen.new_of(paths)
    found = found if tail is None else found[len(found) - min(tail, len(found)) :]
    if not follow:
        answer([_facts(one, secrets) for one in found], as_json, _render)
        return
    while True:
        is_live = look_at(paths).state.is_live
        found = [*found, *chosen.new_of(paths)]
        for one in found:
            facts = _facts(one, secrets)
            answer(facts, as_json, lambda one: _render([one]), indent=None)
        if not is_live:
            return
        found = []
        time.sleep(POLL_S)


class _Chosen:
    """Selects events, and returns each of them once."""

    def __init__(self, kinds: set[EventKind], since: float | None) -> None:
        self._kinds, self._since = kinds, since
        self._seen: set[tuple[str, int, int]] = set()

    def new_of(self, paths: RunPaths) -> list[Event]:
        """Return the chosen events of the run that no earlier call returned, oldest first."""
        found = [one for one in load_events(paths) if self._is_chosen(one)]
        new = [one for one in found if _key(one) not in self._seen]
        self._seen.update(map(_key, new))
        return new

    def _is_chosen(self, event: Event) -> bool:
        is_kind = not self._kinds or event.kind in self._kinds
        return is_kind and (self._since is None or event.time >= self._since)


def _key(event: Event) -> tuple[str, int, int]:
    return event.writer, event.opening, event.sequence


def _facts(event: Event, secrets: Sequence[str]) -> dict[str, Any]:
    return {
        "time": event.time,
        "kind": str(event.kind),
        "writer": event.writer,
        "data": redact(event.data, secrets),
    }


def _render(found: Iterable[dict[str, Any]]) -> None:
    for one in found:
        data = ", ".join(f"{key} {_text(value)}" for key, value in one["data"].items())
        say(plain_line(f"{time_text(one['time'])}  {one['kind']:20}  {data}"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
