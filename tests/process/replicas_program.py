"""Batch normalisation on four ranks, replicated and sharded in several ways, saved and resumed.

    python replicas_program.py FOLDER

Each rank writes its buffers at the start and the end of each launch to
`FOLDER/<case>-<launch>-<rank>.pt`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tests.process.buffers_program import Net
from tests.support.forked_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from holdfast.trainer import Session

RANKS, STEPS = 4, 2
LAUNCHES = 2


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=grid())
    return model


def hsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        device_mesh=grid(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def groups(model: nn.Module) -> nn.Module:
    """Groups of ranks 0 and 2, and 1 and 3; each broadcasts the buffers of its first rank."""
    return DistributedDataParallel(model, process_group=grid().get_group("replicas"))


def placed(model: nn.Module) -> nn.Module:
    """Buffers are DTensors, replicated over a mesh; the forward pass does not keep them equal."""
    for norm in model.norms:  # type: ignore[union-attr]
        for name in ("running_mean", "running_var"):
            local = torch.full((norm.num_features,), float(dist.get_rank()))
            places = [Replicate(), Replicate()]
            setattr(norm, name, DTensor.from_local(local, grid(), places, run_check=False))
    return model


CASES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": fsdp2,
    "hsdp1": hsdp1,
    "groups": groups,
    "placed": placed,
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for launch in range(LAUNCHES):
        run_ranks(RANKS, folder / f"store-{launch}", partial(train_each, folder, launch))


def train_each(folder: Path, launch: int) -> None:
    for case in CASES:
        train(folder, case, launch)


def train(folder: Path, case: str, launch: int) -> None:
    model = CASES[case](Net(launch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = STEPS if launch == 0 else STEPS + 1
    with Session(model, optimizer, directory=folder / case, interval=100) as session:
        began = buffers_of(model)
        for step in session.steps(last):
            train_once(model, optimizer, step, is_same=case == "groups")
        ended = buffers_of(model)
    torch.save({"began": began, "ended": ended}, folder / f"{case}-{launch}-{dist.get_rank()}.pt")


def train_once(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, is_same: bool
) -> None:
    """A step on the rank's own data, or if `is_same`, on that of its group's `nth` member."""
    nth = dist.get_rank() // 2 if is_same else dist.get_rank()
    drawn = torch.Generator().manual_seed(step * RANKS + nth)
    if any(isinstance(buffer, DTensor) for buffer in model.buffers()):
        return
    loss = model(torch.randn(6, 3, generator=drawn) * (nth + 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.rpartition("norms.")[2]: (
            buffer.to_local() if isinstance(buffer, DTensor) else buffer
        ).clone()
        for name, buffer in model.named_buffers()
    }


if __name__ == "__main__":
    main()
