"""Notices an optimizer that got other groups, or that replaced a known one.

Checkpoints contain the state of the Session's optimizers. If another one steps their parameters in
their place, a resume restores the state of an optimizer that no longer trains.

It looks when an optimizer has stepped, because the groups are in the processor's caches then. At a
step boundary they rarely are, and the same looks took 10 µs of each step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepWatch:
    """Watches the optimizers of this process from each step boundary to the next one.

    A wrapper of a known optimizer steps too, so another optimizer counts only if the known one of
    the same parameters did not step. `close` must be called.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        # The numbers of the known optimizers that stepped. Clear it at each step boundary.
        self.stepped: set[int] = set()
        # Not empty once there is something to examine at the next boundary.
        self.asks: list[bool] = []
        self._others: dict[int, Any] = {}
        self._sizes = [group_sizes(each) for each in optimizers]
        owners = {id(each): number for number, each in enumerate(optimizers)}
        stepped, asks, others, sizes = self.stepped, self.asks, self._others, self._sizes

        def note(optimizer: Optimizer, *_: Any) -> None:
            # A step that is being compiled is not changed. Everything is in one function without
            # attributes of the watch, because the training step evicts whatever is read here
            # from the processor's caches, see decision 83.
            if is_dynamo_compiling():
                return
            number = owners.get(id(optimizer))
            if number is None:
                others[id(optimizer)] = optimizer
                asks.append(True)
                return
            stepped.add(number)
            groups, known = optimizer.param_groups, sizes[number]
            if len(groups) != len(known):
                asks.append(True)
            for group, size in zip(groups, known, strict=False):
                if len(group["params"]) != size:
                    asks.append(True)

        self._end = None
        if optimizers:
            handle = register_optimizer_step_post_hook(note)
            # Removes the hook when the watch is gone, even if `close` was not called.
            self._end = weakref.finalize(self, handle.remove)

    def find_replaced(self) -> str | None:
        """Return what stepped in place of a known optimizer since the last boundary, or None."""
        others = list(self._others.values())
        self._others.clear()
        for other in others:
            theirs = _parameters(other)
            for number, known in enumerate(self._optimizers):
                # A wrapper of a known optimizer steps too. It is no replacement if the known one
                # has stepped.
                if number not in self.stepped and not theirs.isdisjoint(_parameters(known)):
                    return (
                        f"an optimizer that the Session does not have ({type(other).__name__}) "
                        f"stepped the parameters of optimizer {number} ({type(known).__name__}) in "
                        "its place"
                    )
        return None

    def examined(self) -> None:
        """Take the groups as they are now as known."""
        self._sizes[:] = [group_sizes(each) for each in self._optimizers]
        self.asks.clear()

    def close(self) -> None:
        """Stop watching."""
        if self._end is not None:
            self._end()


def group_sizes(optimizer: Any) -> list[int]:
    """Return the number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}
