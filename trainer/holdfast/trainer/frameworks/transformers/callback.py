"""`HoldfastCallback`: for a program that takes callbacks and whose trainer class is fixed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import transformers
from transformers import TrainerCallback

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.transformers.trainer import Trainer, attach


class HoldfastCallback(TrainerCallback):
    """Turns the trainer that it is given to into one of Holdfast, as `attach` does.

    A callback alone could not resume a training, so it changes the class of its trainer when that
    is made. Pass it as `callbacks=[HoldfastCallback()]`.
    """

    def on_init_end(self, *_: Any, **__: Any) -> None:
        attach(self._find_trainer())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not isinstance(self._find_trainer(), Trainer):
            raise SpecError(
                "HoldfastCallback was added to a trainer that was already made. Pass it to the "
                "Trainer as callbacks=[HoldfastCallback()], or call attach(trainer) instead"
            )

    def _find_trainer(self) -> Any:
        """Return the trainer whose event this is: its method called ours. No event names it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, transformers.Trainer):
                return found
            frame = frame.f_back
        raise SpecError(
            "HoldfastCallback found no transformers.Trainer that called it; pass it to one as "
            "callbacks=[HoldfastCallback()]"
        )
