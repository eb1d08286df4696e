"""The callback through which a trainer tells its run what happens in the loop."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class Hooks(TrainerCallback):
    """Passes the trainer's events on to its `TrainerRun`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._run.begin_training()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._run.restore_generators()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self._run.session is not None:
            self._run.session.beat()

    def on_log(self, _: Any, __: Any, ___: Any, logs: Any = None, **____: Any) -> None:
        self._run.log(logs or {})
