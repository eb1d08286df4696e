"""The base class of all parts of a run spec: checks for new specs, and reading of recorded ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any, Final, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from holdfast.contracts.disk.bounds import DEPTH_MAX

# Checks for every value of a run spec: no control characters, and bounded numbers.

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
    # TOML and JSON have integers of any length. JavaScript, and so a form of Prefect, loses digits
    # beyond 53 bits.
    if isinstance(value, int) and abs(value) > WHOLE_MAX:
        return f"an integer of {value.bit_length()} bits, expected at most 53"
    # `not … <=` refuses NaN as well, for which every comparison is false.
    if isinstance(value, float) and not abs(value) <= FRACTION_MAX and not any_float:
        return f"{value}: expected a finite number of at most {FRACTION_MAX:.0e}"
    if depth > DEPTH_MAX:
        return f"nested more than {DEPTH_MAX} deep"
    if isinstance(value, Mapping):
        # YAML allows keys such as 1 and true, and JSON would turn them into text without a word.
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


# The validation context for documents that Holdfast itself recorded.
RECORDED: Final[Mapping[str, Any]] = {"is_recorded": True}
# Keys that the program or a shell reads. Their values may have several lines.
_SEVERAL_LINES: Final = frozenset({"command", "environment", "config", "setup"})


def is_recorded(info: ValidationInfo) -> bool:
    """True when Holdfast recorded the document, as opposed to new input from a user."""
    # Identity, not equality: an equal context of someone else does not count.
    return info.context is RECORDED


class SpecPart(BaseModel):
    """A frozen, keyword-only part of a spec that refuses unknown keys.

    Recorded specs are read with `RECORDED` as the context. The rules for new specs then do not
    apply, because a run must survive an upgrade that makes them stricter. Types and bounds always
    apply, and keys of newer versions are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)
    # Without `strict`, pydantic takes `true` for 1 and text for a number, see decision 88.
    # Text is not a number, a number is not text, and true and false are neither. The plugin of mypy
    # does not see it here, so Python code may give tables for parts.
    model_config["strict"] = True

    @classmethod
    def read(cls, recorded: Any) -> Self:
        """Return a part that some version of Holdfast recorded. Raises `ValueError`."""
        return cls.model_validate(recorded, context=RECORDED)

    @model_validator(mode="before")
    @classmethod
    def _newer_keys_are_passed_over(cls, data: Any, info: ValidationInfo) -> Any:
        # A newer version added the key. An older one must still show and stop the run, see
        # decision 44. In a new spec, an unknown key is a misspelt one.
        if not is_recorded(info) or not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields}

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        """Take the lists of TOML, YAML and JSON for tuples, and change no other type."""
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        return {
            key: tuple(value)
            if isinstance(value, list) and key in fields and _is_tuple(fields[key].annotation)
            else value
            for key, value in data.items()
        }

    @model_validator(mode="after")
    def _values_can_be_used(self, info: ValidationInfo) -> Self:
        for name, value in self:
            # Rules for values that a person gives were applied when they were given. A live run
            # must stay readable when they become stricter, see decision 44.
            several_lines = name in _SEVERAL_LINES or is_recorded(info)
            is_optional = type(self).model_fields[name].default is None
            if value == "" and is_optional and not is_recorded(info):
                raise ValueError(
                    f"{name}: given empty text; expected a value, or leave the key out"
                )
            if problem := problem_with_value(
                value, several_lines=several_lines, any_float=name in _SEVERAL_LINES
            ):
                raise ValueError(f"{name}: {problem}")
        return self


def _is_tuple(annotation: Any) -> bool:
    kinds = [annotation] if get_origin(annotation) is tuple else get_args(annotation)
    return any(get_origin(kind) is tuple for kind in kinds)


def part_of(annotation: Any) -> type[SpecPart] | None:
    """Return the part that a field holds, alone, in a list or as one of several types, or None."""
    kinds = [annotation, *get_args(annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, SpecPart)), None)


def unknown_keys(recorded: Mapping[str, Any], model: type[SpecPart], where: str = "") -> list[str]:
    """Return the dotted names of the keys in a recorded spec that this version does not know."""
    found = []
    for key, value in recorded.items():
        field = model.model_fields.get(key)
        if field is None:
            found.append(f"{where}{key}")
            continue
        part = part_of(field.annotation)
        if part is not None and isinstance(value, Mapping):
            found += unknown_keys(value, part, f"{where}{key}.")
    return found


def section(spec: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the section under `names`, each inside the one before; empty if it is not a table."""
    found: Any = spec
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
