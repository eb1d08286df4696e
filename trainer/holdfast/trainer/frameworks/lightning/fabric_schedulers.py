"""The learning rate schedulers of a program.

Fabric does not prepare schedulers, so a program that uses them does not name them to it. A missing
one would start again after a resume. So each scheduler is noted when it is created.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class _Created:
    """The schedulers that exist, in the order of their creation."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[LRScheduler]] = []
        self.count = 0

    def note(self, scheduler: LRScheduler) -> None:
        self.count += 1
        self._found.append(weakref.ref(scheduler))

    def alive(self) -> list[LRScheduler]:
        alive = [one for one in (found() for found in self._found) if one is not None]
        self._found = [weakref.ref(one) for one in alive]
        return alive


_created = _Created()


def watch() -> None:
    """Note schedulers from now on. Their class gets a `__new__`, which all kinds of them use."""
    if "__new__" in vars(LRScheduler):
        return

    def create(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
        scheduler = object.__new__(cls)
        _created.note(scheduler)
        return scheduler

    LRScheduler.__new__ = create  # type: ignore[assignment,method-assign]


def created_count() -> int:
    """Return how many schedulers this process has created."""
    return _created.count


def schedulers_of(optimizers: list[Any]) -> list[LRScheduler]:
    """Return the schedulers over `optimizers`, in the order of their creation."""
    own = {id(each) for each in optimizers}

    def inner(scheduler: LRScheduler) -> Any:
        found = getattr(scheduler, "optimizer", None)
        return getattr(found, "optimizer", found)

    return [each for each in _created.alive() if id(inner(each)) in own]
