"""Notices an optimizer that the program made in place of one that its Session has.

Checkpoints contain the state of the Session's optimizers. If another one steps their parameters in
their place, a resume restores the state of an optimizer that no longer trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepWatch:
    """Watches the optimizers of this process from their first step to the next boundary.

    A wrapper of a known optimizer steps too, so another optimizer counts only if the known one of
    the same parameters did not step. `close` must be called.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._owners = {id(each): number for number, each in enumerate(optimizers)}
        self._optimizers = list(optimizers)
        self._stepped: set[int] = set()
        self._others: dict[int, Any] = {}
        watch = weakref.ref(self)

        def note(optimizer: Optimizer, *_: Any) -> None:
            # A step that is being compiled is not changed.
            if not torch.compiler.is_compiling() and (found := watch()) is not None:
                found._note(optimizer)

        self._handle: Any = register_optimizer_step_post_hook(note) if optimizers else None

    def find_replaced(self) -> str | None:
        """Return what stepped in place of a known optimizer since the last call, or None."""
        others, stepped = self._others, self._stepped
        if not others:
            if stepped:
                self._stepped = set()
            return None
        self._others, self._stepped = {}, set()
        for other in others.values():
            theirs = _parameters(other)
            for number, known in enumerate(self._optimizers):
                if number not in stepped and not theirs.isdisjoint(_parameters(known)):
                    return (
                        f"an optimizer that the Session does not have ({type(other).__name__}) "
                        f"stepped the parameters of optimizer {number} ({type(known).__name__}) in "
                        "its place"
                    )
        return None

    def close(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _note(self, optimizer: Optimizer) -> None:
        number = self._owners.get(id(optimizer))
        if number is None:
            self._others[id(optimizer)] = optimizer
        else:
            self._stepped.add(number)


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}
