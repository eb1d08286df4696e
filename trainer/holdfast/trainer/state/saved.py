"""The optimizer state that a checkpoint has, by the names that the program knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES

from holdfast.trainer.state.forms import OTHER, Forms

STATE: Final = "state"
GROUPS: Final = "param_groups"


@dataclass
class SavedPart:
    """The entries and forms of one parameter, or of another name, in a checkpoint, by path.

    `was` is the parameter's type in the checkpoint.
    """

    was: torch.dtype | None = None
    entries: dict[str, STORAGE_TYPES] = field(default_factory=dict)
    forms: Forms = field(default_factory=dict)


@dataclass
class SavedOptimizer:
    """A checkpoint's optimizer state, by the names that the program knows.

    `others` are state entries of no parameter, mapped to the number of their optimizer.
    `knows_forms` is False for a stock DCP checkpoint, which has no forms.
    """

    knows_forms: bool = False
    empty_groups: Mapping[str, Any] = field(default_factory=dict)
    state: dict[str, SavedPart] = field(default_factory=dict)
    options: dict[str, SavedPart] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, entries: Mapping[str, STORAGE_TYPES], forms: Forms | None, known: Collection[str]
    ) -> SavedOptimizer:
        """Build it from entries and forms by key (`state.…`, `param_groups.…`) of `known` names."""
        saved = cls(knows_forms=forms is not None)
        forms = forms or {}
        # First, because the keys of such entries have no parameter's name to end at.
        for key, form in forms.items():
            if OTHER in form:
                saved.others[key.partition(".")[2]] = form[OTHER]
        for key, entry in entries.items():
            if found := saved._place(key, known):
                found[0].entries[found[1]] = entry
        for key, form in forms.items():
            if found := saved._place(key, known):
                found[0].forms[found[1]] = form
        return saved

    def _place(self, key: str, known: Collection[str]) -> tuple[SavedPart, str] | None:
        kind, _, rest = key.partition(".")
        parts = {STATE: self.state, GROUPS: self.options}.get(kind)
        if parts is None:
            return None
        name, path = rest, ""
        # From the longest name down: names of parameters and paths both contain dots.
        while name:
            if name in known or (kind == STATE and name in self.others):
                return parts.setdefault(name, SavedPart()), path
            name, _, last = name.rpartition(".")
            path = f"{last}.{path}" if path else last
        return None
