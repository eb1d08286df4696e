"""Problems with a spec, one line each: key, given value, expected value, what to do."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from holdfast.workers.preflight import is_python

GIVEN_CHARACTERS_MAX: Final = 80
_NEAR: Final = 0.6
# Keys whose value is a part of a command line. The others with lists have one element a line.
_ARGUMENTS: Final = frozenset({"command", "wrapper", "container", "srun", "torchrun"})


def drop_unknown_keys(table: dict[str, Any], model: type[BaseModel], where: str = "") -> list[str]:
    """Remove the keys from `table` that `model` does not have, at every level of the spec.

    Returns a line for each, with the most similar known key. The rest can then be checked.
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
    """Return one of pydantic's errors as a line: key, given, expected and what to do."""
    is_key = "[key]" in error["loc"]
    where = ".".join(str(part) for part in (error["loc"][:-2] if is_key else error["loc"]))
    if error["type"] == "missing":
        return f"{where}: missing; expected {_field_description(where, model)}; add it to the spec"
    if error["type"] == "value_error":
        text = error["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if where else text
    given = shorten(error["input"])
    if error["type"] == "tuple_type":
        return f"{where}: given {given}; expected {_expected_list(where, error['input'])}"
    expected = _expected(error)
    near = _nearest_choice(error)
    step = "fix the key" if is_key else f"fix it or use --set {where}=…"
    return f"{where}: given {given}; expected {expected}{near}; {step}"


def is_answered(error: ErrorDetails, problems: Sequence[str]) -> bool:
    """Return whether one of `problems` already suggests this missing key for a misspelt one."""
    where = ".".join(map(str, error["loc"]))
    return error["type"] == "missing" and any(
        line.endswith(f"did you mean {where}?") for line in problems
    )


def shorten(value: Any) -> str:
    """Return `value` as JSON for a message, cut to `GIVEN_CHARACTERS_MAX` characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= GIVEN_CHARACTERS_MAX else f"{text[: GIVEN_CHARACTERS_MAX - 1]}…"


def nearest(word: str, known: list[str]) -> str | None:
    """Return the member of `known` that is most similar to `word`, or None."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=_NEAR)
    return found[0] if found else None


def _advice(key: str, model: type[BaseModel], where: str) -> str:
    """Suggest a key for `key`: the same one in another table, else the most similar one here."""
    known = sorted(model.model_fields)
    if places := _places(key, model):
        return f"did you mean {where}{places[0]}?"
    if close := nearest(key, known):
        return f"did you mean {where}{close}?"
    return f"known keys: {', '.join(known)}"


def _places(key: str, model: type[BaseModel], where: str = "") -> list[str]:
    """Return the dotted names of the fields below `model` that are named `key`."""
    found = []
    for name, field in model.model_fields.items():
        if name == key and where:
            found.append(f"{where}{name}")
        if part := _part(field.annotation):
            found += _places(key, part, f"{where}{name}.")
    return found


def _part(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a table of the spec, else None."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def _field_description(where: str, model: type[BaseModel]) -> str:
    field = model.model_fields.get(where)
    if where == "command":
        return 'the program\'s own argv, such as ["train.py"]'
    return (field.description if field else None) or "a value"


def _expected_list(where: str, value: Any) -> str:
    """Return what to write instead of `value`, which is no list."""
    if not isinstance(value, str):
        return "a list"
    if where.rpartition(".")[2] not in _ARGUMENTS:
        return f"a list: {json.dumps([value])}"
    try:
        words = shlex.split(value)
    except ValueError:
        # A quote is open, so the words are unknown.
        words = [value]
    if where == "command" and words and is_python(words[0]):
        return (
            f"a list of arguments: {json.dumps(words[1:])}, because torchrun starts Python itself, "
            f'or {json.dumps(words)} with program.launcher = "none"'
        )
    return f"a list of arguments: {json.dumps(words)}"


def _expected(error: ErrorDetails) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    if "expected" in context:
        return str(context["expected"])
    if error["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        return "a table of keys"
    text = error["msg"].removeprefix("Input should be ")
    return text[:1].lower() + text[1:]


def _nearest_choice(error: ErrorDetails) -> str:
    """Return a suggestion if the expected value is one of a fixed set."""
    context: Mapping[str, Any] = error.get("ctx") or {}
    choices = [part.strip("' ") for part in str(context.get("expected", "")).split(",")]
    choices = [choice.strip("' ") for part in choices for choice in part.split("' or '")]
    close = nearest(str(error["input"]), choices) if isinstance(error["input"], str) else None
    return f" (did you mean {close}?)" if close else ""
