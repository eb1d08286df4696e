"""The type of a flow's parameter `spec`, from which Prefect draws a form and validates input.

A flow gets what was given, unchanged: a run spec must be read with its overrides, and a recorded
spec by other rules. Prefect's server validates by the schema of `RunSpec` before anything runs.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from holdfast.contracts.spec.run_spec import RunSpec

SpecPath = Annotated[
    str,
    Field(
        title="Path of a spec",
        description="absolute path of a TOML or YAML file, where the flow runs",
        # Prefect prints schemas as markup of rich, in which `[/` closes a tag.
        pattern=r"^(/|~).*\.(toml|ya?ml)$",
    ),
]


class _Form:
    """Accepts any value; its schema is that of `kind`."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # Any value, because a spec is read with its overrides, and a recorded one by other rules.
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(TypeAdapter(self._kind).core_schema)


# A run spec, the path of one, or nothing. Of a choice, Prefect's UI cannot mark the wrong key.
SpecParameter = Annotated[dict[str, Any] | str | None, _Form(RunSpec | SpecPath | None)]
# A run spec, whose wrong keys Prefect's UI marks.
SpecTable = Annotated[dict[str, Any], _Form(RunSpec)]
