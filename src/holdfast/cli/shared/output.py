"""Output of the command: JSON for programs, tables for people, errors on standard error."""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from typer.exceptions import TyperException

from holdfast.cli.shared.exit_status import exit_status
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.plain_text import plain, plain_line

# Checks of the files that a command will write, before its work begins.


def check_folder_of(option: str, path: Path) -> None:
    """Raise `NotFoundError` if the folder of `path`, the value of `option`, does not exist."""
    if not path.expanduser().absolute().parent.is_dir():
        raise NotFoundError(f"{option} {path}: there is no folder {path.parent}")


def check_plot(path: Path) -> None:
    """Raise `SpecError` or `NotFoundError` if the plot of `--plot` could not be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise SpecError("--plot needs matplotlib; run `pip install matplotlib`") from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise SpecError(
            f"--plot {path}: ends in {path.suffix or 'nothing'}; expected .svg, .png or another "
            f"of matplotlib's formats: {', '.join(known)}"
        )
    check_folder_of("--plot", path)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        help="The folder that contains the runs. Default: $HOLDFAST_ROOT, else ~/.holdfast/runs.",
        metavar="DIR",
    ),
]
# `json.dumps` escapes only the ASCII control characters.
_UNSAFE_IN_JSON: Final = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
WIDTH_MAX: Final = 10_000
# The characters of Holdfast's own messages that are not ASCII.
_ASCII: Final = {"→": "->", "–": "-", "—": "-", "…": "...", "·": "*", "×": "x", "─": "-", "│": "|"}
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def prepare_streams() -> None:
    """Make standard output and error write what their encoding lacks as ASCII, without an error."""
    codecs.register_error("holdfast", _as_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="holdfast")


def _as_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    text = "".join(_ASCII.get(one, one) for one in lacking)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


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


def print_usage(error: TyperException) -> None:
    """Print what is wrong with the arguments, and the usage of the command."""
    from typer.rich_utils import rich_format_error

    # Typer puts the type of Python's error before its text.
    error.message = error.message.replace("Value error, ", "", 1)
    rich_format_error(cast(Any, error))


def warn(text: str) -> None:
    """Print a line on standard error, so that standard output contains nothing but JSON."""
    print(plain(text), file=sys.stderr, flush=True)


def echo(text: object = "", *, nl: bool = True) -> None:
    """Print text on standard output without a buffer. Unlike typer's, it respects the encoding."""
    print(text, end="\n" if nl else "", flush=True)


def say(text: object) -> None:
    """Print a line on standard output without terminal control characters."""
    echo(plain(text))


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
        echo(to_json_text(data, indent))
    else:
        render(data)


def to_json_text(data: Any, indent: int | None = None) -> str:
    """Return `data` as JSON without characters that control a terminal."""
    is_ascii = not (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    text = json.dumps(data, indent=indent, ensure_ascii=is_ascii, default=str)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. If standard output is not a terminal, no cell is cut or wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    cells = [[plain_line(cell_text(cell)) for cell in row] for row in rows]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    free = console.width if sys.stdout.isatty() else WIDTH_MAX
    console.width = WIDTH_MAX
    if console.measure(table).maximum > free:
        own = console.measure(table).minimum - sum(low for low, _ in _bounds(headings, cells))
        widths = _column_widths(_bounds(headings, cells), free - own)
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
    console.print(table, crop=False)


def _bounds(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return the width of each column's longest word, and that of its longest cell."""
    from rich.cells import cell_len

    columns = [[heading, *column] for heading, *column in zip(headings, *cells, strict=True)]
    return [
        (
            max(cell_len(word) for cell in column for word in cell.split(" ")),
            max(cell_len(cell) for cell in column),
        )
        for column in columns
    ]


def _column_widths(bounds: Sequence[tuple[int, int]], free: int) -> list[int]:
    """Return widths that together take `free` columns if possible, without cutting a word.

    An id that is cut cannot be copied. What is left is shared by the columns that wrap.
    """
    widths = [low for low, _ in bounds]
    left = free - sum(widths)
    while left > 0 and (short := [n for n, (_, high) in enumerate(bounds) if widths[n] < high]):
        for number in short[:left]:
            widths[number] += 1
        left -= len(short[:left])
    return widths


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


def time_text(moment: str | float | None, *, zone: bool = False) -> str:
    """Return an ISO 8601 text or Unix seconds as local date and time, or with the time zone."""
    if moment is None or moment == "":
        return "-"
    try:
        when = (
            datetime.fromisoformat(moment)
            if isinstance(moment, str)
            else datetime.fromtimestamp(moment, UTC)
        )
    except (ValueError, OverflowError, OSError):
        # Such as the text of a number that is not a time.
        return str(moment)
    return when.astimezone().strftime(f"%Y-%m-%d %H:%M:%S{' %Z' if zone else ''}")
