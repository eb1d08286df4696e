"""How a checkpoint that does not quite fit a program is taken over, once.

A run has one command for all its launches. What that command renames or leaves out belongs to
the checkpoint that did not fit; those saved afterwards fit, say so, and are taken over whole, or
each preemption would cost what was left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

FIT: Final = "fit"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What `Selection` does, for a whole resume: saved names to wanted ones, and parts left out.

    Parts are `model`, `optimizer`, `scheduler`, `rng`, `extra.<name>`, or below, `model.head`.
    """

    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[str] = ()

    @classmethod
    def of(
        cls, *, strict: bool, rename: Mapping[str, str] | None, exclude: str | Collection[str]
    ) -> Fit:
        """As a user says it; one name may stand without a list around it."""
        parts = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        return cls(strict=strict, rename=dict(rename or {}), exclude=parts)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps: that this was done before it was saved."""
        return {"rename": dict(self.rename), "exclude": list(self.exclude)}

    def still_to_do(self, document: Mapping[str, Any]) -> Fit:
        """Itself, or nothing more than `strict` when the checkpoint of `document` has it done."""
        if document.get(FIT) == self.describe():
            return Fit(strict=self.strict)
        return self

    def without(self, more: Collection[str]) -> Fit:
        """With more parts left out."""
        return replace(self, exclude=(*self.exclude, *more)) if more else self
