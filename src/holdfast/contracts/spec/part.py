"""The base class of all parts of a run spec: checks for new specs, and reading of recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from holdfast.contracts.spec.values import problem_with_value

# The validation context for documents that Holdfast itself recorded.
RECORDED: Final[Mapping[str, Any]] = {"is_recorded": True}
# Keys that the program or a shell reads. Their values may have several lines.
_SEVERAL_LINES: Final = frozenset({"command", "environment", "config", "setup"})


def is_recorded(info: ValidationInfo) -> bool:
    """True when Holdfast recorded the document, as opposed to new input from a user."""
    return info.context is RECORDED


class SpecPart(BaseModel):
    """A frozen, keyword-only part of a spec that refuses unknown keys.

    Recorded specs are read with `RECORDED` as the context. The rules for new specs then do not
    apply, because a run must survive an upgrade that makes them stricter. Types and bounds always
    apply, and keys of newer versions are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)
    # Text is no number, a number is no text, and true and false are neither. The plugin of mypy
    # does not see it here, so Python code may give tables for parts.
    model_config["strict"] = True

    @classmethod
    def read(cls, recorded: Any) -> Self:
        """Return a part that some version of Holdfast recorded. Raises `ValueError`."""
        return cls.model_validate(recorded, context=RECORDED)

    @model_validator(mode="before")
    @classmethod
    def _newer_keys_are_passed_over(cls, data: Any, info: ValidationInfo) -> Any:
        if not is_recorded(info) or not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields}

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        """Take the lists of TOML, YAML and JSON for tuples, and change no other type."""
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        return {
            key: tuple(value)
            if isinstance(value, list) and key in fields and _is_tuple(fields[key].annotation)
            else value
            for key, value in data.items()
        }

    @model_validator(mode="after")
    def _values_can_be_used(self, info: ValidationInfo) -> Self:
        for name, value in self:
            several_lines = name in _SEVERAL_LINES or is_recorded(info)
            is_optional = type(self).model_fields[name].default is None
            if value == "" and is_optional and not is_recorded(info):
                raise ValueError(
                    f"{name}: given empty text; expected a value, or leave the key out"
                )
            if problem := problem_with_value(
                value, several_lines=several_lines, any_float=name in _SEVERAL_LINES
            ):
                raise ValueError(f"{name}: {problem}")
        return self


def _is_tuple(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def part_of(annotation: Any) -> type[SpecPart] | None:
    """Return the part that a field holds, alone, in a list or as one of several types, or None."""
    kinds = [annotation, *get_args(annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, SpecPart)), None)


def unknown_keys(recorded: Mapping[str, Any], model: type[SpecPart], where: str = "") -> list[str]:
    """Return the dotted names of the keys in a recorded spec that this version does not know."""
    found = []
    for key, value in recorded.items():
        field = model.model_fields.get(key)
        if field is None:
            found.append(f"{where}{key}")
            continue
        part = part_of(field.annotation)
        if part is not None and isinstance(value, Mapping):
            found += unknown_keys(value, part, f"{where}{key}.")
    return found
