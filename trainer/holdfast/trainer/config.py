"""The program's own settings: the `[config]` table of the run's spec.

Under an agent, the table comes from an environment variable, so that `--set config.x=…` reaches
the program without a change of its command line. Without an agent, the program reads the spec file.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from holdfast.contracts.environment import CONFIG
from holdfast.contracts.errors import SpecError


def config(default: str | Path | None = None) -> dict[str, Any]:
    """Return the `[config]` table: `$HOLDFAST_CONFIG` if set, else from the TOML spec `default`.

    If the run's spec has no settings, those of `default` count too, where that file exists.
    Raises `SpecError` if the value is not a table, or if there is neither variable nor spec.
    """
    given = os.environ.get(CONFIG)
    if given is not None:
        table = _table(_parse_json(given), f"${CONFIG}")
        if table or default is None or not Path(default).exists():
            return table
    if default is None:
        raise SpecError(f"no settings: expected ${CONFIG} to be set, or the path of a TOML spec")
    if not isinstance(default, str | Path) or not str(default):
        raise TypeError(f"default={default!r}: expected the path of a TOML spec")
    path = Path(default)
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give a run spec") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not TOML: {error}") from error
    return _table(document.get("config", {}), f"[config] of {path}")


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"${CONFIG}: not JSON ({error}); expected an object") from error


def _table(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{source}: {type(value).__name__}; expected a table of settings")
    return value
