"""Code in the documentation: it parses, and each `holdfast` command and option in it exists."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
import yaml

from holdfast.cli.main import app
from holdfast.contracts.spec import RunSpec

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("infra/*/*.md"))
    if path.is_file()
)
FENCE: Final = re.compile(r"^( *)```([a-z]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE: Final = re.compile(r"`(holdfast [a-z][^`\n]*)`")
# Blocks in these languages are checked by a parser of the language.
PARSERS: Final[dict[str, Callable[[str], object]]] = {
    "json": json.loads,
    # An excerpt of a program may be indented.
    "python": lambda text: compile(textwrap.dedent(text), "block", "exec"),
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
# A block with an ellipsis is incomplete, so it may not parse.
ELLIPSIS: Final = re.compile("…|\\.\\.\\.$", re.MULTILINE)


def blocks() -> Iterator[tuple[str, str, str]]:
    """(page, language, text) of each fenced block."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text()):
            indent, language, text = match.groups()
            lines = (line.removeprefix(indent) for line in text.splitlines(keepends=True))
            yield str(page.relative_to(ROOT)), language, "".join(lines)


def commands_in(text: str) -> Iterator[str]:
    """The `holdfast` commands of a shell block or a console block."""
    for line in text.replace("\\\n", " ").splitlines():
        command = line.strip().removeprefix("$ ")
        for part in re.split(r"&&|\|\||;|\|", command.partition(" #")[0]):
            words = part.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*|sudo|exec|\\\$|\(", words[0]):
                words.pop(0)
            if words and words[0].rpartition("/")[2] == "holdfast":
                yield " ".join(["holdfast", *words[1:]])


def all_commands() -> list[tuple[str, str]]:
    """(page, command) of every `holdfast` command in the pages, each once."""
    found = []
    for page, language, text in blocks():
        if language in {"", "sh", "bash", "console", "text"}:
            is_session = language not in {"sh", "bash"}
            lines = text.splitlines()
            chosen = [one for one in lines if one.startswith("$ ")] if is_session else lines
            found += [(page, command) for command in commands_in("\n".join(chosen))]
    for path in PAGES:
        page = str(path.relative_to(ROOT))
        found += [(page, match[1]) for match in INLINE.finditer(path.read_text())]
    return list(dict.fromkeys(found))


def problem_with(command: str) -> str | None:
    """What is wrong with a command; None if the command and its options exist."""
    here: Any = typer.main.get_command(app)
    try:
        words = shlex.split(command)[1:]
    except ValueError as error:
        return str(error)
    while words and not words[0].startswith("-") and hasattr(here, "commands"):
        if words[0] not in here.commands:
            # A group that can be called without a subcommand, or a placeholder such as COMMAND.
            known = getattr(here, "invoke_without_command", False) or words[0].isupper()
            return None if known else f"no command {words[0]}"
        here = here.commands[words.pop(0)]
    options = {name for one in here.params for name in (*one.opts, *one.secondary_opts)}
    options |= {"--help"}
    for word in words:
        name = word.partition("=")[0].strip("[],.")
        if re.fullmatch(r"--?[a-z][a-z-]*", name) and name not in options:
            return f"no option {name}"
    return None


PARSED: Final = [
    pytest.param(language, text, id=f"{page}-{number}")
    for number, (page, language, text) in enumerate(blocks())
    if language in PARSERS and not (language == "json" and ELLIPSIS.search(text))
]


@pytest.mark.parametrize(("language", "text"), PARSED)
def test_code_blocks_parse_in_their_language(language: str, text: str) -> None:
    assert PARSERS[language](text) is not None


def test_complete_specs_in_the_docs_are_valid() -> None:
    found = [tomllib.loads(text) for _, language, text in blocks() if language == "toml"]
    specs = [one for one in found if {"name", "command"} <= one.keys()]
    assert len(specs) >= 3
    for spec in specs:
        RunSpec.model_validate(spec)


def test_documented_commands_and_options_exist() -> None:
    found = all_commands()
    assert len(found) > 100
    wrong = [
        f"{page}: {command}: {problem}"
        for page, command in found
        if (problem := problem_with(command))
    ]
    assert not wrong, "\n".join(wrong)


def test_unknown_commands_and_options_are_reported() -> None:
    assert problem_with("holdfast shwo run") == "no command shwo"
    assert problem_with("holdfast runs --newest") == "no option --newest"
    assert problem_with("holdfast db upgrade --all") == "no option --all"
    assert problem_with("holdfast submit spec.toml --set steps=3 --wait") is None
