"""The folders of the package: each says what belongs there, and its names are its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PORTIONS = ("src", "trainer", "workers", "flows")
# A folder with more modules has more than one purpose.
MODULES_MAX = 24
WORDS_MIN = 20
# `AttemptView`, `Health`, `Segment`, `Session` and `Supervision` are names of the REST API, where
# another class of that name would be a change for its callers.
COLLISIONS_MAX = 5


def rooms() -> list[Path]:
    """The folders with modules below `holdfast`, by portion."""
    return sorted(
        folder
        for portion in PORTIONS
        for folder in (CHECKOUT / portion / "holdfast").rglob("*")
        if folder.is_dir() and any(folder.glob("*.py"))
    )


@pytest.mark.parametrize("room", rooms(), ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_a_room_says_what_belongs_there_and_is_not_crowded(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert len(text.split()) >= WORDS_MIN, "say in its `__init__` what belongs there"
    modules = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MODULES_MAX


def test_a_public_class_name_stands_for_one_class() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for room in rooms():
        for path in room.glob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(CHECKOUT)))
    several = {name: places for name, places in found.items() if len(places) > 1}
    assert len(several) <= COLLISIONS_MAX, several
