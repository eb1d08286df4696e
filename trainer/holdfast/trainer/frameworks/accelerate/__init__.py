"""Accelerate: an `Accelerator` whose training survives preemptions, kills and resizes.

    from holdfast.trainer.frameworks.accelerate import Accelerator

It takes the place of the package `accelerate` in a program's import: all other names are those of
Accelerate. Names are imported on first use, after a check of the installed version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.trainer.versions import require

if TYPE_CHECKING:
    from holdfast.trainer.frameworks.accelerate.accelerator import Accelerator
    from holdfast.trainer.frameworks.accelerate.loaders import (
        skip_first_batches as skip_first_batches,
    )

__all__ = ["Accelerator", "skip_first_batches"]
_MODULES = {"Accelerator": "accelerator", "skip_first_batches": "loaders"}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("accelerate")
    own = _MODULES.get(name)
    return getattr(import_module(f"{__name__}.{own}" if own else "accelerate"), name)
