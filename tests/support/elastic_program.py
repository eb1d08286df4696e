"""Ranks that load every earlier checkpoint into every layout, then save each layout.

    python -m tests.support.elastic_program RANKS FOLDER FLUSHER STRIDE

`FOLDER/n<ranks>` is a run with a checkpoint, and a launch, for each layout at that number of
ranks. The gathered state is saved beside it, and every load must be bit-identical to it. A layout
is saved one optimizer step after the last load into it, so that later loads have passed through
several layouts. With a STRIDE of 4 every fourth pair is loaded.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.checkpoint_program import make_identity
from tests.support.elastic_changes import check_changes
from tests.support.elastic_layouts import LAYOUTS, layouts_of
from tests.support.forked_ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer import load_checkpoint
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.topology import find_place
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.state.run_state import TrainingProgress
from holdfast.trainer.state.train_state import TrainState

NUMBERS = {name: number for number, name in enumerate(LAYOUTS, start=1)}


def main() -> None:
    world_size, folder, flusher, stride = (
        int(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
    )
    torch.set_num_threads(1)
    store = folder / f"store-{os.getpid()}"
    run_ranks(world_size, store, partial(work, folder, flusher, stride))
    store.unlink(missing_ok=True)


def work(folder: Path, flusher: str, stride: int) -> None:
    world_size = dist.get_world_size()
    own = RunPaths(folder / f"n{world_size}")
    runs = [path for path in sorted(folder.glob("n*")) if path != own.directory]
    sources = [path for run in runs for path in RunPaths(run).list_checkpoints()]
    # The matrix visits two ranks twice; the changes are checked only the first time.
    has_changed = (folder / "converted").exists()
    loads = 0
    for number, (name, layout) in enumerate(layouts_of(world_size).items()):
        model, mesh = layout.make(world_size, seed=number)
        optimizer = AdamW(model.parameters(), lr=0.1)
        for at, source in enumerate(sources):
            if (at + number) % stride == 0:
                report = load_checkpoint(source, model, optimizer)
                assert (report.missing, report.converted) == ((), ()), report
                assert [key for key in report.extra if not key.startswith("rng.")] == [], report
                check(model, optimizer, source, f"{source} into {name}")
                loads += 1
        step(model, optimizer, world_size * 100 + number)
        if not own.checkpoint(f"step-00000001.a0001.l{NUMBERS[name]:02d}").exists():
            save(own, NUMBERS[name], flusher, model, optimizer, mesh)
    if world_size == 2 and sources and not has_changed:
        keep = partial(save, RunPaths(folder / "converted"), len(LAYOUTS) + 1, flusher)
        check_changes(sources[0], truth_of(sources[0]), keep)
    if dist.get_rank() == 0:
        print(f"{loads} loads at {world_size} ranks")


def step(model: nn.Module, optimizer: AdamW, serial: int) -> None:
    """One step with synthetic gradients, which differ for each `serial`."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 0.01 * (serial % 97 + 1)
    optimizer.step()
    optimizer.zero_grad()


def gathered(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """This rank's model and optimizer state by key, with every tensor unsharded."""
    state = TrainState(
        model, [optimizer], rank=dist.get_rank(), world_size=dist.get_world_size()
    ).tensors()
    return {
        f"{part}.{key}": value.full_tensor()
        if isinstance(value, DTensor)
        else value.clone()
        if isinstance(value, torch.Tensor)
        else value
        for part, entries in state.items()
        for key, value in entries.items()
    }


def save(
    run: RunPaths, launch: int, flusher: str, model: nn.Module, optimizer: AdamW, mesh: Any
) -> Path:
    """Commit the state as step 1 of `launch`, and write a gathered copy beside the run.

    Returns the checkpoint's directory.
    """
    ranks = ControlGroup()
    identity = replace(make_identity(ranks.rank, ranks.world_size), launch=launch)
    place = find_place(identity, ranks, mesh)
    engine = CheckpointEngine(
        flusher=flusher,
        run=run,
        identity=place.identity,
        group=ranks.group,
        stage_group=ranks.stage_group,
    )
    state, document = TrainState(
        model, [optimizer], rank=ranks.rank, world_size=ranks.world_size
    ).capture(TrainingProgress(step=1, seed=0))
    name = engine.save(state, document, step=1, reason="interval", parent=None)
    assert name is not None
    assert [result.committed for result in engine.wait(120)] == [True]
    engine.close()
    whole = gathered(model, optimizer)
    if place.identity.stage_rank == 0 and (place.identity.stage is not None or ranks.rank == 0):
        torch.save(whole, truth_file(run.checkpoint(name), place.identity.stage or 0))
    dist.barrier()
    return run.checkpoint(name)


def truth_file(checkpoint: Path, stage: int) -> Path:
    run = checkpoint.parents[1]
    return run.parent / f"truth-{run.name}-{checkpoint.name}-{stage}.pt"


def truth_of(checkpoint: Path) -> dict[str, Any]:
    """The saved state of all stages."""
    run = checkpoint.parents[1]
    whole: dict[str, Any] = {}
    for path in sorted(run.parent.glob(f"truth-{run.name}-{checkpoint.name}-*.pt")):
        whole |= torch.load(path)
    return whole


def check(model: nn.Module, optimizer: AdamW, source: Path, what: str) -> None:
    """Every tensor and number equals the saved one, and the ranks together have all keys."""
    truth, found = truth_of(source), gathered(model, optimizer)
    for key, value in found.items():
        expected = truth[key]
        same = torch.equal(value, expected) if torch.is_tensor(value) else value == expected
        assert same, (what, key, value, expected)
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, set(found))
    assert set().union(*keys) == truth.keys(), what


if __name__ == "__main__":
    main()
