"""The JSON Schema of a run spec as people write it, with which an editor completes and checks keys.

The schema accepts every spec that `RunSpec` accepts. It refuses unknown keys, wrong types and
values out of bounds. Rules about several keys are only in the models, and `holdfast submit
--dry-run` applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from holdfast.contracts.disk.paths import SPEC_NAME
from holdfast.contracts.spec import secrets, tags
from holdfast.contracts.spec.checkpoint import DURATION, SIZE
from holdfast.contracts.spec.run_spec import ENVIRONMENT_NAME, RunSpec

# The draft that editors for TOML and YAML support.
DIALECT: Final = "http://json-schema.org/draft-07/schema#"
REFERENCE: Final = "SecretReference"
# Model and key → the pattern of its text. The parser of each is a validator in Python.
PATTERNS: Final[Mapping[tuple[str, str], str]] = {
    ("RunSpec", "name"): SPEC_NAME.pattern,
    ("Checkpointing", "interval"): f"auto|{DURATION.pattern}",
    ("Checkpointing", "budget"): SIZE.pattern,
    ("Checkpointing", "write_limit"): SIZE.pattern,
    ("Keep", "ttl"): DURATION.pattern,
}


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles of keys, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def run_spec_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run spec in TOML or YAML, before defaults are filled in."""
    schema = RunSpec.model_json_schema(mode="validation", schema_generator=_WithoutTitles)
    parts: dict[str, Any] = {"RunSpec": schema, **schema["$defs"]}
    for (part, key), pattern in PATTERNS.items():
        _text(parts[part]["properties"][key])["pattern"] = f"^(?:{pattern})$"
    tag = {"type": "string", "pattern": f"^(?:{tags.TAG.pattern})$"}
    schema["properties"]["tags"] |= {"items": tag, "maxItems": tags.TAGS_MAX}
    for part in parts.values():
        for value in part.get("properties", {}).values():
            # An editor would write these as if somebody had chosen them.
            if "default" in value and not isinstance(value["default"], str | int | float | list):
                del value["default"]
    _describe_secrets(schema)
    return {"$schema": DIALECT, **schema, "title": "Run spec of Holdfast"}


def _describe_secrets(schema: dict[str, Any]) -> None:
    """Set the schemas of references to secrets, whose parser pydantic cannot describe."""
    schema["$defs"][REFERENCE] = {
        "type": "object",
        "description": "reference to a secret: one of its keys",
        "properties": {kind: {"type": "string"} for kind in secrets.KINDS},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    reference = {"$ref": f"#/$defs/{REFERENCE}"}
    environment = schema["properties"]["environment"]
    environment["propertyNames"] = {"pattern": f"^{ENVIRONMENT_NAME.pattern}$"}
    environment["additionalProperties"] = {"anyOf": [{"type": "string"}, reference]}
    targets = schema["$defs"]["Alerts"]["properties"]["targets"]
    targets["patternProperties"] = dict.fromkeys(targets["patternProperties"], reference)
    targets["additionalProperties"] = False


def _text(value: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a key's schema that describes text."""
    return next(one for one in (value, *value.get("anyOf", ())) if one.get("type") == "string")
