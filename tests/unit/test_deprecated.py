"""Deprecated names: the warning, and that none outlives the version that it names."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Final

import pytest
from packaging.version import Version

from holdfast.contracts.deprecated import HoldfastDeprecationWarning, warn_deprecated
from holdfast.contracts.version import holdfast_version

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ("src", "trainer", "workers", "flows", "benchmarks/src")


def old_name() -> None:
    warn_deprecated("old_name", "call new_name", removed_in="9.1")


def calls() -> list[tuple[str, ast.Call]]:
    """Every use of the helper in the product, with its file."""
    found = []
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            if "warn_deprecated" in (text := path.read_text()):
                nodes = ast.walk(ast.parse(text))
                found += [
                    (str(path.relative_to(ROOT)), node)
                    for node in nodes
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == "warn_deprecated"
                ]
    return found


def test_the_warning_names_the_line_the_version_and_the_replacement() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        old_name()
    (one,) = seen
    assert one.category is HoldfastDeprecationWarning
    assert issubclass(one.category, DeprecationWarning)
    assert one.filename == __file__
    assert str(one.message) == (
        "old_name is deprecated and will be removed in Holdfast 9.1: call new_name"
    )


def test_a_filter_for_it_alone_makes_it_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastDeprecationWarning)
        with pytest.raises(HoldfastDeprecationWarning, match="new_name"):
            old_name()


def test_no_deprecated_name_outlives_its_version() -> None:
    found = calls()
    assert found
    for path, call in found:
        (given,) = [one.value for one in call.keywords if one.arg == "removed_in"]
        removed_in = ast.literal_eval(given)
        assert Version(removed_in) > Version(holdfast_version()), f"{path}: {removed_in} is here"
