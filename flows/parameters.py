"""Build a `RunSpec` from a file or a table, and overrides. Prefect is asked only for `blocks`.

One `SpecError` reports all problems together: unknown keys, wrong values and invalid overrides.
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
from holdfast.contracts.plain_text import counted
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
    """Return the `RunSpec` of `source` with the `overrides` (`a.b.c=value`) applied.

    `source` is a TOML or YAML file, or a table. The working directory becomes absolute. A relative
    one starts at the file's folder or, for a table, at `base` (by default, the current directory).
    Raises `SpecError` with every problem, and `ServiceError` if a block of Prefect cannot be read.
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
    if table.get("blocks") and not problems:
        from holdfast.flows.blocks import with_blocks

        table = with_blocks(table)
    spec = None
    try:
        spec = RunSpec.model_validate(table)
    except ValidationError as error:
        unanswered = [each for each in error.errors() if not is_answered(each, problems)]
        # Keys without an effect are one error with a line for each.
        problems += [
            line for each in unanswered for line in describe_error(each, RunSpec).splitlines()
        ]
    if problems or spec is None:
        count = counted(len(problems), "problem")
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise SpecError(f"{origin}: {count}; nothing was queued{listing}", problems)
    return resolve_directory(spec, folder)


def resolve_directory(spec: RunSpec, folder: Path) -> RunSpec:
    """Return `spec` with an absolute working directory, with links resolved as by `os.getcwd`.

    The path of a Python interpreter becomes absolute too, from that directory. Its links stay,
    because a virtual environment is one. In a container, the path is one of the image.
    """
    directory = (folder / Path(spec.launch.working_directory).expanduser()).resolve()
    changed = {"working_directory": str(directory)}
    python, launch = spec.launch.python, spec.launch
    if "/" in python and not (launch.container or launch.wrapper):
        changed["python"] = str(directory / Path(python).expanduser())
    return spec.model_copy(update={"launch": launch.model_copy(update=changed)})


def read_spec_file(path: Path) -> dict[str, Any]:
    """Return the table in a TOML or YAML file. Raises `SpecError` with the line of an error."""
    kind = path.suffix.lower()
    if kind not in _TOML | _YAML:
        raise SpecError(f"{path}: ends in {kind or 'nothing'}; expected .toml, .yaml or .yml")
    try:
        # Links are followed, because the caller chose the path.
        text = read_bounded(path.resolve(), SPEC_BYTES_MAX).decode("utf-8")
    except FileNotFoundError as error:
        raise SpecError(
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
        raise SpecError(f"{path}: contains a {type(table).__name__}; expected a table of keys")
    return table


def parse_override(text: str) -> tuple[list[str], Any]:
    """Return the keys and the value of `a.b.c=value`. A value that is not TOML is a string.

    Raises `SpecError` if there is no `=` or a key is empty.
    """
    name, equals, given = text.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or not all(keys):
        raise SpecError(
            f"--set {text}: expected key=value with dots between the levels, such as "
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
    # A value with a second line, or a date, is read as a string.
    plain = len(table) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if plain else text


def _apply(table: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set every override in `table`; return a line for each that cannot be set."""
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
        raise SpecError(f"{path}: not TOML: {error}; fix that line") from error


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _count_values(tree, {})
        if values > YAML_VALUES_MAX:
            raise SpecError(
                f"{path}: its aliases expand to {values:.3g} values; expected at most "
                f"{YAML_VALUES_MAX}. Remove aliases."
            )
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise SpecError(f"{path}: not YAML: {error.problem}{place}; fix that line") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # An impossible date raises ValueError.
        raise SpecError(f"{path}: not YAML: {error}; fix that line") from error


def _count_values(node: Any, known: dict[int, float]) -> float:
    """Return the number of values in a YAML tree after its aliases are expanded.

    The result is infinite for a node that contains itself. `known` has the counts so far, because
    nested aliases double the number with each level.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_table = isinstance(node, yaml.MappingNode)
        children = [each for pair in node.value for each in pair] if is_table else node.value
        known[id(node)] = 1 + sum(_count_values(child, known) for child in children)
    return known[id(node)]
