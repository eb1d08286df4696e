"""Batch normalisation under DDP, trained in one and in two launches, to compare the ranks' state.

    python buffers_program.py FOLDER CASE

Each rank writes its state of each run to `FOLDER/<case>-<run>-<rank>.pt`.
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
from torch.nn.parallel import DistributedDataParallel

from holdfast.trainer import Session

RANKS, STEPS, STOP = 2, 4, 2
# (whether DDP broadcasts rank 0's buffers, whether buffers are saved per rank)
CASES = {"broadcast": (True, False), "apart": (False, False), "own": (False, True)}


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in (5, 5, 2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            given = norm(layer(given))
        return given


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    for run, stops in (("whole", (STEPS,)), ("parts", (STOP, STEPS))):
        for number, stop in enumerate(stops):
            act = partial(train, folder, case, run, number, stop)
            run_ranks(RANKS, folder / f"store-{case}-{run}-{number}", act)


def train(folder: Path, case: str, run: str, seed: int, stop: int) -> None:
    """One launch; `seed` sets the initial weights, which a resume replaces."""
    rank = dist.get_rank()
    broadcasts, keeps_own = CASES[case]
    model = DistributedDataParallel(Net(seed), broadcast_buffers=broadcasts)
    own = {"norms": model.module.norms} if keeps_own else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    directory = folder / f"{case}-{run}"
    with Session(model, optimizer, per_rank=own, directory=directory, interval=100) as session:
        for step in session.steps(stop):
            drawn = torch.Generator().manual_seed(step * RANKS + rank)
            loss = model(torch.randn(6, 3, generator=drawn) * (rank + 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    saw: dict[str, Any] = {"state": model.module.state_dict(), "momentum": []}
    saw["momentum"] = [state["momentum_buffer"] for state in optimizer.state.values()]
    model.eval()
    saw["validation"] = model(torch.linspace(-1, 1, 12).view(4, 3)).detach()
    torch.save(saw, folder / f"{case}-{run}-{rank}.pt")


if __name__ == "__main__":
    main()
