"""The `holdfast` command.

`cli.exit_status` lists the exit statuses. Standard error shows the reason and the next step,
as one JSON object with --json.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import TyperException

from holdfast.cli import (
    bench,
    checkpoints,
    database,
    deploy,
    doctor,
    drill,
    events,
    export,
    imports,
    init,
    logs,
    operate,
    serve,
    show,
    simulate,
    submit,
    supervise,
    views,
    wait,
)
from holdfast.cli.exit_status import REFUSED
from holdfast.cli.output import print_error
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.paths import refuse_others_home

app = typer.Typer(
    name="holdfast",
    help="Keep cluster training jobs alive: submit, watch, stop and relaunch them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for module in (
    *(init, simulate, submit, supervise, wait, views, show, events, logs, operate, checkpoints),
    *(export, imports, serve, database, deploy, doctor, bench, drill),
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
    # Root can write everywhere, so nothing else stops it from taking over files of an account.
    if os.geteuid() == 0 and "--help" not in sys.argv:
        refuse_others_home()


def main() -> None:
    """Run the command line. Turn Holdfast's errors and `OSError` into a message and exit status."""
    as_json = "--json" in sys.argv
    try:
        # Without the standalone mode, usage errors are raised and can be printed as JSON.
        done = app(standalone_mode=not as_json)
    # An OSError is a full disk or a missing permission: the message is enough, without traceback.
    except (HoldfastError, OSError) as error:
        sys.exit(print_error(error, as_json=as_json))
    except TyperException as error:
        sys.exit(print_error(error, as_json=as_json))
    except typer.Abort:
        sys.exit(REFUSED)
    # `typer.Exit` makes click return the status.
    sys.exit(done if isinstance(done, int) else 0)


if __name__ == "__main__":
    main()
