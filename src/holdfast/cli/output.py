"""What the command prints: JSON for programs, tables for people, errors on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from holdfast.contracts.errors import (
    CheckpointError,
    HoldfastError,
    RunFailedError,
    SchedulerError,
    UnreadableRunError,
)
from holdfast.contracts.plain_text import plain, plain_line

AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON on standard output.")]
RootOption = Annotated[
    str | None,
    typer.Option("--root", help="Where runs live; $HOLDFAST_ROOT unless given.", metavar="DIR"),
]
# These say that the thing asked about is bad; every other error says that the call is.
_BAD_THINGS: Final = (CheckpointError, RunFailedError, SchedulerError, UnreadableRunError)
# JSON itself escapes the control characters of ASCII, and no others.
_UNSAFE_IN_JSON: Final = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def exit_status(error: HoldfastError) -> int:
    """1 when the thing asked about is bad or failed, 2 when the call could not be served."""
    return 1 if isinstance(error, _BAD_THINGS) else 2


def print_error(error: HoldfastError) -> None:
    """The error in its own words, with each of its problems that it does not yet spell out."""
    text = str(error)
    told = [line for line in getattr(error, "problems", ()) if line not in text]
    warn("\n  ".join([f"holdfast: {text}", *told]))


def warn(text: str) -> None:
    """A line for people, on standard error so that JSON stays alone on standard output."""
    print(plain(text), file=sys.stderr, flush=True)


def say(text: object) -> None:
    """A line for people on standard output; what files say cannot steer the terminal."""
    typer.echo(plain(text))


def plain_values(data: Any) -> Any:
    """`data` with every text in it in one line and without control characters."""
    if isinstance(data, Mapping):
        return {key: plain_values(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain_values(value) for value in data]
    return plain_line(data) if isinstance(data, str) else data


def answer(data: Any, as_json: bool, render: Callable[[Any], None]) -> None:
    """Print `data`: as JSON when asked for it, else as `render` shows it."""
    if as_json:
        text = json.dumps(data, indent=1, ensure_ascii=False, default=str)
        typer.echo(_UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text))
    else:
        render(data)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """A table as wide as it needs; in a pipe no cell is cut or folded."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*(plain_line(cell_text(cell)) for cell in row))
    width = None if sys.stdout.isatty() else 10_000
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """One `name  value` line for each fact that there is."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if value is not None and value != "":
            say(f"{name.ljust(width)}  {cell_text(value)}")


def cell_text(value: object) -> str:
    """A value for people: `-` for nothing, yes and no for truth, lists with commas."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def bytes_text(count: int | None) -> str:
    """A number of bytes in the largest unit that leaves it at 1 or more."""
    if count is None:
        return "-"
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def seconds_text(seconds: float | None) -> str:
    """A duration for people: whole seconds from a minute on, milliseconds below one second."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def time_text(moment: str | float | None) -> str:
    """An ISO-8601 text or Unix seconds as local date and time."""
    if moment is None or moment == "":
        return "-"
    when = (
        datetime.fromisoformat(moment)
        if isinstance(moment, str)
        else datetime.fromtimestamp(moment, UTC)
    )
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")
