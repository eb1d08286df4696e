"""A JSON column with anything in it breaks no list and no route of the other rows.

No version writes such a row. An administrator's hand, a copied database or a restored backup may.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import String, Table, bindparam, select, text, type_coerce, update
from tests.api.conftest import Served, serving, wait_for
from tests.api.test_bad_rows import ROUTES
from tests.support.postgres import postgres_server
from tests.support.runs import RunFolder

from holdfast.api.app import create_app
from holdfast.lineage.database.documents import DocumentColumn
from holdfast.lineage.database.schema_changes import upgrade
from holdfast.lineage.database.sqlite_file import URL_VARIABLE
from holdfast.lineage.database.tables import TABLES

OTHER: Final = "gpt-b"
MORE_ROUTES: Final = (
    "/api/v1/runs?sort=goodput",
    "/api/v1/runs?sort=cost",
    "/api/v1/runs?partition=a100",
    "/api/v1/runs?account=vision",
    "/api/v1/runs?tag=night",
    "/api/v1/runs?attention=true",
    "/api/v1/runs/gpt/metrics",
    "/api/v1/runs/gpt/lineage?folded=true",
    "/api/v1/runs/gpt/capacity",
    "/api/v1/runs/gpt/errors",
    "/api/v1/runs/gpt/heartbeats",
    "/api/v1/runs/gpt/logs",
    "/api/v1/runs/gpt/log-files",
    "/api/v1/runs/gpt/heat-map",
    "/api/v1/runs/gpt/gpus",
    f"/api/v1/compare/runs?run=gpt&run={OTHER}",
    "/api/v1/goodput/groups?by=user",
    "/api/v1/goodput/groups?by=partition",
    "/api/v1/goodput/groups?by=account",
    "/api/v1/goodput/groups?by=tag",
    "/api/v1/filters",
    "/api/v1/queue",
    "/api/v1/attention",
    "/api/v1/nodes/node-a",
    "/api/v1/tables/runs?format=json",
    "/api/v1/tables/runs?format=csv",
    "/api/v1/tables/curves?run=gpt&format=json",
    f"/api/v1/runs/{OTHER}",
)
# Besides the page: the caller, a job of this server, a stream of changes, and bytes of log files.
WITHOUT_ROWS: Final = (
    "/api/v1/session",
    "/api/v1/jobs/",
    "/api/v1/events",
    "/api/v1/runs/{run}/logs/",
    "/api/v1/runs/{run}/log-files/",
)
COLUMNS: Final = {
    f"{table.name}.{column.name}": (table, column.name)
    for table in TABLES
    for column in table.columns
    if isinstance(column.type, DocumentColumn)
}
DEEP: Final = "[" * 900 + "]" * 900
TOO_DEEP: Final = "[" * 5000 + "]" * 5000
# JSON by what is odd about it. PostgreSQL refuses the last few, SQLite stores any text.
ODD: Final = {
    "null": "null",
    "a list": "[1]",
    "a text": '"x"',
    "a number": "5",
    "true": "true",
    "an object": '{"a": [null]}',
    "a deep list": DEEP,
    "a huge number": "1" + "0" * 400,
}
ONLY_SQLITE: Final = {"NaN": '{"loss": NaN}', "too deep": TOO_DEEP, "no JSON": "{", "empty": ""}
INNER: Final = {
    "null": None,
    "a list": [1],
    "a list of objects": [{"a": 1}],
    "a text": "x",
    "a number": -5,
    "a fraction": 1e300,
    "true": True,
    "an object": {"a": {"b": None}},
}


@pytest.fixture(
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=pytest.mark.more)],
)
def served(
    request: pytest.FixtureRequest,
    home: Path,
    sample_runs: dict[str, RunFolder],
    patched: pytest.MonkeyPatch,
) -> Iterator[Served]:
    if request.param == "sqlite":
        with serving(home, sample_runs) as one:
            yield one
        return
    with postgres_server() as server, server.database() as url:
        upgrade(url)
        patched.setenv(URL_VARIABLE, url)
        with serving(home, sample_runs) as one:
            yield one


def odd_ones(served: Served) -> dict[str, str]:
    is_postgresql = served.services.store.index.open().is_postgresql
    return ODD if is_postgresql else {**ODD, **ONLY_SQLITE}


def answers(served: Served) -> list[tuple[str, int, str]]:
    """The routes that fail, each with the status and the beginning of its answer."""
    with served.client() as client:
        found = [(route, client.get(route)) for route in (*ROUTES, *MORE_ROUTES)]
    return [(route, one.status_code, one.text[:300]) for route, one in found if not is_fine(one)]


def is_fine(answer: httpx.Response) -> bool:
    if answer.status_code != 200 or "json" not in answer.headers["content-type"]:
        return answer.status_code == 200
    # Strict: `json` of Python reads NaN, and a browser does not.
    json.loads(answer.text, parse_constant=pytest.fail)
    return True


@contextlib.contextmanager
def changed(
    served: Served, table: Table, name: str, change: Callable[[Any], str]
) -> Iterator[None]:
    """All rows of a table with another document: `change` gets the old one and returns text."""
    # Until the end of its first round, the server still writes the rows itself.
    wait_for(lambda: served.services.watch.lag_s() is not None)
    engine = served.services.store.index.open().engine
    keys = list(table.primary_key.columns)
    is_sqlite = engine.dialect.name == "sqlite"
    stored = type_coerce(table.c[name], String) if is_sqlite else table.c[name].cast(String)
    same = [column == bindparam(f"key_{column.name}") for column in keys]
    typed = ":document" if is_sqlite else "CAST(:document AS jsonb)"
    write = update(table).where(*same).values({name: text(typed)})
    with engine.begin() as connection:
        found = connection.execute(select(*keys, stored.label("old"))).all()
    assert found, f"{table.name} has no rows"
    before = [{f"key_{key.name}": row[i] for i, key in enumerate(keys)} for row in found]
    olds = [row.old for row in found]
    with engine.begin() as connection:
        for key, old in zip(before, olds, strict=True):
            connection.execute(write, {**key, "document": change(old)})
    try:
        yield
    finally:
        with engine.begin() as connection:
            for key, old in zip(before, olds, strict=True):
                connection.execute(write, {**key, "document": old})


def instead(document: str) -> Callable[[str], str]:
    return lambda _: document


def with_every_value(value: Any) -> Callable[[str], str]:
    """Replaces each value of a document."""

    def change(old: str) -> str:
        document = json.loads(old)
        if isinstance(document, list):
            return json.dumps([value] * max(1, len(document)))
        return json.dumps(dict.fromkeys(document or ("loss",), value))

    return change


def with_every_inner_value(value: Any) -> Callable[[str], str]:
    """Replaces each value inside the values of a document."""

    def change(old: str) -> str:
        document = json.loads(old)
        if not isinstance(document, dict):
            return json.dumps([[value]])
        return json.dumps(
            {
                key: dict.fromkeys(one or ("a",), value) if isinstance(one, dict) else [value] * 4
                for key, one in document.items()
            }
        )

    return change


def test_every_route_that_reads_rows_is_asked(served: Served) -> None:
    asked = {route.partition("?")[0] for route in (*ROUTES, *MORE_ROUTES)}
    missing = [
        path
        for path, operations in create_app(served.services).openapi()["paths"].items()
        if "get" in operations and not path.startswith(WITHOUT_ROWS)
        if not any(re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), route) for route in asked)
    ]
    assert not missing


def test_no_route_fails_for_documents_of_another_shape_in_all_columns(served: Served) -> None:
    assert not answers(served)
    broken = {}
    for what, odd in odd_ones(served).items():
        with contextlib.ExitStack() as stack:
            for table, name in COLUMNS.values():
                stack.enter_context(changed(served, table, name, instead(odd)))
            if found := answers(served):
                broken[what] = found
    assert not broken


@pytest.mark.more
@pytest.mark.parametrize("column", COLUMNS)
def test_no_route_fails_for_a_document_of_another_shape(served: Served, column: str) -> None:
    broken = {}
    for what, odd in odd_ones(served).items():
        with changed(served, *COLUMNS[column], instead(odd)):
            if found := answers(served):
                broken[what] = found
    assert not broken


@pytest.mark.more
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("replace", [with_every_value, with_every_inner_value])
def test_no_route_fails_for_odd_values_in_a_document(
    served: Served, column: str, replace: Callable[[Any], Callable[[str], str]]
) -> None:
    broken = {}
    for what, value in INNER.items():
        with changed(served, *COLUMNS[column], replace(value)):
            if found := answers(served):
                broken[what] = found
    assert not broken
