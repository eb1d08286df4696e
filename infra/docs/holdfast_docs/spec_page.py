"""The keys of a run spec, from the models in `holdfast.contracts.spec.run_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast_docs.markdown import code, section, sentence, table
from holdfast_docs.schema import Schema, default, reference, spell, unit

HEAD = ("key", "type", "default", "meaning")


@dataclass(frozen=True)
class Key:
    """One key of a spec, by its dotted name."""

    name: str
    schema: Schema
    is_required: bool


def render() -> str:
    """A section with a table for each part of a spec."""
    keys = list(keys_of(RunSpec))
    parts = [name for name, one in RunSpec.model_fields.items() if _part(one.annotation)]
    top = [key for key in keys if key.name.partition(".")[0] not in parts]
    sections = [section(2, "Top-level keys", table(HEAD, map(_row, top)), anchor="spec-top-level")]
    for part in parts:
        model: Any = RunSpec.model_fields[part].annotation
        rows = [_row(key) for key in keys if key.name.startswith(f"{part}.")]
        text = sentence((model.__doc__ or "").partition("\n\n")[0])
        anchor = f"spec-{part}"
        sections.append(section(2, f"{code(f'[{part}]')}", text, table(HEAD, rows), anchor=anchor))
    return "\n".join(sections)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All keys of a part of a spec, those of the parts in it included."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        part = _part(field.annotation)
        if part is not None:
            yield from keys_of(part, f"{prefix}{name}.")
        else:
            own = _resolved(schema["properties"][name], schema.get("$defs", {}))
            yield Key(f"{prefix}{name}", own, field.is_required())
            for item in filter(None, map(_part, get_args(field.annotation))):
                yield from keys_of(item, f"{prefix}{name}[].")


def _part(annotation: object) -> type[BaseModel] | None:
    is_part = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_part else None  # type: ignore[return-value]


def _row(key: Key) -> tuple[str, ...]:
    kind = spell(key.schema, lambda _name: "table")
    if measured := unit(key.name):
        kind = f"{kind}; in {measured}"
    given = "required" if key.is_required else default(key.schema) or "none"
    return code(key.name), kind, given, sentence(key.schema.get("description", ""))


def _resolved(schema: Any, definitions: Schema) -> Any:
    """`schema` with the choices of enumerations in place of their names."""
    if isinstance(schema, list):
        return [_resolved(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    target = reference(schema)
    if target is not None and "enum" in definitions[target]:
        return {**definitions[target], **{k: v for k, v in schema.items() if k != "$ref"}}
    return {key: _resolved(value, definitions) for key, value in schema.items()}
