"""Captured endings on disk: small JSON records without the names of the machine they came from."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).with_name("captured")
CHECKOUT: Final = Path(__file__).resolve().parents[2]
TAIL_CHARACTERS: Final = 1500
TEXT_CHARACTERS_MAX: Final = 6000
_ADDRESS: Final = re.compile(r"\b(?!127\.|0\.0\.0\.0)\d{1,3}(\.\d{1,3}){3}\b")


def write_record(
    name: str, inputs: Mapping[str, Any], *, private: Mapping[str, str], folder: Path = FOLDER
) -> Path:
    """Write a captured record; `private` maps texts of this machine to their replacements."""
    known = {
        str(CHECKOUT): "/holdfast",
        **{str(Path(p).resolve()): "/python" for p in (sys.prefix, sys.base_prefix)},
        sys.prefix: "/python",
        socket.gethostname(): "host",
    }
    words = sorted({**known, **private}.items(), key=lambda pair: -len(pair[0]))

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(each) for each in value]
        if not isinstance(value, str):
            return value
        for found, kept in words:
            value = value.replace(found, kept)
        return _ADDRESS.sub("10.0.0.1", value)[-TEXT_CHARACTERS_MAX:]

    record = {"name": name, "confirmed": True, "inputs": clean(dict(inputs))}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return path


def read_record(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return record


def recorded_names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))
