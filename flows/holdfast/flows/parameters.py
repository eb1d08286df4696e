"""Build a `RunSpec` from a file or a table, and overrides. Prefect is asked only for `blocks`.

One `SpecError` reports all problems together: unknown keys, wrong values and invalid overrides.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import ForeignFileError, NotFoundError, SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.part import part_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.written import BLOCK, DEFAULT, SET
from holdfast.workers.runs.preflight import is_python

# Problems with a spec, one line each: key, given value, expected value, what to do.

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
_OF_SEVERAL: Final = frozenset({"tuple_type", "dict_type", "model_type"})
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
            # Entries that are wrong do not count, and have separate lines.
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
    if error["type"] in _OF_SEVERAL and _is_json(error["input"]):
        return f'{where}: given {given}; expected TOML, such as {{name = "a"}}, and not JSON'
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


def _is_json(value: Any) -> bool:
    """Return whether a value is the text of a table or a list in JSON, which TOML reads as text."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return False
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _expected_list(where: str, value: Any) -> str:
    """Return what to write instead of `value`, which is not a list."""
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


SPEC_BYTES_MAX: Final = 4 * 1024 * 1024
DIRECTORY: Final = "launch.working_directory"
_TOML: Final = frozenset({".toml"})
_YAML: Final = frozenset({".yaml", ".yml"})


def load_spec(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    base: Path | None = None,
    *,
    known: Mapping[str, str] | None = None,
) -> RunSpec:
    """Return the `RunSpec` of `source` with the `overrides` (`a.b.c=value`) applied.

    `source` is a TOML or YAML file, or a table. The working directory becomes absolute. A relative
    one starts at the file's folder or, for a table, at `base` (by default, the current directory).
    `known` are the origins of keys in a table that another run recorded.
    Raises `SpecError` with every problem, and `ServiceError` if a block of Prefect cannot be read.
    """
    if isinstance(source, Mapping):
        table, origin = copy.deepcopy(dict(source)), "the spec"
        folder = base or Path.cwd()
    else:
        path = Path(source).expanduser().absolute()
        table, origin = read_spec_file(path), str(path)
        folder = path.parent
    # Before the unknown keys are dropped, so that an override of an unknown key is reported too.
    problems, set_keys = _apply(table, overrides)
    problems += drop_unknown_keys(table, RunSpec)
    origins = {**(known or {}), **dict.fromkeys(set_keys, SET)}
    # Prefect is not asked for a spec that is refused anyway.
    if table.get("blocks") and not problems:
        from holdfast.flows.blocks import with_blocks

        table, of_blocks = with_blocks(table)
        origins |= dict.fromkeys(of_blocks, BLOCK)
    spec = None
    try:
        spec = RunSpec.model_validate(table)
    except ValidationError as error:
        found = describe_errors(error.errors(), table, RunSpec, problems)
        # Keys without an effect are one error with a line for each.
        problems += [line for each in found for line in each.splitlines()]
    if problems or spec is None:
        count = counted(len(problems), "problem")
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise SpecError(f"{origin}: {count}; nothing was queued{listing}", problems)
    return resolve_directory(spec.with_origins(origins), folder)


def resolve_directory(spec: RunSpec, folder: Path) -> RunSpec:
    """Return `spec` with an absolute working directory, with links resolved as by `os.getcwd`.

    The paths of a Python interpreter and of a wrapper become absolute too, from that directory.
    Their links stay, because a virtual environment is one. In a container, the interpreter's path
    is one of the image.
    """
    directory = (folder / Path(spec.launch.working_directory).expanduser()).resolve()
    changed: dict[str, Any] = {"working_directory": str(directory)}
    python, launch, wrapper = spec.launch.python, spec.launch, spec.launch.wrapper
    if "/" in python and not (launch.container or wrapper):
        changed["python"] = str(directory / Path(python).expanduser())
    # A supervisor starts a job's wrapper from another directory.
    if wrapper and "/" in wrapper[0] and not launch.container:
        changed["wrapper"] = (str(directory / Path(wrapper[0]).expanduser()), *wrapper[1:])
    found = spec.model_copy(update={"launch": launch.model_copy(update=changed)})
    # A directory that nobody wrote counts as a default, although it is absolute now, see
    # decision 88.
    if DIRECTORY in spec.sources:
        return found
    return found.with_origins({**spec.origins, DIRECTORY: DEFAULT})


def read_spec_file(path: Path) -> dict[str, Any]:
    """Return the table in a TOML or YAML file. Raises `SpecError` with the line of an error.

    Raises `NotFoundError` for a file that does not exist.
    """
    kind = path.suffix.lower()
    if kind not in _TOML | _YAML:
        raise SpecError(f"{path}: ends in {kind or 'nothing'}; expected .toml, .yaml or .yml")
    try:
        # Links are followed, because the caller chose the path.
        text = read_bounded(path.resolve(), SPEC_BYTES_MAX).decode("utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path}: no such file. Expected the path of a run spec; a relative path starts at "
            f"the current directory, {Path.cwd()}."
        ) from error
    except ForeignFileError as error:
        raise SpecError(f"{path}: {error.problem}; expected a run spec") from error
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        # A loop of symbolic links raises RuntimeError.
        raise SpecError(f"{path}: cannot be read: {error}") from error
    try:
        table = _parse_toml(path, text) if kind in _TOML else _parse_yaml(path, text)
    except RecursionError as error:
        raise SpecError(f"{path}: nested too deep; expected a run spec") from error
    if not isinstance(table, dict):
        kind = {type(None): "nothing", list: "a list"}.get(type(table), "a single value")
        raise SpecError(f"{path}: contains {kind}; expected a table of keys")
    return table


def parse_override(text: str) -> tuple[list[str], Any]:
    """Return the keys and the value of `a.b.c=value`, read by the type of the key.

    A key of text takes the text as it is, or without its quotes. Other values are TOML, and text if
    they are not. Raises `SpecError` if there is no `=` or a key is empty.
    """
    name, equals, given = text.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or not all(keys):
        raise SpecError(
            f"--set {text}: expected key=value with dots between the levels, such as "
            "--set resources.nodes=2"
        )
    value = _toml_value(given.strip())
    # A reference to a secret is a table.
    if not isinstance(value, str | dict) and is_text(keys, RunSpec):
        value = given.strip()
    return keys, value


def _toml_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    # A value with a second line, or a date, is read as a string.
    plain = len(table) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if plain else text


def _apply(table: dict[str, Any], overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Set every override in `table`.

    Returns a line for each override that cannot be set, and the keys that were set.
    """
    problems, done = [], []
    for text in overrides:
        try:
            keys, value = parse_override(text)
        except SpecError as error:
            problems.append(str(error))
            continue
        level: Any = table
        for depth, key in enumerate(keys[:-1]):
            level = level.setdefault(key, {})
            if not isinstance(level, dict):
                where = ".".join(keys[: depth + 1])
                problems.append(f"--set {text}: {where} is {json.dumps(level)}, not a table")
                break
        else:
            level[keys[-1]] = value
            done.append(".".join(keys))
    return problems, done


def _parse_toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not TOML: {error}; fix that line") from error


def _parse_yaml(path: Path, text: str) -> Any:
    # Most commands read no YAML, and the library takes a while to import.
    from holdfast.flows.spec_yaml import parse_yaml

    return parse_yaml(path, text)


# The type of a flow's parameter `spec`, from which Prefect draws a form and validates input.
#
# A flow gets what was given, unchanged: a run spec must be read with its overrides, and a recorded
# spec by other rules. Prefect's server validates by the schema of `RunSpec` before anything runs.

SpecPath = Annotated[
    str,
    Field(
        title="Path of a spec",
        description="absolute path of a TOML or YAML file, where the flow runs",
        # Prefect prints schemas as markup of rich, in which `[/` closes a tag.
        pattern=r"^(/|~).*\.(toml|ya?ml)$",
    ),
]


class _Form:
    """Accepts any value; its schema is that of `kind`."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # Any value, because a spec is read with its overrides, and a recorded one by other rules.
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(TypeAdapter(self._kind).core_schema)


# A run spec, the path of one, or nothing. Of a choice, Prefect's UI cannot mark the wrong key.
SpecParameter = Annotated[dict[str, Any] | str | None, _Form(RunSpec | SpecPath | None)]
# A run spec, whose wrong keys Prefect's UI marks.
SpecTable = Annotated[dict[str, Any], _Form(RunSpec)]
