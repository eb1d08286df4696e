"""DeepSpeed: a session whose checkpoints are DeepSpeed's own files, committed by Holdfast.

from holdfast.trainer.frameworks.deepspeed import DeepSpeedSession

model_engine, *_ = deepspeed.initialize(...)
session = DeepSpeedSession(model_engine)          # always resumes here
for step in session.steps(total):
    …
    model_engine.backward(loss)
    model_engine.step()
session.close()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.trainer.versions import require

if TYPE_CHECKING:
    from holdfast.trainer.frameworks.deepspeed.session import DeepSpeedSession

__all__ = ["DeepSpeedSession"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # First name the extra that is missing, instead of a module.
        require("deepspeed")
        return getattr(import_module(f"{__name__}.session"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
