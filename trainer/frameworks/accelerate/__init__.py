"""Accelerate: an `Accelerator` whose training survives preemptions, kills and resizes.

    from holdfast.trainer.frameworks.accelerate import Accelerator

Its names are imported on first use, after a check of the installed version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.trainer.frameworks.versions import require

if TYPE_CHECKING:
    from holdfast.trainer.frameworks.accelerate.accelerator import Accelerator as Accelerator

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    require("accelerate")
    return getattr(import_module(f"{__name__}.accelerator"), name)
