"""torchtitan: a checkpoint manager and a data loader for its `Trainer`.

    from holdfast.trainer.frameworks.torchtitan import CheckpointManager

It takes the place of `torchtitan.components.checkpointer.CheckpointManager` in a program's import.
Names are imported on first use, after a check of the installed version.

| module | purpose |
|---|---|
| `manager.py` | the value of `Trainer.Config.checkpoint`, and what it saves |
| `settings.py` | which keys of its `Config` are refused, and what to do instead |
| `loader.py` | a data loader in Holdfast's order, for every data-parallel degree |
| `streamed.py` | torchtitan's loaders over a stream, read by the session's loader |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.trainer.versions import require

if TYPE_CHECKING:
    from holdfast.trainer.frameworks.torchtitan.loader import TokenDataLoader
    from holdfast.trainer.frameworks.torchtitan.manager import (
        CheckpointManager as CheckpointManager,
    )

__all__ = ["CheckpointManager", "TokenDataLoader"]
_MODULES = {"CheckpointManager": "manager", "TokenDataLoader": "loader"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("torchtitan")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
