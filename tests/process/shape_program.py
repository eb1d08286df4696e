"""Trains two steps under plain torchrun and reports how many bytes its state uses.

    shape_program.py RUN_DIRECTORY MODE      MODE: sharded (FSDP2) or whole (every rank has all)

Rank 0 prints one JSON line with the bytes of each rank: tensors on the device, and resident shared
memory, which is the staging slots.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.trainer import Session

WIDTH = 1000
LAYERS = 6
FROZEN = 2


def main() -> None:
    directory, mode = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers[:FROZEN]:
        layer.requires_grad_(False)
    model = torch.nn.Sequential(*layers)
    if mode == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    session = Session(model, optimizer, directory=directory, interval=1)
    for _ in session.steps(session.step + 2):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
    told = {"device": device_bytes(model, optimizer), "staging": resident_shared_bytes()}
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    if dist.get_rank() == 0:
        print(json.dumps(everyone), flush=True)
    session.close()
    dist.destroy_process_group()


def device_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state that this rank itself holds."""
    tensors: list[torch.Tensor] = list(model.parameters())
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def resident_shared_bytes() -> int:
    """Bytes of shared memory that are mapped and in use here."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssShmem in /proc/self/status")


if __name__ == "__main__":
    main()
