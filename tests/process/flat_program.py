"""FSDP1 without a device mesh, whose state dict has ShardedTensors, in one and several launches.

    python flat_program.py FOLDER CASE

Each rank writes the unsharded state it had when a launch began and when it ended:
`FOLDER/<case>-<launch>-<rank>.pt`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.forked_ranks import run_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from holdfast.trainer import Session

FULL = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
# For each launch: (number of ranks, last step).
WHOLE, PARTS = "whole", "parts"
LAUNCHES = {WHOLE: ((2, 4),), PARTS: ((2, 2), (2, 4), (3, 4), (1, 4))}
# Whether the optimizer has the original parameters or the flat ones.
CASES = {"original": True, "flat": False}


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    for run, launches in LAUNCHES.items():
        for number, (ranks, stop) in enumerate(launches):
            act = partial(train, folder, case, run, number, stop)
            run_ranks(ranks, folder / f"store-{case}-{run}-{number}", act)


def make(case: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    # With three ranks, the first layer's sizes split unevenly and within rows.
    plain = nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 1))
    model = FullyShardedDataParallel(
        plain,
        device_id=torch.device("cpu"),
        use_orig_params=CASES[case],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train(folder: Path, case: str, run: str, number: int, stop: int) -> None:
    """One launch; `number` sets the initial weights, which a resume replaces."""
    rank = dist.get_rank()
    model, optimizer = make(case, number)
    if dist.get_world_size() > 1:
        kinds = {type(value) for value in get_model_state_dict(model).values()}
        assert ShardedTensor in kinds, kinds
    with Session(model, optimizer, directory=folder / f"{case}-{run}", interval=100) as session:
        began = unsharded(model, optimizer)
        for step in session.steps(stop):
            drawn = torch.Generator().manual_seed(step * 100 + rank)
            loss = model(torch.randn(6, 7, generator=drawn)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    saw = {"began": began, "ended": unsharded(model, optimizer), "step": session.step}
    torch.save(saw, folder / f"{case}-{run}-{number}-{rank}.pt")


def unsharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Tensors and options by their checkpoint keys, complete on rank 0."""
    parts: dict[str, Any] = {"model": get_model_state_dict(model, options=FULL)}
    if optimizer.state:
        parts["optimizer"] = get_optimizer_state_dict(model, optimizer, options=FULL)
    return {
        f"{part}.{key}": value.clone() if torch.is_tensor(value) else value
        for part, state in parts.items()
        for key, value in state.items()
    }


if __name__ == "__main__":
    main()
