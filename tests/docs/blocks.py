"""The code blocks of the documentation, and the markers of those that are special.

A marker is the line directly above a block. `<!-- not run: needs a Slurm cluster -->` says why no
test runs the block. `<!-- run by tests/infra/test_deployment.py -->` names the test that runs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
# The pages beside the code of each part.
PARTS: Final = sorted(
    path
    for folder in ("src", "trainer", "workers", "flows")
    for path in (ROOT / folder).rglob("*.md")
)
PAGES: Final = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("infra/*/*.md"),
        *PARTS,
    )
    # docs/generated repeats the code; see test_generated.py.
    if path.is_file() and path.parent.name != "generated"
)
# The blocks of this page belong together: one test follows it in order.
TUTORIAL: Final = "docs/quick-start.md"
FENCE: Final = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
SCRIPTS: Final = {"sh", "bash"}
SESSIONS: Final = {"", "console", "text"}
MARKER: Final = re.compile(r"^ *<!-- (?:not run:(.*)|run by (\S+) )-->\n", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason` and `runner` are the text of its marker, None without one."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None = None
    runner: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """A script, or a session with a prompt and output."""
        return self.language in SCRIPTS or (self.language in SESSIONS and bool(self.commands))

    @property
    def commands(self) -> str:
        """The script; of a session, the lines after a prompt."""
        if self.language not in SESSIONS:
            return self.text
        lines = [line for line in self.text.splitlines(keepends=True) if line.startswith("$ ")]
        return "".join(line.removeprefix("$ ") for line in lines)


def blocks_in(page: str, text: str) -> list[Block]:
    """The blocks of a page with this text."""
    markers = {match.end(): match for match in MARKER.finditer(text)}
    found = []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        # A directive of the site, such as ```{include}, is no code.
        if language.startswith("{"):
            continue
        lines = (line.removeprefix(indent) for line in body.splitlines(keepends=True))
        number = text.count("\n", 0, match.start()) + 1
        marker = markers.get(match.start())
        reason, runner = marker.groups() if marker else (None, None)
        reason = reason if reason is None else reason.strip()
        found.append(Block(page, number, language, "".join(lines), reason, runner))
    return found


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    pages = ((str(page.relative_to(ROOT)), page.read_text()) for page in PAGES)
    return [block for page, text in pages for block in blocks_in(page, text)]


def unmarked() -> list[Block]:
    """The blocks of all pages without a marker, which the tests in common must run."""
    return [block for block in all_blocks() if block.reason is None and block.runner is None]


def run_by(test: str) -> list[Block]:
    """The blocks whose marker names this file of tests, which must run them."""
    return [block for block in all_blocks() if block.runner == test]
