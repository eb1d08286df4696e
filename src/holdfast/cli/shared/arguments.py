"""Arguments that several commands share: runs, overrides of a spec, and points in time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Final

import typer

from holdfast.cli.shared.exit_status import REFUSED
from holdfast.cli.shared.index import choose_root, locate_run
from holdfast.contracts.disk.paths import LATEST, RunPaths, list_runs
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.checkpoint_choice import BEST
from holdfast.contracts.spec.checkpoint import seconds_of

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec. Repeatable."),
]

# Options that would do nothing in a call are refused, as keys of a spec are.


def refuse_unused(context: typer.Context, reason: str, *names: str) -> None:
    """Raise `SpecError` for the options that were given on the command line, because of `reason`.

    `names` are the names of the command's parameters.
    """
    given = [one for one in context.command.params if one.name in names]
    used = [one.opts[0] for one in given if one.name and _is_from_command_line(context, one.name)]
    if used:
        raise SpecError(f"{', '.join(used)}: {reason}; leave it out")


def _is_from_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


COMPLETIONS_MAX: Final = 200
# For --watch. ANSI: clear the screen, and move the cursor to its first line.
WATCH_S: Final = 2.0
CLEAR: Final = "\x1b[2J\x1b[H"


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the runs under the root that start with `incomplete`."""
    with contextlib.suppress(OSError):
        found = list_runs(choose_root(context.params.get("root")))
        names = [paths.name for paths in found if paths.name.startswith(incomplete)]
        return sorted(names)[:COMPLETIONS_MAX]
    return []


def complete_checkpoint(context: typer.Context, incomplete: str) -> list[str]:
    """Return ids of checkpoints, or names of runs before the colon, that start so."""
    run, colon, name = incomplete.partition(":")
    if not colon:
        return [f"{one}:" for one in complete_run(context, incomplete)]
    with contextlib.suppress(OSError):
        found = RunPaths(choose_root(context.params.get("root")) / run).list_checkpoint_names()
        words = [LATEST, BEST, *map(str, reversed(found))]
        return [f"{run}:{one}" for one in words if one.startswith(name)][:COMPLETIONS_MAX]
    return []


RUN_HELP: Final = "The run's name, folder or uid."
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="The runs' names, folders or uids.", autocompletion=complete_run
    ),
]


def parse_moment(text: str) -> float:
    """Return a time as Unix seconds: ISO 8601, or a duration before now such as `90s` or `2h`.

    A time without a zone is local. Raises `typer.BadParameter` for any other text.
    """
    try:
        if (ago_s := seconds_of(text)) is not None:
            return time.time() - ago_s
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"{text!r}: expected a duration such as 90s, 15m, 2h or 3d, or a time such as "
            "2026-01-31T12:00"
        ) from None


SinceOption = Annotated[
    float | None,
    typer.Option(
        "--since",
        parser=parse_moment,
        metavar="TIME",
        help="Leave out what is older: a time, or a duration such as 15m or 2h.",
    ),
]


def locate_runs(names: Sequence[str], root: str | None) -> list[RunPaths]:
    """Return the runs, each of them once. Raises `NotFoundError` for the first unknown one."""
    return list(dict.fromkeys(locate_run(name, root) for name in names))


def confirm(
    command: str,
    what: str,
    as_json: bool,
    show: Callable[[], object] = lambda: None,
    *,
    has_dry_run: bool = False,
) -> None:
    """Ask whether to delete; exit with `REFUSED` at no. Raises `SpecError` without a terminal."""
    if as_json or not sys.stdin.isatty():
        instead = "--yes, or --dry-run to see" if has_dry_run else "--yes"
        raise SpecError(f"{command} would delete {what} and cannot ask here: add {instead}")
    show()
    if not typer.confirm(f"Delete {what}?", err=True):
        raise typer.Exit(REFUSED)
