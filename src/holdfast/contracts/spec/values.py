"""Checks for every value of a run spec: no control characters, and bounded numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any, Final

from pydantic import BaseModel

from holdfast.contracts.disk.bounds import DEPTH_MAX

WHOLE_MAX: Final = 2**53
FRACTION_MAX: Final = 1e9
ITEMS_MAX: Final = 100_000
SHOWN_CHARACTERS: Final = 60
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NEVER: Final = re.compile(r"[\x00\ud800-\udfff]")


def problem_with_value(
    value: Any, *, several_lines: bool, any_float: bool = False, depth: int = 0
) -> str | None:
    """Return the problem with a value of a spec as text, or None.

    Strings reach sbatch scripts, command lines, terminals and databases, so they must not contain
    control characters. With `several_lines` only NUL and lone surrogates are refused. `any_float`
    allows any number, for values that only the program reads. Nested models are not checked here,
    because they check themselves.
    """
    if isinstance(value, BaseModel):
        return None
    if isinstance(value, str):
        return _problem_with_text(value, _NEVER if several_lines else _CONTROL)
    if isinstance(value, int) and abs(value) > WHOLE_MAX:
        return f"an integer of {value.bit_length()} bits, expected at most 53"
    if isinstance(value, float) and not abs(value) <= FRACTION_MAX and not any_float:
        return f"{value}: expected a finite number of at most {FRACTION_MAX:.0e}"
    if depth > DEPTH_MAX:
        return f"nested more than {DEPTH_MAX} deep"
    if isinstance(value, Mapping):
        if unnamed := [key for key in value if not isinstance(key, str)]:
            return f"{unnamed[0]!r}: expected text as a key; write it in quotes"
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list | tuple):
        return _problem_with_kind(value)
    if len(value) > ITEMS_MAX:
        return f"{len(value)} items, expected at most {ITEMS_MAX}"
    found = (
        problem_with_value(item, several_lines=several_lines, any_float=any_float, depth=depth + 1)
        for item in value
    )
    return next((problem for problem in found if problem), None)


def _problem_with_kind(value: Any) -> str | None:
    """Return the problem with a value that TOML or YAML can express and JSON cannot, or None."""
    if isinstance(value, date | time):
        return f"{value}: a date or a time; write it in quotes, as text"
    if isinstance(value, bytes | set):
        return f"a {type(value).__name__}; expected text, a number, true, false, a list or a table"
    return None


def _problem_with_text(text: str, refused: re.Pattern[str]) -> str | None:
    match = refused.search(text)
    if match is None:
        return None
    given = ascii(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS])
    return f"{given}: contains the control character {match[0]!a}; remove it"
