"""The `holdfast` command.

Exit status: 0 on success; 1 if the run, checkpoint or check that you asked about is bad or failed;
2 if the call was wrong or something that it needs is unavailable. Standard error then shows the
reason and the next step.
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
    help="Keep cluster training jobs alive: submit, watch, stop and relaunch them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (
    *(submit, supervise, views, logs, operate, checkpoints, export, serve),
    *(database, deploy, doctor, bench, drill),
):
    module.register(app)


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Keep cluster training jobs alive: submit, watch, stop and relaunch them."""


def main() -> None:
    """Run the command line. Turn Holdfast's errors and `OSError` into a message and exit status."""
    try:
        app()
    except HoldfastError as error:
        print_error(error)
        sys.exit(exit_status(error))
    # A full disk or a missing permission: the message is enough, without a traceback.
    except OSError as error:
        warn(f"holdfast: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
