"""From what a person gives (a file or a table, and overrides) to a `RunSpec`. No Prefect here.

All problems are found before the first is told: unknown keys, wrong values and overrides that
cannot be meant come back together in one `SpecError`.
"""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from holdfast.contracts.errors import ForeignFileError, SpecError
from holdfast.contracts.reading import read_bounded
from holdfast.contracts.spec import RunSpec
from holdfast.flows.spec_problems import describe_error, drop_unknown_keys, is_answered

SPEC_BYTES_MAX: Final = 4 * 1024 * 1024
YAML_VALUES_MAX: Final = 200_000
_TOML: Final = frozenset({".toml"})
_YAML: Final = frozenset({".yaml", ".yml"})


def load_spec(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    base: Path | None = None,
) -> RunSpec:
    """The `RunSpec` that `source` and `overrides` (`a.b.c=value`) say together.

    `source` is a TOML or YAML file, or the table itself. The working directory becomes absolute:
    relative to the file's folder, or to `base` (the current directory unless given) for a table.
    Raises `SpecError` with every problem found.
    """
    if isinstance(source, Mapping):
        table, origin = copy.deepcopy(dict(source)), "the spec"
        folder = base or Path.cwd()
    else:
        path = Path(source).expanduser().absolute()
        table, origin = read_spec_file(path), str(path)
        folder = path.parent
    problems = _apply(table, overrides)
    problems += drop_unknown_keys(table, RunSpec)
    spec = None
    try:
        spec = RunSpec.model_validate(table)
    except ValidationError as error:
        unanswered = [each for each in error.errors() if not is_answered(each, problems)]
        problems += [describe_error(each, RunSpec) for each in unanswered]
    if problems or spec is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise SpecError(f"{origin}: {count}; nothing was queued{listing}", problems)
    return resolve_directory(spec, folder)


def resolve_directory(spec: RunSpec, folder: Path) -> RunSpec:
    """`spec` with its working directory absolute, links resolved as `os.getcwd` would say it."""
    directory = (folder / Path(spec.launch.working_directory).expanduser()).resolve()
    launch = spec.launch.model_copy(update={"working_directory": str(directory)})
    return spec.model_copy(update={"launch": launch})


def read_spec_file(path: Path) -> dict[str, Any]:
    """The table in a TOML or YAML file; `SpecError` names the line that cannot be read."""
    kind = path.suffix.lower()
    if kind not in _TOML | _YAML:
        raise SpecError(f"{path}: ends in {kind or 'nothing'}; expected .toml, .yaml or .yml")
    try:
        # Links are followed: which file this is, is the caller's own word.
        text = read_bounded(path.resolve(), SPEC_BYTES_MAX).decode("utf-8")
    except FileNotFoundError as error:
        raise SpecError(
            f"{path}: no such file; give the path of a run spec (a relative path counts from "
            f"the current directory, {Path.cwd()})"
        ) from error
    except ForeignFileError as error:
        raise SpecError(f"{path}: {error.problem}; expected a run spec") from error
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        # Links that lead in a circle are a RuntimeError.
        raise SpecError(f"{path}: cannot be read: {error}") from error
    try:
        table = _parse_toml(path, text) if kind in _TOML else _parse_yaml(path, text)
    except RecursionError as error:
        raise SpecError(f"{path}: nested too deep; expected a run spec") from error
    if not isinstance(table, dict):
        raise SpecError(f"{path}: holds a {type(table).__name__}; expected a table of keys")
    return table


def parse_override(text: str) -> tuple[list[str], Any]:
    """The keys and the value of `a.b.c=value`; the value is read as TOML, else it is a string.

    Raises `SpecError` when there is no `=` or a key is empty.
    """
    name, equals, given = text.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or not all(keys):
        raise SpecError(
            f"--set {text}: expected key=value, with dots between the levels, such as "
            "--set resources.nodes=2"
        )
    value = _toml_value(given.strip())
    # Environment variables are strings, so OMP_NUM_THREADS=4 must not become a number.
    if keys[0] == "environment" and not isinstance(value, str | dict):
        value = given.strip()
    return keys, value


def _toml_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    # A second line, or a date, is not what anybody means by one plain value.
    plain = len(table) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if plain else text


def _apply(table: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set every override in `table`; returns a line for each that cannot be set."""
    problems = []
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
    return problems


def _parse_toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not TOML: {error}; mend that line") from error


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _count_values(tree, {})
        if values > YAML_VALUES_MAX:
            raise SpecError(
                f"{path}: its aliases make {values:.3g} values of it, expected at most "
                f"{YAML_VALUES_MAX}; write them out, or leave them away"
            )
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise SpecError(f"{path}: not YAML: {error.problem}{place}; mend that line") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # A date that no calendar has is a ValueError.
        raise SpecError(f"{path}: not YAML: {error}; mend that line") from error


def _count_values(node: Any, known: dict[int, float]) -> float:
    """How many values a YAML tree has once its aliases are written out; one in itself has no end.

    Each node is counted once: an alias of an alias doubles with every level.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_table = isinstance(node, yaml.MappingNode)
        children = [each for pair in node.value for each in pair] if is_table else node.value
        known[id(node)] = 1 + sum(_count_values(child, known) for child in children)
    return known[id(node)]
