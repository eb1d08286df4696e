"""What all parts of a run spec share: rules for new specs, and how recorded ones are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from holdfast.contracts.spec_values import problem_with_value

# The context in which documents are validated that Holdfast itself wrote.
RECORDED: Final[Mapping[str, Any]] = {"is_recorded": True}
# What the program or a shell reads, which may be of several lines.
_SEVERAL_LINES: Final = frozenset({"command", "environment", "config", "setup"})


def is_recorded(info: ValidationInfo) -> bool:
    """True when Holdfast recorded the document, and nobody gives it just now."""
    return info.context is RECORDED


class SpecPart(BaseModel):
    """A frozen, keyword-only part of a spec that refuses keys it does not know.

    What Holdfast recorded earlier is read with `RECORDED` as the context. The rules for
    new specs do not apply then, because a run must survive an upgrade that makes them stricter.
    Types and bounds apply always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)

    @classmethod
    def read(cls, recorded: Any) -> Self:
        """The part of a spec that some version of Holdfast recorded. Raises `ValueError`."""
        return cls.model_validate(recorded, context=RECORDED)

    @model_validator(mode="before")
    @classmethod
    def _newer_keys_are_passed_over(cls, data: Any, info: ValidationInfo) -> Any:
        if not is_recorded(info) or not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields}

    @model_validator(mode="after")
    def _values_can_be_used(self, info: ValidationInfo) -> Self:
        for name, value in self:
            several_lines = name in _SEVERAL_LINES or is_recorded(info)
            if problem := problem_with_value(
                value, several_lines=several_lines, any_float=name in _SEVERAL_LINES
            ):
                raise ValueError(f"{name}: {problem}")
        return self


def unknown_keys(recorded: Mapping[str, Any], model: type[SpecPart], where: str = "") -> list[str]:
    """The dotted names of the keys of a recorded spec that this version of Holdfast lacks."""
    found = []
    for key, value in recorded.items():
        field = model.model_fields.get(key)
        if field is None:
            found.append(f"{where}{key}")
            continue
        kinds = [field.annotation, *get_args(field.annotation)]
        part = next((k for k in kinds if isinstance(k, type) and issubclass(k, SpecPart)), None)
        if part is not None and isinstance(value, Mapping):
            found += unknown_keys(value, part, f"{where}{key}.")
    return found
