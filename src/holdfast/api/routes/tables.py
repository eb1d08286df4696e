"""Tables as files: CSV for spreadsheets, and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from fastapi import Response

from holdfast.api.schemas import RunLine

TableFormat = Literal["csv", "json"]
TABLE_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "content": {
            "text/csv": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
        }
    }
}
_TYPES: Final = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
# A spreadsheet takes a cell that begins so for a formula, which could send its data elsewhere.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
# Of a run's account of its time.
_GOODPUT: Final = {
    "goodput": "ettr",
    "total_s": "total_s",
    "gpu_hours": "gpu_hours",
    "steps_lost": "steps_lost",
    "cost": "cost",
    "currency": "currency",
}
RUN_COLUMNS: Final = (
    *("run", "name", "uid", "state", "cause", "reason", "created_by", "partition", "step"),
    *("live_step", "steps_total", "world_size", "attempts", "job_id", "created_at", "updated_at"),
    *("ended_at", "committed_at", "root", "path", "spec_digest", "forked_from", "tags"),
)
TABLE_COLUMNS: Final = (*RUN_COLUMNS, *_GOODPUT)


def run_facts(line: RunLine) -> dict[str, Any]:
    """Return the columns of a run: its own, and the totals of its account."""
    row: Mapping[str, Any] = line
    account = row["goodput"] if isinstance(row["goodput"], dict) else {}
    own = {name: row.get(name) for name in RUN_COLUMNS}
    return own | {name: account.get(key) for name, key in _GOODPUT.items()}


def table_of(
    name: str,
    rows: Iterable[dict[str, Any]],
    form: TableFormat,
    columns: Sequence[str] = TABLE_COLUMNS,
) -> Response:
    """Return `rows` as a file to download. All rows have the columns of the first one.

    `columns` are those of a table without rows.
    """
    found = list(rows)
    content = json.dumps(found, indent=1) if form == "json" else _csv(found, columns)
    disposition = f'attachment; filename="holdfast-{name}.{form}"'
    headers = {"Content-Disposition": disposition, "Cache-Control": "no-store"}
    return Response(content, media_type=_TYPES[form], headers=headers)


def _csv(rows: list[dict[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    names = list(rows[0]) if rows else columns
    writer.writerow(names)
    writer.writerows([_cell(row[name]) for name in names] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
