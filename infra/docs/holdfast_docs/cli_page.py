"""Every command of `holdfast`, from the typer application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from holdfast.cli.main import all_commands
from holdfast_docs.markdown import code, paragraphs, section, sentence, table

PROGRAM = "holdfast"


def render() -> str:
    """A list of all commands, then a section for each."""
    found = list(commands())
    rows = [
        (f"[{code(name)}](#{anchor(name)})", sentence(_summary(command)))
        for name, command in found
        if name != PROGRAM
    ]
    parts = [table(("command", "what it does"), rows)]
    parts += [_section(name, command) for name, command in found]
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Each command and each group of commands with its full name."""
    yield from _walk(PROGRAM, all_commands())


def options_of(command: Any) -> list[Any]:
    """The visible options of a command."""
    return [one for one in _visible(command) if one.opts[0].startswith("-")]


def anchor(name: str) -> str:
    """The name of a command's section, as a target of links."""
    return f"cli-{name.replace(' ', '-')}"


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _walk(f"{name} {below}", one)


def _section(name: str, command: Any) -> str:
    arguments = [one for one in _visible(command) if one not in options_of(command)]
    usage = [name, *(["[OPTIONS]"] if options_of(command) else [])]
    usage += [_argument(one) for one in arguments]
    usage += ["COMMAND [ARGUMENTS]…"] if hasattr(command, "commands") else []
    given = [(code(_placeholder(one)), _kind(one), sentence(one.help or "")) for one in arguments]
    offered = [
        (_spelled(one), _kind(one), _default(one), sentence(one.help or ""))
        for one in options_of(command)
    ]
    return section(
        2 if name.count(" ") < 2 else 3,
        code(name),
        f"```text\n{' '.join(usage)}\n```",
        paragraphs((command.help or "").replace("\b", "")),
        table(("argument", "value", "meaning"), given),
        table(("option", "value", "default", "meaning"), offered),
        anchor=anchor(name),
    )


def _summary(command: Any) -> str:
    return str(command.help or "").strip().partition("\n\n")[0]


def _visible(command: Any) -> list[Any]:
    return [one for one in command.params if not one.hidden]


def _placeholder(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _argument(argument: Any) -> str:
    name = _placeholder(argument)
    name = f"{name}…" if argument.nargs == -1 else name
    return name if argument.required else f"[{name}]"


def _spelled(option: Any) -> str:
    return ", ".join(code(one) for one in (*option.opts, *option.secondary_opts))


def _kind(parameter: Any) -> str:
    """What a value looks like: its placeholder, or its type."""
    if getattr(parameter, "is_flag", False):
        return "flag"
    # A `Literal` or an enumeration has choices, whatever the placeholder.
    annotation = parameter.type_descriptor.annotation
    several = " (repeatable)" if parameter.multiple else ""
    if choices := getattr(annotation, "__members__", None) or get_args(annotation):
        listed = [str(getattr(one, "value", one)) for one in _values(choices)]
        if all(not isinstance(one, type) for one in _values(choices)):
            return ", ".join(code(one) for one in listed) + several
    if parameter.metavar:
        return code(parameter.metavar) + several
    return f"{_type_name(annotation)}{several}"


def _values(choices: Any) -> list[Any]:
    return list(choices.values()) if hasattr(choices, "values") else list(choices)


def _type_name(annotation: Any) -> str:
    names = {str: "text", int: "integer", float: "number", Path: "path", bool: "true or false"}
    inner = [one for one in (annotation, *get_args(annotation)) if one in names]
    return names[inner[0]] if inner else "text"


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or callable(value):
        return "none" if not getattr(option, "is_flag", False) else "off"
    if value is True:
        return "on"
    shown = getattr(value, "value", value)
    return code(shown)
