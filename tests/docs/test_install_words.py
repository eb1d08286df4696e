"""No page and no message says to install `holdfast` from an index, where it is another project."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
from tests.docs.blocks import ROOT

# The name of the distribution after a command or the word, with quotes and options in between. In
# code, a text may continue on the next line. The path of a wheel or of a checkout is allowed.
BY_NAME: Final = re.compile(
    r"(?:(?:pip3?|tool) install(?:\s+-{1,2}[a-z][\w-]*)*|[Ii]nstall|uv add|uvx|pipx run"
    r"|uvx? --(?:from|with))[\s\"'`f]*[\"'`\s]holdfast(?![\w./:-])"
)


def tracked_texts() -> dict[str, str]:
    """The text files of the repository, and those that git would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.split("\0")
    found = {}
    for name in filter(None, listed):
        path = ROOT / name
        if path.is_file() and path != Path(__file__) and b"\0" not in (raw := path.read_bytes()):
            found[name] = raw.decode("utf-8", "replace")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'holdfast[trainer]'",
        "run `pip install holdfast`",
        "uv tool install --upgrade holdfast",
        'uvx --from "holdfast[server]" holdfast runs',
        "Install holdfast[s3] in this environment",
        "install `holdfast[trainer]` there",
        '"needs it. Run pip install "\n            f"holdfast[{extra}]"',
    ],
)
def test_an_index_is_recognised(text: str) -> None:
    assert BY_NAME.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install '.[trainer]'",
        "pip install './holdfast-0.1.0-py3-none-any.whl[server]'",
        'pip install "$(ls /wheels/holdfast-*.whl)[server,redis]"',
        "install Holdfast with the extra `trainer` there",
        "an installed holdfast",
    ],
)
def test_a_path_and_an_extra_are_no_index(text: str) -> None:
    assert BY_NAME.search(text) is None


def test_every_installation_names_where_it_comes_from() -> None:
    texts = tracked_texts()
    assert {"README.md", "workers/holdfast/workers/runs/preflight.py"} <= {*texts}
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for name, text in texts.items()
        for match in BY_NAME.finditer(text)
    ]
    assert found == []
