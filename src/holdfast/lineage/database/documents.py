"""JSON columns, read so that no row can break a query or its reader.

Ingest writes only documents of the expected shape. A row may still have another one: an
administrator changed it by hand, or a tool copied the database. SQLite even stores text that is not
JSON. Such a document counts as empty, and odd items of a list as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import orjson
from sqlalchemy import JSON, Column, ColumnElement, Dialect, Double, TypeDecorator, literal_column
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


def parse_json(content: str | bytes) -> Any:
    """Return a document, or None if it is not JSON, is too deep, or has NaN or a lone surrogate."""
    try:
        return orjson.loads(content)
    except ValueError:
        return None


def facts_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def texts_of(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def numbers_of(value: Any) -> list[float]:
    found = value if isinstance(value, list) else []
    return [one for one in found if type(one) in {int, float} and math.isfinite(one)]


def account_of(value: Any) -> dict[str, Any]:
    """Return an account of time and money: its numbers and its currency, by name."""
    found = facts_of(value)
    return {name: one for name, one in found.items() if _is_figure(name, one)}


def _is_figure(name: str, value: Any) -> bool:
    if name == "currency":
        return value is None or isinstance(value, str)
    return value is None or (type(value) in {int, float} and math.isfinite(value))


class DocumentColumn(TypeDecorator[Any]):
    """JSON that `read` turns into a value of the expected shape.

    PostgreSQL stores it as JSONB, whose dialect only a use of PostgreSQL imports.
    """

    impl = JSON
    cache_ok = True

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = read

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name != "postgresql":
            return dialect.type_descriptor(JSON())
        from sqlalchemy.dialects.postgresql import JSONB

        return dialect.type_descriptor(JSONB())

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return self.read(value)


class valid_json(FunctionElement[Any]):
    """A JSON column for operations inside SQL, such as `valid_json(column)["key"]`.

    It is NULL where SQLite would fail because the text is not JSON.
    """

    type = JSON()
    inherit_cache = True


@compiles(valid_json)
def _as_it_is(element: valid_json, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(valid_json, "sqlite")
def _if_valid(element: valid_json, compiler: SQLCompiler, **options: Any) -> str:
    column = compiler.process(element.clauses, **options)
    return f"CASE WHEN json_valid({column}) THEN {column} END"


class _NumberIn(FunctionElement[float]):
    type = Double()
    inherit_cache = True


@compiles(_NumberIn, "sqlite")
def _number_in_sqlite(element: _NumberIn, compiler: SQLCompiler, **options: Any) -> str:
    column, path = (compiler.process(one, **options) for one in element.clauses)
    return f"CASE WHEN json_valid({column}) THEN CAST(json_extract({column}, {path}) AS REAL) END"


@compiles(_NumberIn)
def _number_in_postgresql(element: _NumberIn, compiler: SQLCompiler, **options: Any) -> str:
    column, path = (compiler.process(one, **options) for one in element.clauses)
    # With `silent`, a value that is not a number is NULL. A cast would fail.
    number = f"jsonb_path_query_first({column}, ({path} || '.double()')::jsonpath, '{{}}', true)"
    return f"CAST({number} AS double precision)"


def number_in(column: Column[Any], key: str) -> ColumnElement[float]:
    """Return the number under `key` of a JSON column, NULL if it is none."""
    return _NumberIn(column, literal_column(f"'$.{key}'"))


ACCOUNT: Final = DocumentColumn(account_of)
OBJECT: Final = DocumentColumn(facts_of)
TEXTS: Final = DocumentColumn(texts_of)
NUMBERS: Final = DocumentColumn(numbers_of)
