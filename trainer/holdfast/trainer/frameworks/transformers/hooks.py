"""The events of a trainer's loop that its run hears of.

A callback would be called at every event of a step, also at those that it ignores. So the run takes
the place of a few methods of the trainer's callback handler. It hears of an event before the
trainer's callbacks, which then see restored random generators and the logs as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def listen(handler: Any, run: Any) -> None:
    """Tell `run` of the events of a `CallbackHandler` from now on."""

    def log(_: Any, __: Any, ___: Any, logs: Any = None, **____: Any) -> None:
        run.log(logs or {})

    def beat(*_: Any, **__: Any) -> None:
        if run.session is not None:
            run.session.beat()

    _hear(handler, "on_train_begin", lambda *_, **__: run.begin_training())
    _hear(handler, "on_epoch_begin", lambda *_, **__: run.restore_generators())
    _hear(handler, "on_prediction_step", beat)
    _hear(handler, "on_log", log)


def _hear(handler: Any, event: str, hear: Callable[..., None]) -> None:
    tell = getattr(handler, event)

    def both(*given: Any, **more: Any) -> Any:
        hear(*given, **more)
        return tell(*given, **more)

    setattr(handler, event, both)
