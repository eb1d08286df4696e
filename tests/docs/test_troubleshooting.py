"""The page on troubleshooting: its causes are those of the code, and each message exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from tests.docs.blocks import ROOT
from tests.endings.endings import EVERY

from holdfast.contracts.states import Cause
from holdfast.workers.decisions.causes import STATE_OF_CAUSE
from holdfast.workers.decisions.policy import BUDGETS, UNLIMITED

PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text()
CAUSES: Final = re.compile(r"^\| \[`(\w+)`\]\(#(\w+)\) \| `(\w+)`[^|]*\| ([\w ]+) \|", re.MULTILINE)
MESSAGE: Final = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
# Between these, a message is one text in the source. Values are in between.
PARTS: Final = re.compile(r"…|[;:,()']")
LETTERS_MIN: Final = 6
# A test mentions that many letters of a message's words, or a whole part.
MENTIONED_MIN: Final = 12
# Each message with the test that produces it, and each symptom with one that shows its reason.
OF_MESSAGES: Final = Path(__file__).with_name("troubleshooting_tests.txt")
OF_SYMPTOMS: Final = Path(__file__).with_name("symptom_tests.txt")
SYMPTOM: Final = re.compile(r"^\| (.+?) \| .+ \| .+ \|$", re.MULTILINE)
WORD: Final = re.compile(r"[a-z_]{4,}")
CODE: Final = re.compile(r"`([^`]+)`")
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


# --- Which test produces a message ------------------------------------------------------------


def rows_of(listing: Path) -> list[tuple[str, str]]:
    """Each row of the page with its test. The rows of a test are indented below its name."""
    found, test = [], ""
    for line in listing.read_text().splitlines():
        if line.startswith(" "):
            found.append((line.strip(), test))
        else:
            test = line
    return found


@cache
def syntax_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def mentioned_in(path: str, test: str) -> list[str]:
    """The texts of a test and of its module, without those of the module's other tests."""
    nodes = syntax_of(path).body
    assert test in [node.name for node in nodes if isinstance(node, ast.FunctionDef)], test
    own = [
        node
        for node in nodes
        if not isinstance(node, ast.FunctionDef)
        or node.name == test
        or not node.name.startswith("test_")
    ]
    docstrings = {one.value for node in own for one in ast.walk(node) if isinstance(one, ast.Expr)}
    return [
        # In a regular expression, some characters are quoted.
        " ".join(one.value.replace("\\", "").split())
        for node in own
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one not in docstrings
    ]


def distinctive(message: str) -> list[str]:
    """The shortest runs of words with `MENTIONED_MIN` letters, or else the longest part."""
    parts = [part.strip() for part in PARTS.split(message)]
    found = [run for part in parts for run in _runs(part.split())]
    return found or [max(parts, key=_letters)]


def _runs(words: list[str]) -> Iterator[str]:
    for first in range(len(words)):
        for last in range(first + 1, len(words) + 1):
            run = " ".join(words[first:last])
            if _letters(run) >= MENTIONED_MIN:
                yield run.rstrip(".")
                break


def _letters(text: str) -> int:
    return sum(letter.isalpha() for letter in text)


def test_each_message_of_the_page_has_a_test() -> None:
    assert sorted(message for message, _ in rows_of(OF_MESSAGES)) == sorted(
        map(str.strip, messages())
    )


@pytest.mark.parametrize(("message", "test"), rows_of(OF_MESSAGES))
def test_the_test_of_a_message_mentions_it(message: str, test: str) -> None:
    path, _, name = test.partition("::")
    texts = mentioned_in(path, name)
    parts = distinctive(message)
    assert any(part in text for part in parts for text in texts), parts


def symptoms() -> dict[str, str]:
    """The whole rows of the part `By symptom`, by their first column."""
    part = PAGE[PAGE.index("## By symptom") : PAGE.index("## By error message")]
    rows = {match[1]: match[0] for match in SYMPTOM.finditer(part)}
    del rows["symptom"]
    return rows


def test_each_symptom_of_the_page_has_a_test() -> None:
    assert sorted(symptom for symptom, _ in rows_of(OF_SYMPTOMS)) == sorted(symptoms())


@pytest.mark.parametrize(("symptom", "test"), rows_of(OF_SYMPTOMS))
def test_the_test_of_a_symptom_names_code_of_its_row(symptom: str, test: str) -> None:
    path, _, name = test.partition("::")
    (own,) = [n for n in syntax_of(path).body if isinstance(n, ast.FunctionDef) and n.name == name]
    source = ast.unparse(own).casefold()
    words = {word for code in CODE.findall(symptoms()[symptom]) for word in WORD.findall(code)}
    assert any(word.casefold() in source for word in words), words
