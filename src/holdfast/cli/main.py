"""The `holdfast` command.

The module of a command is imported when the command is used, so `holdfast --help` and `--version`
import none of them. `cli.shared.exit_status` lists the exit statuses. Standard error shows the
reason and the next step, as one JSON object with --json.
"""

from __future__ import annotations

import keyword
import os
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from holdfast.cli.shared import exit_status, output
from holdfast.contracts.disk.paths import refuse_others_home
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.version import holdfast_version

# Command → its module, and the first paragraph of its help.
COMMANDS: Final = {
    "init": (
        "init",
        "Write a spec, its schema, a program and a prefect.yaml. No file is overwritten.",
    ),
    "schema": (
        "init",
        "Print the JSON Schema of a run spec, with which an editor completes and checks its keys.",
    ),
    "simulate": (
        "simulate",
        (
            "Play a run on a trace of free GPUs; print its end, ETTR and cost for each size and "
            "interval."
        ),
    ),
    "submit": (
        "submit",
        "Submit a run, or attach to the live one that has the same name and spec.",
    ),
    "fork": ("submit", "Start a new run, under another name, from a committed checkpoint."),
    "supervise": (
        "supervise",
        "Start a supervisor for a live run that has none. A run that has one is not changed.",
    ),
    "wait": (
        "wait",
        "Wait until every RUN has ended, or with --for running, until its ranks train.",
    ),
    "runs": ("views", "List the runs under the root and in the index, newest first."),
    "checkpoints": ("views", "List a run's checkpoints, oldest first, and why each one is kept."),
    "lineage": (
        "views",
        "Show a run's lineage: its attempts and checkpoints, their origins and descendants.",
    ),
    "show": ("show", "Show a run: its state, its attempts with their causes, and its use of time."),
    "events": ("events", "Print the events in a run's journal, oldest first."),
    "logs": (
        "logs",
        "Print a rank's output: standard output and standard error of each launch, in order.",
    ),
    "bundle": (
        "bundle",
        "Write an archive about a run, without secrets, that you can attach to a report.",
    ),
    "trace": (
        "trace",
        "Send a run as one OpenTelemetry trace: its attempts, launches, loads and saves.",
    ),
    "relaunch": (
        "operate",
        "Continue a run in a new attempt. A live run saves a checkpoint first.",
    ),
    "stop": ("operate", "Stop a run after a last checkpoint. `relaunch` continues it."),
    "pause": ("operate", "Release a run's GPUs after a last checkpoint. `resume` continues it."),
    "resume": (
        "operate",
        "Continue a paused run. `relaunch --gpus` continues it on another number of GPUs.",
    ),
    "cancel": ("operate", "Cancel a run after a last checkpoint. Its checkpoints are kept."),
    "annotate": (
        "operate",
        "Change the tags and the note of runs or checkpoints. The runs may have ended.",
    ),
    "pin": ("checkpoints", "Keep a checkpoint regardless of the keep rules."),
    "unpin": (
        "checkpoints",
        "Remove a checkpoint's pin, so that the keep rules apply to it again.",
    ),
    "metric": (
        "checkpoints",
        "Record metrics of a committed checkpoint, such as the results of an evaluation.",
    ),
    "prune": (
        "checkpoints",
        "Delete the checkpoints that no keep rule, pin or use keeps. Their manifests remain.",
    ),
    "delete": (
        "checkpoints",
        "Delete a run that has ended, with its folder and all its checkpoints.",
    ),
    "verify": ("checkpoints", "Read every byte of a checkpoint and compare it with the manifest."),
    "export": (
        "checkpoints",
        "Write a checkpoint as torch, safetensors, Hugging Face or plain DCP files.",
    ),
    "import": ("imports", "Make weights of another program the first checkpoint of a new run."),
    "mcp": (
        "mcp",
        "Serve tools for agents over the Model Context Protocol, on standard input and output.",
    ),
    "serve": ("serve", "Serve the web UI and the API until interrupted."),
    "reindex": ("database", "Rebuild the index of all runs under ROOT from disk."),
    "deploy": ("deploy", "Create or update Prefect's deployments and their work pool."),
    "bench": (
        "bench",
        "Compare saves and loads with this machine's limits. It takes about twelve minutes.",
    ),
    "drill": (
        "drill",
        "Inject faults into a run and check the invariants. The exit status is 1 if one is broken.",
    ),
    "token": ("serve", "Manage the tokens of a server."),
    "db": ("database", "Manage the schema of the index."),
    "doctor": ("doctor", "Check whether this machine and its services can run jobs."),
}


class CommandGroup(TyperGroup):
    """The commands of `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, summary) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` begin with, for its use or its completion."""
        if args[0] in COMMANDS:
            self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> None:
        """Import the module of a command, and put the command in the place of its summary.

        It is the module's function or group of this name, with `_` added to a keyword.
        """
        module = import_module(f"holdfast.cli.{COMMANDS[name][0]}")
        found = getattr(module, f"{name}_" if keyword.iskeyword(name) else name)
        part = typer.Typer()
        if isinstance(found, typer.Typer):
            part.add_typer(found, name=name)
        else:
            part.command(name)(found)
        self.commands[name] = typer.main.get_group(part).commands[name]


app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    help="Keep cluster training jobs alive: submit, watch, stop and relaunch them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(show: bool) -> None:
    if show:
        output.echo(f"holdfast {holdfast_version()}")
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
    output.prepare_streams()
    try:
        # In its standalone mode, typer chooses exit statuses itself.
        done = app(standalone_mode=False)
    # An OSError is a full disk or a missing permission: the message is enough, without traceback.
    except (HoldfastError, OSError) as error:
        sys.exit(output.print_error(error, as_json=as_json))
    except TyperException as error:
        if as_json:
            output.print_error(error, as_json=True)
        else:
            output.print_usage(error)
        sys.exit(exit_status.MISUSE)
    except typer.Abort:
        # Ctrl-C or Ctrl-D at a question.
        output.warn("holdfast: not confirmed, so nothing was done")
        sys.exit(exit_status.REFUSED)
    # `typer.Exit` makes click return the status.
    sys.exit(done if isinstance(done, int) else 0)


if __name__ == "__main__":
    main()
