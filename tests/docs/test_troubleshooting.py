"""The page on troubleshooting: its causes are those of the code, and each message exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest
from tests.docs.blocks import ROOT
from tests.endings.endings import EVERY

from holdfast.contracts.states import Cause
from holdfast.workers.causes import STATE_OF_CAUSE
from holdfast.workers.policy import BUDGETS, UNLIMITED

PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text()
CAUSES: Final = re.compile(r"^\| \[`(\w+)`\]\(#(\w+)\) \| `(\w+)`[^|]*\| ([\w ]+) \|", re.MULTILINE)
MESSAGE: Final = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
# Between these, a message is one text in the source. Values are in between.
PARTS: Final = re.compile(r"…|[;:,()']")
LETTERS_MIN: Final = 6
SOURCES: Final = ("src/holdfast", "workers", "flows", "trainer")


def messages() -> list[str]:
    """The messages of the part `By error message`, without the table of `doctor`."""
    part = PAGE[PAGE.index("## By error message") : PAGE.index("### What `holdfast doctor`")]
    return MESSAGE.findall(part)


@cache
def source_texts() -> list[str]:
    return [text for folder in SOURCES for text in _texts(folder)]


def _texts(folder: str) -> Iterator[str]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_table_has_every_cause_with_its_state_and_its_budget() -> None:
    rows = {Cause(name): (anchor, state, budget) for name, anchor, state, budget in _rows()}
    assert list(rows) == list(Cause)
    for cause, (anchor, state, budget) in rows.items():
        assert (anchor, state) == (cause.value, STATE_OF_CAUSE[cause].value)
        assert budget == ("no limit" if BUDGETS[cause] == UNLIMITED else str(BUDGETS[cause]))
        assert f"\n### {cause.value}\n" in PAGE


def _rows() -> list[tuple[str, ...]]:
    return CAUSES.findall(PAGE)


def test_a_program_or_a_job_has_produced_each_cause() -> None:
    assert {ending.cause for ending in EVERY} - {None} == set(Cause)


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_page_exists(message: str) -> None:
    parts = [part.strip() for part in PARTS.split(message)]
    missing = [
        part
        for part in parts
        if len(part) >= LETTERS_MIN and not any(part in text for text in source_texts())
    ]
    assert not missing
