"""The REST API, from its OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final

from holdfast.api.app import create_app
from holdfast_docs.markdown import code, paragraphs, section, sentence, table
from holdfast_docs.schema import Schema, default, spell, unit

# Names that FastAPI makes for pages of rows, in the form that people read.
_PAGE: Final = re.compile(r"^Page_(\w+?)_$")
METHODS: Final = ("get", "post", "put", "patch", "delete")


def document() -> dict[str, Any]:
    """The OpenAPI document, as a server offers it."""
    services: Any = SimpleNamespace(access_policy=None, measures=SimpleNamespace(answered=None))
    return dict(create_app(services).openapi())


def operations(paths: Mapping[str, Any]) -> Iterator[tuple[str, str, Schema]]:
    """(method, path, operation), in the document's order."""
    for path, found in paths.items():
        for method in METHODS:
            if method in found:
                yield method.upper(), path, found[method]


def render() -> str:
    """Operations by tag, each with parameters, body and answer; then all schemas."""
    api = document()
    by_tag: dict[str, list[str]] = {}
    for method, path, operation in operations(api["paths"]):
        (tag, *_) = operation.get("tags", ["other"])
        by_tag.setdefault(tag, []).append(_operation(method, path, operation))
    parts = [section(2, tag.capitalize(), *found) for tag, found in by_tag.items()]
    schemas = api["components"]["schemas"]
    shown = [_schema(name, schemas[name]) for name in sorted(schemas, key=_shown_name)]
    return "\n".join([*parts, section(2, "Schemas", *shown)])


def _operation(method: str, path: str, operation: Schema) -> str:
    parameters = [
        (
            code(one["name"]),
            one["in"],
            spell(one["schema"], _link),
            "required" if one.get("required") else default(one["schema"]) or "none",
            sentence(one.get("description", "")),
        )
        for one in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {})
    answers = [_answer(status, one) for status, one in operation["responses"].items()]
    return section(
        3,
        code(f"{method} {path}"),
        paragraphs(operation.get("description", "")),
        table(("parameter", "in", "type", "default", "meaning"), parameters),
        *(f"Request body: {spell(one['schema'], _link)}." for one in body.values()),
        "\n".join(f"- {answer}" for answer in answers if answer),
        anchor=f"rest-{operation['operationId'].replace('_', '-')}",
    )


def _answer(status: str, response: Schema) -> str:
    """The status and what comes with it; errors are the same everywhere and are said once."""
    if not status.isdecimal() or (int(status) >= HTTPStatus.BAD_REQUEST and status != "503"):
        return ""
    content = response.get("content", {})
    kinds = [
        f"{spell(one['schema'], _link)}" if one.get("schema") else code(name)
        for name, one in content.items()
    ]
    return f"{code(status)} {HTTPStatus(int(status)).phrase}: {', '.join(kinds) or 'text'}"


def _schema(name: str, schema: Schema) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (
            code(key),
            _with_unit(key, one),
            "yes" if key in required else default(one) or "no",
            sentence(one.get("description", "")),
        )
        for key, one in schema.get("properties", {}).items()
    ]
    # A column without a word in any row would only take room.
    has_words = any(row[3] for row in rows)
    head = ("key", "type", "required or default", "meaning")
    width = 4 if has_words else 3
    values = [code(json.dumps(one)) for one in schema.get("enum", ())]
    return section(
        3,
        _shown_name(name),
        paragraphs(schema.get("description", "")),
        f"One of {', '.join(values)}." if values else "",
        table(head[:width], [row[:width] for row in rows]),
        anchor=_anchor(name),
    )


def _with_unit(key: str, schema: Schema) -> str:
    kind = spell(schema, _link)
    return f"{kind}; {found}" if (found := unit(key)) and "number" in kind else kind


def _link(name: str) -> str:
    return f"[{_shown_name(name)}](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return f"schema-{_shown_name(name).lower().replace(' ', '-')}"


def _shown_name(name: str) -> str:
    found = _PAGE.match(name)
    return f"Page of {found[1]}" if found else name
