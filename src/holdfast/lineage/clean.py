"""Values from outside as every database can store them, and rows without secrets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast.contracts.redaction import redact
from holdfast.lineage.rows import RunRows


def clean(value: Any) -> Any:
    """`value` as every database can store it; itself where it can be stored as it is.

    PostgreSQL takes neither NUL characters nor NaN in a document; programs' tracebacks and
    metrics have both.
    """
    return value if _is_clean(value) else _cleaned(value)


def _is_clean(value: Any) -> bool:
    # Asked of every row: a plain loop takes a fifth of the time of calls for each value.
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str or "\0" in key:
                return False
        value = value.values()
    elif kind is not list:
        value = (value,)
    for item in value:
        kind = type(item)
        if kind is str:
            if "\0" in item:
                return False
        elif kind is float:
            if not math.isfinite(item):
                return False
        elif kind is dict or kind is list:
            if item and not _is_clean(item):
                return False
        elif item is not None and kind is not int and kind is not bool:
            return False
    return True


def _cleaned(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is int or kind is bool:
        return value
    if isinstance(value, str):
        return value.replace("\0", "\ufffd") if "\0" in value else value
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {_cleaned(str(key)): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return value


def redacted(rows: RunRows, secrets: Sequence[str]) -> RunRows:
    """The rows without secrets, which the database and whoever reads it are not told."""
    run = {**rows.run, "spec": redact(rows.run["spec"], secrets)}
    run["reason"] = redact(run["reason"], secrets)
    told = ("evidence", "reason", "traceback")
    attempts = [
        {**row, **{key: redact(row[key], secrets) for key in told}} for row in rows.attempts
    ]
    noted = ("detail", "pin_note", "deleted_reason")
    checkpoints = [
        {**row, **{key: redact(row[key], secrets) for key in noted}} for row in rows.checkpoints
    ]
    return replace(rows, run=run, attempts=attempts, checkpoints=checkpoints)
