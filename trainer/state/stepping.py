"""Notices an optimizer that got other groups, or that the program made in place of a known one.

Checkpoints contain the state of the Session's optimizers. If another one steps their parameters in
their place, a resume restores the state of an optimizer that no longer trains.

It looks when an optimizer has stepped, because the groups are in the processor's caches then. At a
step boundary they rarely are, and the same looks took 10 µs of each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepWatch:
    """Watches the optimizers of this process from each step boundary to the next one.

    A wrapper of a known optimizer steps too, so another optimizer counts only if the known one of
    the same parameters did not step. `close` must be called.
    """

    # True once there is something to examine at the next boundary.
    asks = False
    # Add 1 at each step boundary.
    boundary = 0

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._owners = {id(each): number for number, each in enumerate(optimizers)}
        self._optimizers = list(optimizers)
        # The boundary after which each known optimizer has stepped last.
        self._stepped: dict[int, int] = {}
        self._others: dict[int, Any] = {}
        self._sizes = [group_sizes(each) for each in optimizers]
        watch = weakref.ref(self)

        def note(optimizer: Optimizer, *_: Any) -> None:
            # A step that is being compiled is not changed.
            if not torch.compiler.is_compiling() and (found := watch()) is not None:
                found._note(optimizer)

        self._handle: Any = register_optimizer_step_post_hook(note) if optimizers else None

    def find_replaced(self) -> str | None:
        """Return what stepped in place of a known optimizer since the last boundary, or None."""
        others, self._others = self._others, {}
        stepped = {number for number, at in self._stepped.items() if at == self.boundary}
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

    def examined(self) -> None:
        """Take the groups as they are now as known."""
        self._sizes = [group_sizes(each) for each in self._optimizers]
        self.asks = False

    def close(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _note(self, optimizer: Optimizer) -> None:
        number = self._owners.get(id(optimizer))
        if number is None:
            self._others[id(optimizer)] = optimizer
            self.asks = True
            return
        self._stepped[number] = self.boundary
        if group_sizes(optimizer) != self._sizes[number]:
            self.asks = True


def group_sizes(optimizer: Any) -> list[int]:
    """Return the number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}
