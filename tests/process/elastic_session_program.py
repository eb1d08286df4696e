"""One run that changes its pipeline degree: two stages, one process, two stages again.

    python elastic_session_program.py FOLDER

The stages exchange activations themselves, with the same global batch in each step. The run in
`FOLDER/changed` does six steps at each degree, and `FOLDER/same` does all steps in one process.
The test compares every loss and the samples of every step.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.forked_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from holdfast.trainer import Session

SAMPLES, GLOBAL_BATCH, WIDTH, STEPS = 64, 8, 12, 6
DEGREES = (2, 1, 2)


class Net(nn.Module):
    """Two named layers; a stage has one of them under the same name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"0": nn.Linear(8, WIDTH), "1": nn.Linear(WIDTH, 4)})


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for number, degree in enumerate(DEGREES, start=1):
        act = partial(train, folder / "changed", number * STEPS)
        run_ranks(degree, folder / f"store-{number}", act)
    run_ranks(1, folder / "store-same", partial(train, folder / "same", len(DEGREES) * STEPS))


def train(directory: Path, total: int) -> None:
    """Train up to step `total` from the run's current step."""
    stages = dist.get_world_size()
    mesh = init_device_mesh("cpu", (stages, 1), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    net = Net()
    inputs, targets = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 4)
    if stages == 2:
        del net.layers[str(1 - stage)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    with Session(net, optimizer, directory=directory, interval=100, mesh=mesh) as session:
        for step in session.steps(total):
            ids = session.batch(SAMPLES, GLOBAL_BATCH)
            loss = run_step(net, inputs[ids], targets[ids], stage, stages)
            optimizer.step()
            optimizer.zero_grad()
            if stage == stages - 1:
                note(directory, step=step, ids=ids.tolist(), loss=loss, stages=stages)


def run_step(
    net: Net, inputs: torch.Tensor, targets: torch.Tensor, stage: int, stages: int
) -> float:
    """Forward and backward through the stages; returns the loss on the last stage."""
    hidden = net.layers["0"](inputs).relu() if stage == 0 else None
    if stages == 2 and hidden is not None:
        gradient = torch.empty_like(hidden)
        dist.send(hidden.detach(), 1)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        return 0.0
    received = torch.empty(len(inputs), WIDTH, requires_grad=True)
    if hidden is None:
        with torch.no_grad():
            dist.recv(received, 0)
    loss = F.mse_loss(net.layers["1"](received if hidden is None else hidden), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    if received.grad is not None:
        dist.send(received.grad, 0)
    return float(loss.detach())


def note(directory: Path, **line: Any) -> None:
    with open(directory / "losses.jsonl", "a") as stream:
        stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
