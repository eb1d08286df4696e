"""JSON schemas in words: the type of a value and its bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.contracts.plain_text import exact
from holdfast_docs.markdown import code

Schema = Mapping[str, Any]
# Writes the name of a schema that another section describes.
Name = Callable[[str], str]

_PLAIN: Final = ("string", "integer", "number", "boolean", "null", "object")
_BOUNDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}
_UNITS: Final = {
    "_s": "seconds",
    "_min": "minutes",
    "_hours": "hours",
    "_at": "Unix seconds",
    "_gb": "gigabytes",
    "_gb_per_node": "gigabytes",
    "_gb_per_cpu": "gigabytes",
    "_s_max": "seconds",
    "_bytes": "bytes",
}
# A ratio, which has no unit.
_RATIO: Final = "ettr_min"


def reference(schema: Schema) -> str | None:
    """The name of the schema that `schema` refers to, and to nothing else."""
    target = schema.get("$ref")
    return None if target is None else str(target).rpartition("/")[2]


def spell(schema: Schema, name: Name = code) -> str:
    """The type, as Markdown: `string or null`, `list of integers, at least 1`."""
    if (target := reference(schema)) is not None:
        return name(target)
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(one)) for one in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(spell(one, name) for one in schema[key]))
    kind = schema.get("type")
    if kind == "array":
        spelled = f"list of {_item(schema, name)}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        spelled = f"table of {spell(schema['additionalProperties'], name)}"
    else:
        spelled = str(kind) if kind in _PLAIN else "any value"
    return ", ".join([spelled, *bounds(schema)])


def bounds(schema: Schema) -> list[str]:
    """The limits of a value."""
    found = [words.format(exact(schema[key])) for key, words in _BOUNDS.items() if key in schema]
    found = [one.removesuffix("s") if " 1 " in one else one for one in found]
    return [*found, f"matches {code(schema['pattern'])}"] if "pattern" in schema else found


def unit(name: str) -> str:
    """The unit that the end of a name gives; empty without one."""
    ends = () if name.endswith(_RATIO) else _UNITS.items()
    return next((unit for end, unit in ends if name.endswith(end)), "")


def default(schema: Schema) -> str:
    """The default as code; empty without one, `none` for null and for nothing in a list."""
    if "default" not in schema:
        return ""
    value = schema["default"]
    return "none" if value in (None, [], {}, "") else code(json.dumps(value, ensure_ascii=False))


def _item(schema: Schema, name: Name) -> str:
    items = schema.get("items")
    if isinstance(items, Mapping):
        return spell(items, name)
    # A list of fixed length has a type for each place.
    fixed = schema.get("prefixItems", ())
    return " and ".join(dict.fromkeys(spell(one, name) for one in fixed)) or "any values"
