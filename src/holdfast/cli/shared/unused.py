"""Options that would do nothing in a call are refused, as keys of a spec are."""

from __future__ import annotations

import typer

from holdfast.contracts.errors import SpecError


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
