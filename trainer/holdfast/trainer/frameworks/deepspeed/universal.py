"""Load a checkpoint at another number of ranks, through DeepSpeed's universal format.

One rank converts the checkpoint into a folder of its own, all ranks load it, and the folder is
deleted. The checkpoint itself stays as it is. DeepSpeed's load leaves out buffers and frozen
parameters. With ZeRO stage 3 it also leaves out the options of all parameter groups except the
first, and mixes up their step counters. All of this is restored here.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import BUFFER_NAMES, OPTIMIZER_STATE_DICT, PARAM_GROUPS

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.frameworks.deepspeed.engine import WEIGHTS_STAGE
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.state.file_state import SavedFiles

MODULE: Final = "module"


def load_converted(engine: Any, saved: SavedFiles, ranks: ControlGroup) -> tuple[Any, Any]:
    """Convert and load a checkpoint. Return what `load_checkpoint` returns. Every rank calls this.

    Raises `CheckpointError`, before the engine changes, if DeepSpeed cannot convert it.
    """
    tag, scratch = saved.facts["tag"], saved.scratch
    try:
        ranks.share(lambda: _convert(saved))
        with universal_loads(engine, True):
            found: tuple[Any, Any] = engine.load_checkpoint(str(scratch), tag)
        _restore_rest(engine, scratch / tag)
        # No rank may delete files that another one still reads.
        ranks.gather(lambda: None)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    return found


@contextlib.contextmanager
def universal_loads(engine: Any, is_universal: bool) -> Iterator[None]:
    """Let the engine load the universal format or its own, whatever its configuration says."""
    config = engine._config
    before = config.load_universal_checkpoint
    config.load_universal_checkpoint = is_universal
    try:
        yield
    finally:
        config.load_universal_checkpoint = before


def _convert(saved: SavedFiles) -> None:
    """Convert the checkpoint into the scratch folder, which an earlier launch may have left."""
    tag, scratch = saved.facts["tag"], saved.scratch
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Worker processes would be forked from a process with threads, so there are none.
    arguments = argparse.Namespace(
        input_folder=str(saved.directory / tag),
        output_folder=str(scratch / tag),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(arguments)
    except Exception as error:
        # DeepSpeed raises many kinds of errors, and asserts.
        raise CheckpointError(
            f"{saved.directory}: DeepSpeed could not convert it from {saved.world_size} ranks: "
            f"{type(error).__name__}: {error}. The checkpoint is unchanged; relaunch on "
            f"{saved.world_size} ranks"
        ) from error


def _restore_rest(engine: Any, folder: Path) -> None:
    """Restore what DeepSpeed's universal load leaves out."""
    is_sharded = engine.zero_optimization_stage() == WEIGHTS_STAGE
    name = (
        "zero_pp_rank_0_mp_rank_00_model_states.pt" if is_sharded else "mp_rank_00_model_states.pt"
    )
    saved = torch.load(folder / name, map_location="cpu", weights_only=False)
    live = dict(engine.module.named_buffers())
    names = set(saved[BUFFER_NAMES])
    if not is_sharded:
        frozen = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
        live |= frozen
        names |= frozen.keys()
    with torch.no_grad():
        for key in names & live.keys() & saved[MODULE].keys():
            live[key].copy_(saved[MODULE][key])
    if is_sharded:
        _restore_groups(engine.optimizer.optimizer, folder)


def _restore_groups(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Restore the options of every parameter group, and give every part a step counter of its own.

    DeepSpeed gives all groups the options of the first. All parts get the same tensor as their step
    counter, so each part of torch's Adam would count the steps of all parts.
    """
    path = folder / "zero" / "optimizer_state.pt"
    saved = torch.load(path, map_location="cpu", weights_only=False)
    groups = saved[OPTIMIZER_STATE_DICT][PARAM_GROUPS]
    for group, former in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in former.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
