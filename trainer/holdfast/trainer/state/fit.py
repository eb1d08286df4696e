"""How to load a checkpoint that does not quite fit the program.

A run has one command for all its launches, so a rename or an exclusion has the same meaning in each
of them. It applies to every checkpoint that was saved without it. Each checkpoint records those
with which it was saved. From such a checkpoint an excluded part is restored if it fits, because
otherwise each preemption would lose it again. If it does not fit, it is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.contracts.errors import SpecError
from holdfast.trainer.planning.compare_keys import Selection

FIT: Final = "fit"
PARTS: Final = ("model", "optimizer", "scheduler", "rng", "extra")


@dataclass(frozen=True, kw_only=True)
class ResumeFit:
    """The arguments of `Selection` for a whole resume: renamed names and excluded parts.

    Parts are `model`, `optimizer`, `scheduler`, `rng`, `extra.<name>`, or deeper ones such as
    `model.head`. Parts in `if_needed` are left out only if they do not fit.
    """

    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    if_needed: Sequence[str] = ()

    @classmethod
    def of(
        cls, *, strict: bool, rename: Mapping[str, str] | None, exclude: str | Collection[str]
    ) -> ResumeFit:
        """Return the fit for a user's arguments. `exclude` may be a single name.

        Raises `TypeError`, and `SpecError` for an excluded name that begins like no part.
        """
        pick = Selection.of(exclude=exclude, rename=rename, strict=strict)
        for name in pick.exclude:
            if name.partition(".")[0] not in PARTS:
                near = difflib.get_close_matches(name.partition(".")[0], PARTS, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise SpecError(
                    f"exclude={exclude!r}: no part of the state is called {name!r}{hint} Expected "
                    f"one of {', '.join(PARTS)}, or a name that begins with one of them and a dot"
                )
        return cls(strict=pick.strict, rename=pick.rename, exclude=pick.exclude)

    def describe(self) -> dict[str, Any]:
        """Return the record that a checkpoint keeps of this fit."""
        return {"rename": dict(self.rename), "exclude": list(self.exclude)}

    def still_to_do(self, document: Mapping[str, Any]) -> ResumeFit:
        """Return what of this fit the checkpoint of `document` was not yet saved with."""
        recorded = document.get(FIT) or {}
        renamed, excluded = recorded.get("rename", {}), recorded.get("exclude", ())
        return replace(
            self,
            # A rename that the checkpoint was saved with is already in its names.
            rename={old: new for old, new in self.rename.items() if renamed.get(old) != new},
            exclude=tuple(name for name in self.exclude if name not in excluded),
            # Left out only if they do not fit. Otherwise each preemption would drop the part again,
            # see decision 87.
            if_needed=tuple(name for name in self.exclude if name in excluded),
        )

    def without(self, more: Collection[str]) -> ResumeFit:
        if not more:
            return self
        left = tuple(name for name in self.if_needed if name not in more)
        return replace(self, exclude=(*self.exclude, *more), if_needed=left)

    def parts_over(self, keys: Collection[str]) -> list[str]:
        """Return the `if_needed` parts that contain all of `keys`, or none if they do not.

        `keys` are those for which a checkpoint does not fit.
        """
        if not keys or any(map(Selection(exclude=tuple(self.if_needed)).takes, keys)):
            return []
        return [
            name for name in self.if_needed if not all(map(Selection(exclude=(name,)).takes, keys))
        ]
