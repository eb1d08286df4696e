"""Every code block of the documentation is run by a test, or has a marker that says why not.

- The quick start is followed command by command (tests/process/test_quick_start.py).
- Shell commands of the other pages run on a finished run (tests/process/test_docs_commands.py).
- Python is executed with a session (test_python_blocks.py).
- TOML is a spec or a part of one, and the spec's model must accept it.
- The pages for a team are followed on a clean machine (tests/infra/test_deployment.py).
- All other blocks have a marker (see blocks.py), also those that contain only output.

All blocks, marked ones too, must parse, and each `holdfast` command and option must exist.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import yaml
from pydantic import ValidationError
from tests.docs import test_python_blocks
from tests.docs.blocks import MARKER, PAGES, ROOT, Block, all_blocks, blocks_in, unmarked
from tests.infra import deployment_pages
from tests.process import test_docs_commands, test_quick_start

from holdfast.cli import main
from holdfast.contracts.spec.run_spec import RunSpec

INLINE: Final = re.compile(r"`(holdfast [a-z][^`\n]*)`")
COMMAND: Final = main.all_commands()
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


def commands_in(text: str) -> Iterator[str]:
    """The `holdfast` commands of a script."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\||;|\|", line.partition(" #")[0]):
            words = part.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*|sudo|exec|\\\$|\(", words[0]):
                words.pop(0)
            if words and words[0].rpartition("/")[2] == "holdfast":
                yield " ".join(["holdfast", *words[1:]])


def all_commands() -> list[tuple[str, str]]:
    """(page, command) of every `holdfast` command in the pages, each once."""
    found = []
    for block in all_blocks():
        if block.is_shell:
            found += [(block.page, command) for command in commands_in(block.commands)]
    for path in PAGES:
        page = str(path.relative_to(ROOT))
        found += [(page, match[1]) for match in INLINE.finditer(path.read_text())]
    return list(dict.fromkeys(found))


def problem_with(command: str) -> str | None:
    """What is wrong with a command; None if the command and its options exist."""
    here: Any = COMMAND
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
    pytest.param(block.language, block.text, id=str(block))
    for block in all_blocks()
    if block.language in PARSERS and not (block.language == "json" and ELLIPSIS.search(block.text))
]
SPECS: Final = [block for block in unmarked() if block.language == "toml"]
RUN: Final = [
    *test_quick_start.BLOCKS,
    *test_docs_commands.BLOCKS,
    *test_python_blocks.BLOCKS,
    *deployment_pages.BLOCKS,
    *SPECS,
]


def spec_of(text: str) -> RunSpec:
    """The spec of a TOML block. A part of a spec gets the keys that every spec needs."""
    return RunSpec.model_validate({"name": "part", "command": ["train.py"], **tomllib.loads(text)})


def problems_in(page: str, text: str, run: list[Block]) -> list[str]:
    """The blocks of a page that are neither run nor marked, and the markers that are wrong."""
    found = blocks_in(page, text)
    problems = [
        f"{block}: no test runs this {block.language or 'output'}; expected a marker above it"
        for block in found
        if block.reason is None and block not in run
    ]
    problems += [f"{block}: its marker gives no reason" for block in found if block.reason == ""]
    marked = [block for block in found if block.reason is not None or block.runner]
    stray = len(MARKER.findall(text)) - len(marked)
    return problems + ([f"{page}: {stray} markers are not above a block"] if stray else [])


def test_every_block_is_run_or_marked() -> None:
    pages = [(str(page.relative_to(ROOT)), page.read_text()) for page in PAGES]
    problems = [one for page, text in pages for one in problems_in(page, text, RUN)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\noutput\n```\n", "page.md:1: no test runs this output"),
        ("text\n\n```json\n{}\n```\n", "page.md:3: no test runs this json"),
        ("<!-- not run: -->\n```sh\nls\n```\n", "page.md:2: its marker gives no reason"),
        ("<!-- not run: slow -->\n\n```sh\nls\n```\n", "page.md:3: no test runs this sh"),
        ("<!-- not run: slow -->\ntext\n", "page.md: 1 markers are not above a block"),
        ("  <!--not run: slow -->\n  ```sh\n  ls\n  ```\n", "page.md:2: no test runs this sh"),
        ("<!-- run by tests/t.py -->\n```sh\nls\n```\n", "page.md:2: no test runs this sh"),
        ("<!-- run by tests/t.py -->\ntext\n", "page.md: 1 markers are not above a block"),
    ],
)
def test_unmarked_blocks_and_wrong_markers_are_reported(text: str, problem: str) -> None:
    assert problems_in("page.md", text, RUN)[0].startswith(problem)


def test_blocks_with_a_marker_or_a_test_are_accepted() -> None:
    text = "<!-- not run: slow -->\n```sh\nls\n```\n\n```{toctree}\npage\n```\n"
    assert [block.reason for block in blocks_in("page.md", text)] == ["slow"]
    assert problems_in("page.md", text, []) == []
    unmarked_block = "```sh\nls\n```\n"
    assert problems_in("page.md", unmarked_block, blocks_in("page.md", unmarked_block)) == []


@pytest.mark.parametrize(("language", "text"), PARSED)
def test_code_blocks_parse_in_their_language(language: str, text: str) -> None:
    assert PARSERS[language](text) is not None


@pytest.mark.parametrize("block", SPECS, ids=str)
def test_specs_and_parts_of_specs_are_valid(block: Block) -> None:
    given = tomllib.loads(block.text)
    written = spec_of(block.text).model_dump(mode="json", exclude_unset=True)
    assert given.keys() <= written.keys()


def test_a_wrong_key_in_a_part_of_a_spec_is_reported() -> None:
    with pytest.raises(ValidationError, match="lsat"):
        spec_of("[checkpoint.keep]\nlsat = 3\n")


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
