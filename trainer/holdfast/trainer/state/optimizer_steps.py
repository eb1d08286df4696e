"""Observes the steps of the program's optimizers, to know what a step of its loop has done.

A loop that the program leaves by `break` does not say whether the step was trained by then. And a
step in which no optimizer stepped has only accumulated gradients, which no checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch.optim import Optimizer

# A GradScaler leaves out single steps. A program that accumulates leaves out every other one.
MISSED_MIN: Final = 4
MISSED_SHARE: Final = 3


class OptimizerSteps:
    """What the optimizers did since the last step boundary.

    Without optimizers, each step of the loop counts as trained.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        self._can_hear, self._has_heard = True, False
        self._has_any = False
        # True once an optimizer has stepped. Set it to False where a step of the loop begins.
        self.has_stepped = False
        # Optimizers that are changing weights at this moment.
        self._under_way = 0
        self._steps = self._missed = 0
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._has_any = True
            try:
                self._hooks.append(optimizer.register_step_pre_hook(self._begin))
                self._hooks.append(optimizer.register_step_post_hook(self._end))
            # Not an optimizer of torch. Its steps cannot be observed.
            except (AttributeError, TypeError):
                self._can_hear = False

    @classmethod
    def unknown(cls) -> OptimizerSteps:
        """Return what is known of a framework that steps its optimizers itself: nothing."""
        return cls([None])

    @property
    def is_known(self) -> bool:
        """False if the optimizers do not report their steps."""
        return self._can_hear and (self._has_heard or not self._has_any or not self._steps)

    @property
    def is_trained(self) -> bool:
        """True if the step under way has changed the weights completely."""
        return self.is_known and not self._under_way and (self.has_stepped or not self._has_any)

    @property
    def is_inside(self) -> bool:
        """True if the weights may be half changed."""
        # Unknown counts as inside: a save of half-changed weights must never happen.
        return not self.is_known or self._under_way > 0

    @property
    def only_accumulates(self) -> bool:
        """True at a boundary of a step without an optimizer step, if many steps are so."""
        is_one = self._has_any and self.is_known and not self.has_stepped
        return is_one and self._missed >= max(MISSED_MIN, self._steps // MISSED_SHARE)

    def count_step(self) -> None:
        """Count the step of the loop that ends now."""
        self._steps += 1
        self._missed += not self.has_stepped

    def close(self) -> None:
        """Stop hearing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, _optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        self._under_way += 1

    def _end(self, _optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        # A hook of the program may have ended a step before `_begin` was called.
        if self._under_way:
            self._under_way -= 1
        self.has_stepped = self._has_heard = True
