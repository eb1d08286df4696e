"""A training program with a `Session`, for runs that start from imported weights.

    torchrun imported_program.py SETTINGS

SETTINGS is JSON. Rank 0 writes the loss of each step, as text, to `losses.txt` in the run's folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.trainer import Session, load_pretrained

SAMPLES, WIDTH = 64, 16


class Tied(nn.Module):
    """An embedding whose weight is also the head's, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SAMPLES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SAMPLES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.layer(self.embed(ids))))
        return out


def make_model(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def train(settings: dict[str, Any], directory: Path | None = None) -> None:
    """Train, from imported weights or from those in `settings["pretrained"]`."""
    torch.set_num_threads(1)
    model = make_model(2)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if settings.get("pretrained"):
        load_pretrained(model, settings["pretrained"])
    torch.manual_seed(7 + dist.get_rank())
    session = Session(
        model, optimizer, scheduler, interval=2, directory=directory, rename=settings.get("rename")
    )
    for step in session.steps(settings["steps"]):
        ids = torch.from_numpy(np.asarray(session.batch(SAMPLES, 8)))
        noise = torch.randn(len(ids), SAMPLES) * 0.01
        loss = nn.functional.cross_entropy(model(ids) + noise, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        if dist.get_rank() == 0:
            with open(session.run_directory / "losses.txt", "a") as stream:
                print(step, float(total).hex(), file=stream)
        _die_once(settings, session, step)
    session.close()


def _die_once(settings: dict[str, Any], session: Session, step: int) -> None:
    """Kill rank 1 after step `kill`, in the first launch that gets there."""
    trap = session.run_directory / "killed"
    if step == settings.get("kill") and dist.get_rank() == 1 and not trap.exists():
        trap.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(json.loads(sys.argv[1]))
    dist.destroy_process_group()
