"""What is wrong with a spec, in one line per problem: where, given, expected, what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import ErrorDetails

GIVEN_CHARACTERS_MAX: Final = 80
_NEAR: Final = 0.6


def drop_unknown_keys(table: dict[str, Any], model: type[BaseModel], where: str = "") -> list[str]:
    """Take the keys out of `table` that `model` does not have, at every level of the spec.

    Returns a line for each, with the nearest known key, so that the rest can still be checked.
    """
    problems = []
    for key in list(table):
        here = f"{where}{key}"
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            problems.append(f"{here}: unknown key; {_advice(str(key), model, where)}")
            del table[key]
            continue
        part = _part(field.annotation)
        if part is not None and isinstance(table[key], dict):
            problems += drop_unknown_keys(table[key], part, f"{here}.")
    return problems


def describe_error(error: ErrorDetails, model: type[BaseModel]) -> str:
    """One of pydantic's errors as where, given, expected and what to do."""
    is_key = "[key]" in error["loc"]
    where = ".".join(str(part) for part in (error["loc"][:-2] if is_key else error["loc"]))
    if error["type"] == "missing":
        return f"{where}: missing; expected {_field_words(where, model)}; add it to the spec"
    if error["type"] == "value_error":
        text = error["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if where else text
    given = shorten(error["input"])
    expected = _expected(error)
    near = _nearest_choice(error)
    step = "mend the key" if is_key else f"mend it or --set {where}=…"
    return f"{where}: given {given}; expected {expected}{near}; {step}"


def is_answered(error: ErrorDetails, problems: Sequence[str]) -> bool:
    """True for a missing key that one of `problems` already takes a misspelt one for."""
    where = ".".join(map(str, error["loc"]))
    return error["type"] == "missing" and any(
        line.endswith(f"did you mean {where}?") for line in problems
    )


def shorten(value: Any) -> str:
    """`value` as JSON for a message, cut to `GIVEN_CHARACTERS_MAX` characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= GIVEN_CHARACTERS_MAX else f"{text[: GIVEN_CHARACTERS_MAX - 1]}…"


def nearest(word: str, known: list[str]) -> str | None:
    """The member of `known` that `word` was most likely meant to be, or None."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=_NEAR)
    return found[0] if found else None


def _advice(key: str, model: type[BaseModel], where: str) -> str:
    """What to write instead of `key`: the same key of another table, else the nearest here."""
    known = sorted(model.model_fields)
    if places := _places(key, model):
        return f"did you mean {where}{places[0]}?"
    if close := nearest(key, known):
        return f"did you mean {where}{close}?"
    return f"known here: {', '.join(known)}"


def _places(key: str, model: type[BaseModel], where: str = "") -> list[str]:
    """Where below `model` a field with the name `key` stands, as dotted names."""
    found = []
    for name, field in model.model_fields.items():
        if name == key and where:
            found.append(f"{where}{name}")
        if part := _part(field.annotation):
            found += _places(key, part, f"{where}{name}.")
    return found


def _part(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field, when the field is a table of the spec."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def _field_words(where: str, model: type[BaseModel]) -> str:
    field = model.model_fields.get(where)
    if where == "command":
        return 'the program\'s own argv, such as ["train.py"]'
    return (field.description if field else None) or "a value"


def _expected(error: ErrorDetails) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    if "expected" in context:
        return str(context["expected"])
    if error["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        return "a table of keys"
    text = error["msg"].removeprefix("Input should be ")
    return text[:1].lower() + text[1:]


def _nearest_choice(error: ErrorDetails) -> str:
    """For a word out of a fixed set, the nearest member as a question."""
    context: Mapping[str, Any] = error.get("ctx") or {}
    choices = [part.strip("' ") for part in str(context.get("expected", "")).split(",")]
    choices = [word.strip("' ") for part in choices for word in part.split("' or '")]
    close = nearest(str(error["input"]), choices) if isinstance(error["input"], str) else None
    return f" (did you mean {close}?)" if close else ""
