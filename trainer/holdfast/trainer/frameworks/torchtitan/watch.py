"""The metrics and the validation of a torchtitan trainer, seen by the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torchtitan.components.metrics import BaseLogger

from holdfast.trainer.frameworks.session import FrameworkSession

LOSS: Final = "loss_metrics/global_avg_loss"


class SessionLogger(BaseLogger):
    """Passes what the trainer logs on to its own loggers, and to the run's metrics."""

    def __init__(self, inner: BaseLogger, session: FrameworkSession) -> None:
        self._inner, self._session = inner, session

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._inner.log(metrics, step)
        values = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float)
        }
        if LOSS in values:
            self._session.observe(values[LOSS])
        self._session.log(**values)

    def close(self) -> None:
        self._inner.close()


def log_to(session: FrameworkSession, metrics_processor: Any) -> None:
    """Listen where torchtitan passes metrics to its loggers, also if it has none."""
    metrics_processor.logger = SessionLogger(metrics_processor.logger, session)


def is_validated(trainer: Any, step: int) -> bool:
    """Return True if the trainer validates after `step`."""
    return bool(trainer.config.validator.enable and trainer.validator.should_validate(step))


def watch_validation(session: FrameworkSession, trainer: Any, complete: Callable[[], None]) -> None:
    """Let each validation be a phase of the session, and call `complete` after it."""
    if not trainer.config.validator.enable:
        return
    inner = trainer.validator.validate

    def validate(*args: Any, **kwargs: Any) -> None:
        with session.phase("eval"):
            inner(*args, **kwargs)
        complete()

    trainer.validator.validate = validate
