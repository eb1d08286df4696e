"""Lets every optimizer of the process wait for a copy of what it is about to change."""

from __future__ import annotations

import weakref
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.trainer.ranks import forks
from holdfast.trainer.saving.saver import Saver


class UpdateHook:
    """Completes the copies of a saver before any optimizer steps. `close` must be called.

    A step that torch compiles runs no such hook. The session then finds at the step boundary that
    the tensors have changed.
    """

    def __init__(self, saver: Saver) -> None:
        # Without a reference: torch keeps the hook, and the saver leads to the session.
        held, owner = weakref.ref(saver), forks.count

        def complete(*_: Any) -> None:
            if is_dynamo_compiling():
                return
            its = held()
            # A forked child has the copy, and not the thread that makes it.
            if its is not None and its.is_copying and forks.count == owner:
                its.complete_copy()

        self._handle = register_optimizer_step_pre_hook(complete)

    def close(self) -> None:
        """Stop hearing."""
        self._handle.remove()
