"""torchtitan's own checkpoint manager, for checkpoints that torchtitan made and for its export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as Stock


def stock_manager(config: Any, parts: Mapping[str, Any]) -> Any:
    """Return torchtitan's manager with the keys of `config`. It keeps all checkpoints.

    `parts` are the arguments with which the trainer creates a manager.
    """
    names = [field.name for field in dataclasses.fields(BaseCheckpointManager.Config)]
    own = Stock.Config(**{name: getattr(config, name) for name in names})
    return Stock(own, **{**parts, "states": dict(parts["states"])})


def load_first(config: Any, parts: Mapping[str, Any]) -> bool:
    """Load where a run without a checkpoint of Holdfast begins. Return True if there was something.

    It is the newest checkpoint in torchtitan's folder, or else `initial_load_path`.
    """
    return bool(stock_manager(config, parts).load())


def export_last(config: Any, parts: Mapping[str, Any], step: int) -> None:
    """Write the model after the last step as torchtitan does, into its folder."""
    stock_manager(config, parts).save(step, last_step=True)
