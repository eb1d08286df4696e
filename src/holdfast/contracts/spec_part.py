"""The base class of all parts of a run spec: checks for new specs, and reading of recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from holdfast.contracts.spec_values import problem_with_value

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
    """Return the dotted names of the keys in a recorded spec that this version does not know."""
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
