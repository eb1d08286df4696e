"""The keys of torchtitan's checkpoint configuration: which are refused, and what to do instead."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from holdfast.contracts.errors import SpecError
from holdfast.trainer.session.settings import Argument

# Part of torchtitan's state → its name in a checkpoint of Holdfast.
PARTS: Final = {
    "optimizer": "optimizer",
    "lr_scheduler": "scheduler",
    "dataloader": "extra.dataloader",
}
FOLDER: Final = "checkpoint"
EXPORT_DTYPE: Final = "float32"
CONFIGURATION: Final = "Trainer.Config"


def check(config: Any) -> None:
    """Raise `SpecError`, which names each key that cannot be honoured, with what to do instead."""
    wrong = [*_of_loading(config), *_of_saving(config)]
    if wrong:
        raise SpecError(f"Trainer.Config.checkpoint: {'; '.join(wrong)}", wrong)


def excluded(config: Any) -> list[str]:
    """Return the names in a checkpoint of the parts that keep their values once."""
    return [PARTS[name] for name in config.exclude_from_loading]


def best_of(config: Any) -> tuple[str, str] | None:
    """Return the metric and the direction of `best`, such as "validation_metrics/loss min"."""
    if not config.best:
        return None
    metric, direction = config.best.split()
    return metric, direction


def given(config: Any, name: str) -> Argument:
    """Return a value of the configuration that the run spec can give too."""
    default = next(field.default for field in fields(config) if field.name == name)
    value = getattr(config, name)
    return Argument(value, CONFIGURATION, is_default=value == default)


def _of_loading(config: Any) -> list[str]:
    wrong = []
    if config.load_step != -1:
        wrong.append(
            f"load_step={config.load_step}: a run continues from its newest checkpoint. To go "
            "back, use `holdfast fork`"
        )
    if config.load_only:
        wrong.append(
            "load_only=True: a run always saves. To load weights only, use "
            "holdfast.trainer.load_checkpoint, or torchtitan's own CheckpointManager"
        )
    if config.create_seed_checkpoint:
        wrong.append(
            "create_seed_checkpoint=True: create it with torchtitan's own CheckpointManager, and "
            "pass its folder as initial_load_path"
        )
    unknown = [name for name in config.exclude_from_loading if name not in PARTS]
    if unknown:
        wrong.append(
            f"exclude_from_loading={config.exclude_from_loading}: expected some of "
            f"{sorted(PARTS)}. To begin with the model only, use initial_load_path in a new run"
        )
    return wrong


def _of_saving(config: Any) -> list[str]:
    wrong = []
    if config.keep_latest_k:
        wrong.append(
            f"keep_latest_k={config.keep_latest_k}: leave it out, and write "
            f"keep = {{ last = {config.keep_latest_k} }} under [checkpoint] in the run spec"
        )
    if config.async_mode == "disabled":
        wrong.append("async_mode='disabled': leave it out, every save is asynchronous")
    if config.best and len(config.best.split()) != 2:
        wrong.append(
            f"best={config.best!r}: expected a logged metric and its direction, such as "
            "'validation_metrics/loss min'"
        )
    if not config.last_save_model_only and config.folder != FOLDER:
        wrong.append(
            f"folder={config.folder!r}: checkpoints are in the run's folder, which the spec or "
            "directory sets. folder counts only with last_save_model_only=True"
        )
    if not config.last_save_model_only and config.export_dtype != EXPORT_DTYPE:
        wrong.append(
            f"export_dtype={config.export_dtype!r}: it is for the last model; expected "
            "last_save_model_only=True with it"
        )
    return wrong
