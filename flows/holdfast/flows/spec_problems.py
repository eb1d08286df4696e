"""Problems with a spec, one line each: key, given value, expected value, what to do."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.part import part_of
from holdfast.workers.runs.preflight import is_python

GIVEN_CHARACTERS_MAX: Final = 80
_NEAR: Final = 0.6
# Tables whose problems begin with the name of an entry.
_OF_NAMES: Final = frozenset({"environment", "config"})
# Keys whose value is a part of a command line. The others with lists have one element a line.
_EXPECTED: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a table of keys",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
}
# The unit of a number, by the end of its key.
_UNIT: Final = re.compile(r"_(s|hours|gb|(?:after|timeout|limit|age_max)_min)(?:_per_\w+|\.\w+)?$")
_UNITS: Final = {
    "s": "seconds",
    "hours": "hours",
    "gb": "GB",
    "after_min": "minutes",
    "timeout_min": "minutes",
    "limit_min": "minutes",
    "age_max_min": "minutes",
}
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
        part = part_of(field.annotation)
        if part is None:
            continue
        inside = table[key]
        if isinstance(inside, dict):
            problems += drop_unknown_keys(inside, part, f"{here}.")
        elif isinstance(inside, list):
            for number, one in enumerate(inside):
                if isinstance(one, dict):
                    problems += drop_unknown_keys(one, part, f"{here}[{number}].")
    return problems


def is_text(keys: Sequence[str], model: type[BaseModel]) -> bool:
    """Return True if the value of a key, given by its parts, can only be text."""
    if keys[0] == "environment":
        return len(keys) > 1
    kind: Any = model
    for key in keys:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(key)
            kind = None if field is None else part_of(field.annotation) or field.annotation
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
    kinds = {one for one in _kinds(kind) if one is not type(None)}
    return kinds == {str}


def _kinds(kind: Any) -> list[Any]:
    """Return the types of an annotation: a literal has those of its values."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return [type(value) for value in get_args(kind)]
    if get_origin(kind) in {Union, UnionType}:
        return [one for each in get_args(kind) for one in _kinds(each)]
    return [kind]


def describe_errors(
    errors: Sequence[ErrorDetails],
    table: Mapping[str, Any],
    model: type[BaseModel],
    problems: Sequence[str],
) -> list[str]:
    """Return pydantic's errors about `table` as lines: key, given, expected and what to do.

    A key that may have several types has an error for each, and one line. `problems` are those
    that are known: a missing key is left out if one of them suggests it for a misspelt one.
    """
    groups: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        if not is_answered(error, problems):
            groups.setdefault(_key_of(error, table), []).append(error)
    lines = []
    for where, found in groups.items():
        if found[0]["type"] == "too_short" and any(one.startswith(f"{where}[") for one in groups):
            # Entries that are wrong do not count, and have lines of their own.
            continue
        own = [each for each in found if each["type"] == "value_error"]
        lines += [_own_text(where, each, model) for each in own]
        lines += [] if own else [_describe(where, found, model)]
    return lines


def _key_of(error: ErrorDetails, table: Mapping[str, Any]) -> str:
    """Return the key of an error as it was written, without the names of pydantic's types."""
    loc = error["loc"][:-2] if "[key]" in error["loc"] else error["loc"]
    words, at = "", cast(Any, table)
    for part in loc:
        if isinstance(at, Mapping) and part in at:
            words, at = f"{words}.{part}" if words else str(part), at[part]
        elif isinstance(at, list | tuple) and isinstance(part, int) and part < len(at):
            words, at = f"{words}[{part}]", at[part]
    if error["type"] == "missing":
        words = f"{words}.{loc[-1]}" if words else str(loc[-1])
    return words


def _own_text(where: str, error: ErrorDetails, model: type[BaseModel]) -> str:
    """Return the text of an error of Holdfast's own. It may begin with the key or its last part."""
    text = error["msg"].removeprefix("Value error, ")
    begin = text.partition(":")[0].partition(" ")[0]
    if not where or begin.startswith(f"{where}."):
        return text
    field = _field(where, model)
    part = part_of(field.annotation) if field else None
    is_inside = begin in part.model_fields if part else where in _OF_NAMES
    return f"{where}.{text}" if is_inside else f"{where}: {text}"


def _describe(where: str, found: Sequence[ErrorDetails], model: type[BaseModel]) -> str:
    error = found[0]
    if error["type"] == "missing":
        return f"{where}: missing; expected {_field_description(where, model)}; add it to the spec"
    given = shorten(error["input"])
    if error["type"] == "tuple_type":
        return f"{where}: given {given}; expected {_expected_list(where, error['input'])}"
    expected = " or ".join(dict.fromkeys(_expected(each, where) for each in found))
    if len(found) > 1 and (field := _field(where, model)) is not None and field.description:
        expected += f" ({field.description.partition('. ')[0]})"
    near = next(filter(None, map(_nearest_choice, found)), "")
    is_key = "[key]" in error["loc"]
    step = "fix the key" if is_key else f"fix it or use --set {where.partition('[')[0]}=…"
    return f"{where}: given {given}; expected {expected}{near}; {step}"


def _field(where: str, model: type[BaseModel]) -> FieldInfo | None:
    """Return the field of a key, or None."""
    kind: type[BaseModel] | None = model
    field = None
    for name in where.split("."):
        field = kind.model_fields.get(name.partition("[")[0]) if kind else None
        kind = part_of(field.annotation) if field else None
    return field


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
        if part := part_of(field.annotation):
            found += _places(key, part, f"{where}{name}.")
    return found


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


def _expected(error: ErrorDetails, where: str) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    if error["type"] in _EXPECTED:
        unit = _UNIT.search(where) if "number" in _EXPECTED[error["type"]] else None
        return _EXPECTED[error["type"]] + (f" of {_UNITS[unit[1]]}" if unit else "")
    if "expected" in context:
        return str(context["expected"])
    if error["type"] in {"too_short", "too_long"}:
        if "max_length" in context:
            return f"at most {counted(context['max_length'], 'item')}"
        return f"{counted(context['min_length'], 'item')} or more"
    text = error["msg"].removeprefix("Input should be ")
    return text[:1].lower() + text[1:]


def _nearest_choice(error: ErrorDetails) -> str:
    """Return a suggestion if the expected value is one of a fixed set."""
    context: Mapping[str, Any] = error.get("ctx") or {}
    choices = [part.strip("' ") for part in str(context.get("expected", "")).split(",")]
    choices = [choice.strip("' ") for part in choices for choice in part.split("' or '")]
    close = nearest(str(error["input"]), choices) if isinstance(error["input"], str) else None
    return f" (did you mean {close}?)" if close else ""
