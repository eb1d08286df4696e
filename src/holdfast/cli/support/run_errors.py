"""Why a run failed, as `holdfast show --errors` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.api.errors import models
from holdfast.api.errors.show import read_errors
from holdfast.cli.shared import index, output
from holdfast.cli.views import refreshed_directory
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import reading_run
from holdfast.contracts.node.flight import span_text
from holdfast.contracts.plain_text import counted

if TYPE_CHECKING:
    from holdfast.lineage.database.transactions import Database

FRAMES_SHOWN = 6


def errors_of(run: str, attempt: int | None, root: str | None) -> models.RunErrors:
    """Return why an attempt failed, by default the newest of the run that has errors.

    Raises `NotFoundError` if the run has no such attempt.
    """
    from holdfast.lineage.queries import pages, run_queries

    def read(database: Database) -> models.RunErrors:
        directory = refreshed_directory(run, root, database)

        def saved() -> Iterable[Mapping[str, Any]]:
            return pages.list_checkpoints(database, directory, newest_first=True).items

        with reading_run(directory):
            paths = RunPaths(Path(directory))
            view = run_queries.show_run(database, directory)
            events_of = partial(pages.newest_events, database, directory)
            return read_errors(
                paths, view, events_of, saved, index.secrets_in(paths), attempt=attempt
            )

    return index.read_index(read)


def print_errors(found: models.RunErrors) -> None:
    """Print the errors of an attempt in order, its stacks, and what differs."""
    if found.attempt is None:
        output.say(f"run {found.run}: no attempt has errors")
        return
    one = next((one for one in found.attempts if one.number == found.attempt), None)
    cause = f", cause {one.cause}" if one and one.cause else ""
    state = f"{one.state}{cause}" if one else "no launch of it crashed or hung"
    output.say(f"run {found.run}, attempt {found.attempt}: {state}")
    if others := [each.number for each in found.attempts if each is not one]:
        numbers = span_text(others)
        output.say(f"with errors too: attempt {numbers}; `--attempt N` shows another one")
    for entry in found.entries:
        _print_entry(entry)
    if found.left_out:
        output.say(f"{counted(found.left_out, 'more error')}: see --json or the web UI")
    if found.unread:
        output.say(f"{counted(found.unread, 'file')} could not be read in time")
    if found.order_note:
        output.say(found.order_note)
    for dump in found.stacks:
        _print_dump(dump)
    if found.difference is not None:
        _print_difference(found.difference)


def _print_entry(entry: models.ErrorEntry) -> None:
    """Print an error, with its traceback unless it only reports another one."""
    at = output.time_text(entry.at) if entry.at else "-"
    where = f"launch {entry.launch}" if entry.launch is not None else "no launch"
    mark = "first cause: " if entry.is_first else ""
    output.say(f"{at}  {where}  {mark}{entry.text}")
    if entry.file:
        output.say(f"    {entry.file}")
    if entry.traceback and not entry.is_secondary:
        for line in entry.traceback.rstrip().splitlines():
            output.say(f"    {line}")


def _print_dump(dump: models.StackDump) -> None:
    output.say(f"hang {dump.number}, {dump.state}: {dump.finding}")
    if dump.flight_finding and dump.flight_finding not in dump.finding:
        output.say(f"    by the flight records, {dump.flight_finding}")
    for group in dump.groups:
        who = f"rank {group.ranks}" if group.ranks_count == 1 else f"ranks {group.ranks}"
        does = "wait" if group.waits else "do not wait"
        said = group.problem or ", in ".join(group.frames[:FRAMES_SHOWN])
        output.say(f"    {who} ({does}{', unlike most' if group.is_odd else ''}): {said}")


def _print_difference(found: models.LaunchDifference) -> None:
    if found.worked is None:
        output.say(f"{_name(found.failed)}: {found.reached}; no earlier launch finished a new step")
        return
    rows = [(one.name, one.before, one.now) for one in found.facts]
    differs = "" if rows else "; nothing that is recorded differs from it"
    output.say(
        f"{_name(found.failed)}: {found.reached}; the last that worked is {_name(found.worked)}"
        + differs
    )
    if rows:
        output.print_table(("differs", _name(found.worked), _name(found.failed)), rows)
    if found.left_out:
        output.say(f"{counted(found.left_out, 'more fact')} differ")


def _name(launch: models.LaunchName) -> str:
    attempt = f"attempt {launch.attempt}"
    return attempt if launch.number is None else f"{attempt}, launch {launch.number}"
