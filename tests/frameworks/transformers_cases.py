"""Runs of `transformers_program`, interrupted at chosen points and compared with full runs.

    python -m tests.frameworks.transformers_cases SHAPE RANKS INTERVAL SNAPSHOTS STRIDE FOLDER

See `tests.support.loop_cases`. Here the full run is one of the trainer without Holdfast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tests.frameworks.transformers_program import train
from tests.support import loop_cases
from tests.support.loop_cases import Case

from holdfast.trainer.frameworks.transformers import Trainer

SHAPES: Final[dict[str, dict[str, Any]]] = {
    # An evaluation and a save after each epoch, whose last step is short of samples.
    "epochs": {},
    # Accumulation, evaluations within epochs, and a last step within an epoch.
    "steps": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    },
    # FSDP2, whose best model comes from the files of all ranks, or from one.
    "sharded": {"fsdp": "SHARDED_STATE_DICT"},
    "whole_files": {"fsdp": "FULL_STATE_DICT", "gradient_accumulation_steps": 2},
    # A callback ends the training, and the order depends on random numbers of the epoch's start.
    "stops": {
        "learning_rate": 0.3,
        "num_train_epochs": 6,
        "patience": 1,
        "samples": 15,
        "train_sampling_strategy": "group_by_length",
        "save_strategy": "best",
        "save_total_limit": 1,
        "logging_strategy": "epoch",
    },
}


def shape_of(name: str) -> Callable[[Case], None]:
    """Return a program that trains without Holdfast in the full run, and with it in the others."""
    return partial(launch, SHAPES[name])


def launch(given: dict[str, Any], case: Case) -> None:
    if case.folder.name == "whole":
        train(case, kind="bare", **given)
        return
    Trainer.session_options = {"directory": case.folder / "run"}
    try:
        train(case, **given)
    except SystemExit as stop:
        # All ranks have agreed to stop, after a commit.
        if stop.code != 0:
            raise


if __name__ == "__main__":
    loop_cases.main({name: shape_of(name) for name in SHAPES})
