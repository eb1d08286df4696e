"""What Lightning knows beside weights, optimizers and schedulers, as objects of a session.

`SharedState` is the same on all ranks: counters of the loops, callbacks, hooks, precision, data
module. `RankState` differs between ranks: random states at the start of the epoch, loaders, metrics
of the epoch. At another number of ranks the session leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.frameworks.lightning.data import TrainingData
from holdfast.trainer.frameworks.lightning.files import StrategyFiles, model_checkpoints
from holdfast.trainer.frameworks.lightning.metrics import EpochMetrics
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.state.objects import RankLimited

FORMAT: Final = 1
# Tensors of at most this many elements become plain numbers. A new best score or a new metric then
# does not change the layout of the checkpoint, which all ranks would have to plan again.
SMALL_ELEMENTS: Final = 64
SMALL: Final = "$small"
LIVE: Final = "$live"
WEIGHTS: Final = "state_dict"
# Attributes of `ModelCheckpoint` that its own state does not contain: whether this step was saved,
# and whether a save waits for the evaluation.
OF_MODEL_CHECKPOINT: Final = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
)


class LoopPlace(StrEnum):
    """Where in Lightning's loops a checkpoint was made, and so what a resume runs first.

    AFTER_STEP: the evaluation that follows the step, if it is due, and the end of the epoch.
    AFTER_EVALUATION: the next batch. BETWEEN_EPOCHS: the next epoch.
    """

    AFTER_STEP = "after_step"
    AFTER_EVALUATION = "after_evaluation"
    BETWEEN_EPOCHS = "between_epochs"


class FitState(Protocol):
    """What the state of a trainer is taken from and given to: `TrainerFit`, as seen from here."""

    trainer: Any
    session: FrameworkSession | None
    place: LoopPlace
    is_capturing: bool
    data: TrainingData
    metrics: EpochMetrics
    files: StrategyFiles

    def resume_at(self, place: LoopPlace, trainer_state: Mapping[str, Any]) -> None:
        """Continue the loops at `place`. Their counters are restored already."""


class SharedState(RankLimited):
    """The state of a trainer that is the same on all ranks."""

    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        # Whether a checkpoint had this state.
        self.is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """Return plain data. The hooks `on_save_checkpoint` of callbacks and module are called."""
        fit, trainer = self._fit, self._fit.trainer
        loops = trainer.fit_loop
        if fit.session is not None:
            fit.files.cover(fit.session.step)
        return {
            "format": FORMAT,
            "lightning": pl.__version__,
            "place": str(fit.place),
            "loops": _loops_of(fit),
            "checkpoint": pack(_checkpoint_of(trainer)),
            "model_checkpoints": {
                each.state_key: {name: getattr(each, name) for name in OF_MODEL_CHECKPOINT}
                for each in model_checkpoints(trainer)
            },
            "trainer": {
                "should_stop": trainer.should_stop,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "has_evaluation_data": loops.epoch_loop.val_loop._combined_loader is not None,
                "reloaded_train": loops._last_train_dl_reload_epoch,
                "reloaded_evaluation": loops.epoch_loop.val_loop._last_val_dl_reload_epoch,
            },
            "metrics": pack(fit.metrics.shared_state()),
            "data": fit.data.shared_state(),
            "files": fit.files.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything except weights, optimizers and schedulers, which the session restores.

        Raises `CheckpointError` for a newer format, and if the data cannot continue at this number
        of ranks.
        """
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"the state of Lightning's trainer has format {state['format']!r}, written with "
                f"lightning {state['lightning']}; this version of Holdfast reads {FORMAT}"
            )
        fit, trainer = self._fit, self._fit.trainer
        checkpoint = unpack(state["checkpoint"])
        fit.files.load_state_dict(state["files"], checkpoint["callbacks"])
        trainer.fit_loop.load_state_dict(state["loops"])
        # Lightning's sanity check is for new runs.
        trainer.fit_loop.epoch_loop.val_loop._restarting = True
        _apply_checkpoint(trainer, checkpoint)
        for each in model_checkpoints(trainer):
            for name, value in state["model_checkpoints"].get(each.state_key, {}).items():
                setattr(each, name, value)
        fit.metrics.load_shared(unpack(state["metrics"]))
        fit.data.load_shared(state["data"])
        fit.resume_at(LoopPlace(state["place"]), state["trainer"])
        self.is_restored = True

    def rank_limits(self) -> dict[str, Any]:
        return self._fit.data.rank_limits()


class RankState:
    """The state of a trainer that differs between ranks."""

    def __init__(self, fit: FitState) -> None:
        self._fit = fit

    def state_dict(self) -> dict[str, Any]:
        return {
            "data": self._fit.data.rank_state(),
            "metrics": self._fit.metrics.rank_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fit.data.load_rank(state["data"])
        self._fit.metrics.load_rank(state["metrics"])


def pack(value: Any) -> Any:
    """Return `value` with small tensors replaced by plain numbers, exactly."""

    def small(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() > SMALL_ELEMENTS:
            return tensor
        plain = tensor.detach().cpu()
        exact = plain.double() if plain.is_floating_point() else plain
        kind = str(tensor.dtype).removeprefix("torch.")
        return {SMALL: [kind, str(tensor.device), exact.tolist()]}

    return _mapped(value, small)


def unpack(value: Any) -> Any:

    def large(item: Any) -> Any:
        if not isinstance(item, Mapping) or set(item) != {SMALL}:
            return item
        kind, device, numbers = item[SMALL]
        return torch.tensor(numbers, dtype=getattr(torch, kind), device=device)

    return _mapped(value, large)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to each item, outside before inside."""
    value = change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _loops_of(fit: FitState) -> dict[str, Any]:
    fit.is_capturing = True
    try:
        state: dict[str, Any] = fit.trainer.fit_loop.state_dict()
    finally:
        fit.is_capturing = False
    return state


def _checkpoint_of(trainer: Any) -> dict[str, Any]:
    """Return what Lightning's `dump_checkpoint` adds to weights, optimizers and schedulers.

    Hooks find the live weights under `state_dict`. What they leave there unchanged is not saved
    again.
    """
    weights = trainer.lightning_module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        WEIGHTS: weights,
        "callbacks": call._call_callbacks_state_dict(trainer),
    }
    precision = trainer.precision_plugin
    if state := precision.state_dict():
        checkpoint[type(precision).__qualname__] = state
    precision.on_save_checkpoint(checkpoint)
    data = trainer.datamodule
    if data is not None and (state := call._call_lightning_datamodule_hook(trainer, "state_dict")):
        checkpoint[type(data).__qualname__] = state
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    return {key: LIVE if item is weights else item for key, item in checkpoint.items()}


def _apply_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Restore data module, callbacks and precision, with their hooks, in Lightning's order."""
    weights = trainer.lightning_module.state_dict()
    # Values may be tensors, whose comparison is a tensor.
    loaded = {
        key: weights if isinstance(item, str) and item == LIVE else item
        for key, item in checkpoint.items()
    }
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = loaded
    try:
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", loaded)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = {}
