"""Write web/src/api/schema.ts, the web UI's types of the API, from the OpenAPI document.

    .venv/bin/python infra/setup/page_types.py [--check]

With `--check`, it writes nothing, and the exit status is 1 if the file differs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from holdfast.api.app import create_app

TARGET: Final = Path(__file__).resolve().parents[2] / "web" / "src" / "api" / "schema.ts"
HEAD: Final = """\
// Generated from the OpenAPI document by infra/setup/page_types.py; do not edit.
"""
PLAIN: Final = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}


def generate() -> str:
    """Return the file's content: an interface or a type for each schema of the document."""
    services: Any = SimpleNamespace(access_policy=None, measures=SimpleNamespace(answered=None))
    schemas = create_app(services).openapi()["components"]["schemas"]
    answered = {name: one for name, one in schemas.items() if not name.startswith("Page_")}
    if twins := [name for name in answered if "__" in name]:
        raise ValueError(f"{twins}: two schemas have the same name; rename one of them")
    return HEAD + "".join(f"\n{declare(name, answered[name])}" for name in sorted(answered))


def declare(name: str, schema: dict[str, Any]) -> str:
    """Return the declaration of a schema with its description."""
    text = " ".join(schema.get("description", "").split())
    comment = f"/** {text} */\n" if text else ""
    if schema.get("type") != "object" or "properties" not in schema:
        return f"{comment}export type {name} = {spell(schema)};\n"
    required = set(schema.get("required", ()))
    lines = [
        f"  {key}{'' if key in required or 'default' in one else '?'}: {spell(one)};\n"
        for key, one in schema["properties"].items()
    ]
    return f"{comment}export interface {name} {{\n{''.join(lines)}}}\n"


def spell(schema: dict[str, Any]) -> str:
    """Return a schema as a TypeScript type."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return literal(schema["const"])
    if "enum" in schema:
        return " | ".join(literal(one) for one in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(spell(one) for one in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        item = spell(schema.get("items", {}))
        return f"({item})[]" if " | " in item else f"{item}[]"
    if kind == "object":
        more = schema.get("additionalProperties")
        return f"Record<string, {spell(more) if isinstance(more, dict) else 'unknown'}>"
    return PLAIN.get(kind or "", "unknown")


def literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def main() -> int:
    content = generate()
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text() != content)
    TARGET.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
