"""Trains a state of a given size with a mode of `checkpoint.staging`.

Its settings are one JSON argument. Each step changes every value in the same way on every rank, so
the bits of a checkpoint depend neither on the mode nor on the number of ranks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.trainer import Session


class Kept(torch.nn.Module):
    """Parameters of `size` bytes together, half of them for the optimizer's momentum."""

    def __init__(self, size: int, parts: int = 8) -> None:
        super().__init__()
        count = size // 2 // 4 // parts
        values = [torch.arange(count, dtype=torch.float32) + part for part in range(parts)]
        self.values = torch.nn.ParameterList(values)


def make_optimizer(model: Kept) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=False)


def train(model: Kept, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, whose gradient needs as much memory as one parameter only."""
    for part, value in enumerate(model.values):
        value.grad = torch.full_like(value, step * 0.01 + part)
    optimizer.step()
    optimizer.zero_grad()


def kill_after(seconds: float) -> None:
    """Kill this rank after so many seconds."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def main(given: dict[str, Any]) -> None:
    """Train; `bare` ends before the first save, to see what the program needs itself."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    # A checkpoint has the random states.
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = Kept(given["bytes"])
    optimizer = make_optimizer(model)
    options = {"interval": given.get("interval", 1), "snapshots": given.get("snapshots", "off")}
    more = {name: given[name] for name in ("staging", "overlap") if name in given}
    with Session(model, optimizer, directory=given["directory"], **options, **more) as session:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for step in session.steps(given["steps"]):
            if step == given.get("kill_step") and rank == given.get("kill_rank", 0):
                kill_after(given["kill_s"])
            train(model, optimizer, step)
            if given.get("bare"):
                os._exit(0)
            if grow := given.get("grow"):
                grown(model, optimizer, step, grow)


def grown(model: Kept, optimizer: torch.optim.Optimizer, step: int, at: int) -> None:
    """After the step `at`, the optimizer keeps one value more for each parameter."""
    if step == at:
        for value in model.values:
            optimizer.state[value]["more"] = torch.zeros_like(value)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
