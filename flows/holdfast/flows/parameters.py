"""Build a `RunSpec` from a file or a table, and overrides. Prefect is asked only for `blocks`.

One `SpecError` reports all problems together: unknown keys, wrong values and invalid overrides.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import ForeignFileError, NotFoundError, SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.written import BLOCK, DEFAULT, SET
from holdfast.flows.spec_problems import describe_errors, drop_unknown_keys, is_text

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
    problems, set_keys = _apply(table, overrides)
    problems += drop_unknown_keys(table, RunSpec)
    origins = {**(known or {}), **dict.fromkeys(set_keys, SET)}
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

    The path of a Python interpreter becomes absolute too, from that directory. Its links stay,
    because a virtual environment is one. In a container, the path is one of the image.
    """
    directory = (folder / Path(spec.launch.working_directory).expanduser()).resolve()
    changed = {"working_directory": str(directory)}
    python, launch = spec.launch.python, spec.launch
    if "/" in python and not (launch.container or launch.wrapper):
        changed["python"] = str(directory / Path(python).expanduser())
    found = spec.model_copy(update={"launch": launch.model_copy(update=changed)})
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
        raise SpecError(f"{path}: contains a {type(table).__name__}; expected a table of keys")
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
