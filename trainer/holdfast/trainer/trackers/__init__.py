"""Experiment trackers: a run is one run of the tracker, over all its relaunches.

`Session.track` connects one. Public names are imported on first use, so that only the tracker in
use must be installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.trainer.trackers.mlflow import MlflowTracker
    from holdfast.trainer.trackers.tensorboard import TensorBoardTracker
    from holdfast.trainer.trackers.tracker import TrackedRun, Tracker
    from holdfast.trainer.trackers.wandb import WandbTracker

__all__ = ["MlflowTracker", "TensorBoardTracker", "TrackedRun", "Tracker", "WandbTracker"]
_MODULES = {
    "MlflowTracker": "mlflow",
    "TensorBoardTracker": "tensorboard",
    "TrackedRun": "tracker",
    "Tracker": "tracker",
    "WandbTracker": "wandb",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"holdfast.trainer.trackers.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
