"""Observes the steps of the program's optimizers, to know what a step of its loop has done.

A loop that the program leaves by `break` does not say whether the step was trained by then. And a
step in which no optimizer stepped has only accumulated gradients, which no checkpoint contains.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

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
        self._steps += 1
        self._missed += not self.has_stepped

    def close(self) -> None:
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


# Notices an optimizer that got other groups, or that replaced a known one.
#
# Checkpoints contain the state of the Session's optimizers. If another one steps their parameters
# in their place, a resume restores the state of an optimizer that no longer trains.
#
# It looks when an optimizer has stepped, because the groups are in the processor's caches then. At
# a step boundary they rarely are, and the same looks took 10 µs of each step.


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
                # A wrapper of a known optimizer steps too. It is not a replacement if the known one
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
        if self._end is not None:
            self._end()


def group_sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}
