"""The keys of a run spec, from its models."""

from __future__ import annotations

from holdfast.contracts.spec.part import SpecPart


def spec_keys(model: type[SpecPart], prefix: str = "") -> set[str]:
    """Dotted names of all keys of a spec."""
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, SpecPart):
            keys |= spec_keys(part, f"{prefix}{name}.")
        else:
            keys.add(f"{prefix}{name}")
    return keys
