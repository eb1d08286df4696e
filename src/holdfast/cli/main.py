"""The `holdfast` command.

Exit status: 0 done; 1 the thing asked about is bad or failed; 2 the call was wrong, or something
it needs cannot be used, with the reason and the next step on standard error.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from holdfast.cli import (
    bench,
    checkpoints,
    database,
    deploy,
    doctor,
    drill,
    export,
    logs,
    operate,
    serve,
    submit,
    supervise,
    views,
)
from holdfast.cli.output import exit_status, print_error, warn
from holdfast.contracts.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Keeps cluster training jobs alive: submit, watch, stop and relaunch them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (
    *(submit, supervise, views, logs, operate, checkpoints, export, serve),
    *(database, deploy, doctor, bench, drill),
):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say it and end."),
    ] = False,
) -> None:
    """Keeps cluster training jobs alive: submit, watch, stop and relaunch them."""


def main() -> None:
    """Run the command line; every error made on purpose becomes a message and a status."""
    try:
        app()
    except HoldfastError as error:
        print_error(error)
        sys.exit(exit_status(error))
    # Files that cannot be read or written are the caller's business: a full disk, a lacking right.
    except OSError as error:
        warn(f"holdfast: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
