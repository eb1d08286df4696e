"""How to load, once, a checkpoint that does not quite fit the program.

A run has one command for all its launches. The names that this command renames or excludes belong
to the checkpoint that did not fit. Later checkpoints fit and record that. They are loaded
completely. Otherwise each preemption would lose the excluded parts again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

FIT: Final = "fit"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The arguments of `Selection` for a whole resume: renamed names and excluded parts.

    Parts are `model`, `optimizer`, `scheduler`, `rng`, `extra.<name>`, or deeper ones such as
    `model.head`.
    """

    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[str] = ()

    @classmethod
    def of(
        cls, *, strict: bool, rename: Mapping[str, str] | None, exclude: str | Collection[str]
    ) -> Fit:
        """Return the fit for a user's arguments. `exclude` may be a single name."""
        parts = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        return cls(strict=strict, rename=dict(rename or {}), exclude=parts)

    def describe(self) -> dict[str, Any]:
        """Return the record that a checkpoint keeps of this fit."""
        return {"rename": dict(self.rename), "exclude": list(self.exclude)}

    def still_to_do(self, document: Mapping[str, Any]) -> Fit:
        """Return this fit, or only `strict` if the checkpoint of `document` already has it."""
        if document.get(FIT) == self.describe():
            return Fit(strict=self.strict)
        return self

    def without(self, more: Collection[str]) -> Fit:
        """Return this fit with more excluded parts."""
        return replace(self, exclude=(*self.exclude, *more)) if more else self
