"""Converts external values to ones that every database can store, and removes secrets from rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from holdfast.contracts.redaction import redact
from holdfast.lineage.ingest.disk import Row

# The columns that can contain text of the program, of operators or of the spec.
MASKED: Final = (
    *("spec", "reason", "evidence", "traceback", "detail", "pin_note", "deleted_reason"),
)


def clean(value: Any) -> Any:
    """Return `value` in a form that every database can store; `value` itself if possible.

    PostgreSQL accepts neither NUL characters nor NaN in a document. Tracebacks and metrics can
    contain both.
    """
    # The same object if nothing must change, because nearly no value has to.
    return value if _is_clean(value) else _cleaned(value)


def _is_clean(value: Any) -> bool:
    # Called for every row: a plain loop takes a fifth of the time of a call per value.
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


def redacted(row: Row, secrets: Sequence[str]) -> Row:
    """Return a row with secrets masked: the database must not contain any."""
    # The database has other readers than the folder, such as a backup or another account's server.
    return row | {key: redact(row[key], secrets) for key in MASKED if key in row}
