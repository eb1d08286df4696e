"""Output of the command: JSON for programs, tables for people, errors on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from typer.exceptions import TyperException

from holdfast.cli import exit_status as status
from holdfast.contracts.errors import (
    CheckpointError,
    HoldfastError,
    LineageError,
    MirrorError,
    NotFoundError,
    OrdersChangedError,
    PreflightError,
    RequestConflictError,
    RunConflictError,
    RunFailedError,
    SchedulerError,
    SchedulerUnavailableError,
    SecretError,
    ServiceError,
    UnreadableRunError,
)
from holdfast.contracts.plain_text import plain, plain_line

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        help="The folder that contains the runs. Default: $HOLDFAST_ROOT, else ~/.holdfast/runs.",
        metavar="DIR",
    ),
]
# The first entry that contains an error's class decides. Every other error is of the call.
_STATUSES: Final[tuple[tuple[int, tuple[type[HoldfastError], ...]], ...]] = (
    (status.NOT_FOUND, (NotFoundError,)),
    (
        status.UNAVAILABLE,
        (LineageError, MirrorError, SchedulerUnavailableError, SecretError, ServiceError),
    ),
    (
        status.REFUSED,
        (
            OrdersChangedError,
            PreflightError,
            RequestConflictError,
            RunConflictError,
            SchedulerError,
        ),
    ),
    (status.FAILED, (CheckpointError, RunFailedError, UnreadableRunError)),
)
# `json.dumps` escapes only the ASCII control characters.
_UNSAFE_IN_JSON: Final = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def exit_status(error: Exception) -> int:
    """Return the exit status for an error."""
    if isinstance(error, OSError):
        return status.UNAVAILABLE
    found = (number for number, classes in _STATUSES if isinstance(error, classes))
    return next(found, status.MISUSE)


def print_error(error: Exception, *, as_json: bool = False) -> int:
    """Print an error on standard error and return its exit status.

    As text: the message, and those of the error's `problems` that it does not contain. As JSON:
    one object with the error's class, its message, its problems and the exit status.
    """
    number, problems = exit_status(error), list(getattr(error, "problems", ()))
    text = error.format_message() if isinstance(error, TyperException) else str(error)
    if as_json:
        facts = {
            "error": type(error).__name__,
            "message": text,
            "problems": problems,
            "exit_status": number,
        }
        print(to_json_text(facts), file=sys.stderr, flush=True)
    else:
        details = [line for line in problems if line not in text]
        warn("\n  ".join([f"holdfast: {text}", *details]))
    return number


def warn(text: str) -> None:
    """Print a line on standard error, so that standard output contains nothing but JSON."""
    print(plain(text), file=sys.stderr, flush=True)


def say(text: object) -> None:
    """Print a line on standard output without terminal control characters."""
    typer.echo(plain(text))


def plain_values(data: Any) -> Any:
    """Return `data` with each string on one line and without control characters."""
    if isinstance(data, Mapping):
        return {key: plain_values(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain_values(value) for value in data]
    return plain_line(data) if isinstance(data, str) else data


def answer(
    data: Any, as_json: bool, render: Callable[[Any], None], *, indent: int | None = 1
) -> None:
    """Print `data` as JSON if `as_json` is set; otherwise call `render` with it."""
    if as_json:
        typer.echo(to_json_text(data, indent))
    else:
        render(data)


def to_json_text(data: Any, indent: int | None = None) -> str:
    """Return `data` as JSON without characters that control a terminal."""
    text = json.dumps(data, indent=indent, ensure_ascii=False, default=str)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Print a table. If standard output is not a terminal, no cell is cut or wrapped."""
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
    """Print one `name  value` line for each fact that has a value."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if value is not None and value != "":
            say(f"{name.ljust(width)}  {cell_text(value)}")


def cell_text(value: object) -> str:
    """Return a value as text: `-` for none, yes or no for a bool, lists with commas."""
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
    """Return a number of bytes in the largest unit in which it is at least 1."""
    if count is None:
        return "-"
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def seconds_text(seconds: float | None) -> str:
    """Return a duration: milliseconds below one second, whole seconds from one minute on."""
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
    """Return an ISO 8601 text or Unix seconds as local date and time."""
    if moment is None or moment == "":
        return "-"
    try:
        when = (
            datetime.fromisoformat(moment)
            if isinstance(moment, str)
            else datetime.fromtimestamp(moment, UTC)
        )
    except (ValueError, OverflowError, OSError):
        # Such as the text of a number that is no time.
        return str(moment)
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")
