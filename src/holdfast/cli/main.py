"""The `holdfast` command.

`cli.exit_status` lists the exit statuses. Standard error shows the reason and the next step,
as one JSON object with --json.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from holdfast.cli.commands import CommandGroup
from holdfast.cli.shared.exit_status import MISUSE, REFUSED
from holdfast.cli.shared.output import echo, prepare_streams, print_error, print_usage, warn
from holdfast.contracts.disk.paths import refuse_others_home
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.version import holdfast_version

app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    help="Keep cluster training jobs alive: submit, watch, stop and relaunch them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(show: bool) -> None:
    if show:
        echo(f"holdfast {holdfast_version()}")
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


def all_commands() -> CommandGroup:
    """Return the command with all its commands, for a program that lists their options."""
    group = typer.main.get_command(app)
    assert isinstance(group, CommandGroup)
    for name in group.commands:
        group.load(name)
    return group


def main() -> None:
    """Run the command line. Turn each error into a message and its exit status."""
    as_json = "--json" in sys.argv
    prepare_streams()
    try:
        # In its standalone mode, typer chooses exit statuses itself.
        done = app(standalone_mode=False)
    # An OSError is a full disk or a missing permission: the message is enough, without traceback.
    except (HoldfastError, OSError) as error:
        sys.exit(print_error(error, as_json=as_json))
    except TyperException as error:
        if as_json:
            print_error(error, as_json=True)
        else:
            print_usage(error)
        sys.exit(MISUSE)
    except typer.Abort:
        # Ctrl-C or Ctrl-D at a question.
        warn("holdfast: not confirmed, so nothing was done")
        sys.exit(REFUSED)
    # `typer.Exit` makes click return the status.
    sys.exit(done if isinstance(done, int) else 0)


if __name__ == "__main__":
    main()
