"""A small training program with every kind of state: FSDP2, dropout, AMP, EMA, SWA, a loader.

Its settings are one JSON argument, the same in every launch. `EXACT_KILL_AT` in the environment
is the step in which all ranks kill themselves. Each rank appends a line for each step to
`records/rank<r>.jsonl`; the last line has digests of everything that a checkpoint should have.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.trainer import Session

SAMPLES = 100
GLOBAL_BATCH = 12
WIDTH = 32
SWA_START = 10
OVERFLOW_STEP = 8


class Rows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Row `i` depends only on `i`."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=generator)

    def __len__(self) -> int:
        return SAMPLES


class Counter:
    """A user's own object: counts samples of this rank."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def build() -> nn.Module:
    """One block with a frozen layer, an untouched one, tied weights and a buffer."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "first": nn.Linear(8, WIDTH),
            "frozen": nn.Linear(WIDTH, WIDTH),
            "untouched": nn.Linear(4, 4),
            "norm": nn.LayerNorm(WIDTH),
            "tied": nn.Linear(8, WIDTH, bias=False),
        }
    )
    model["tied"].weight = model["first"].weight
    model["frozen"].requires_grad_(False)
    model.register_buffer("calls", torch.zeros(()))
    return model


class Net(nn.Module):
    """`build`'s layers in a row, with dropout; predicts its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()
        self.dropout = nn.Dropout(0.2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        layers.calls += 1
        hidden = self.dropout(F.gelu(layers["first"](rows)))
        hidden = layers["norm"](hidden + layers["frozen"](hidden))
        reconstructed: torch.Tensor = self.dropout(hidden) @ layers["tied"].weight
        return reconstructed


class Program:
    """All objects of the training, on one rank."""

    def __init__(self, steps: int) -> None:
        self.model = Net()
        average = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self.ema = AveragedModel(Net(), multi_avg_fn=average)
        self.swa = AveragedModel(Net())
        for module in (self.model, self.ema.module, self.swa.module):
            fully_shard(module)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=0.01,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.swa_scheduler = SWALR(self.optimizer, swa_lr=0.004, anneal_epochs=3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.counter = Counter()
        self.generator = torch.Generator().manual_seed(5)

    def step(self, step: int, rows: torch.Tensor) -> float:
        """One optimizer step; returns this rank's loss."""
        rows = rows + 0.01 * random.random() + 0.01 * float(np.random.normal())
        rows = rows + 0.01 * torch.randn(rows.shape, generator=self.generator)
        loss = F.mse_loss(self.model(rows), rows)
        scaled = self.scaler.scale(loss)
        if step == OVERFLOW_STEP:
            scaled = scaled * float("inf")
        scaled.backward()  # type: ignore[no-untyped-call]
        kill_here(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        (self.swa_scheduler if step > SWA_START else self.scheduler).step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)
        if step > SWA_START:
            self.swa.update_parameters(self.model)
        return float(loss.detach())

    def digests(self) -> dict[str, str]:
        """Digests of this rank's part of all state."""
        moments = [
            value
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            for _, value in sorted(self.optimizer.state.get(parameter, {}).items())
        ]
        return {
            "model": digest(self.model.state_dict().values()),
            "moments": digest(moments),
            "ema": digest(self.ema.state_dict().values()),
            "swa": digest(self.swa.state_dict().values()),
            "generator": digest([self.generator.get_state()]),
            "torch": digest([torch.get_rng_state()]),
            "python": text_digest(random.getstate()),
            "numpy": numpy_digest(),
            "scaler": str(self.scaler.state_dict()),
            "schedulers": f"{self.scheduler.state_dict()} {self.swa_scheduler.state_dict()}",
            "counter": str(self.counter.seen),
        }


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    program = Program(settings["steps"])
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    session = Session(
        program.model,
        program.optimizer,
        [program.scheduler, program.swa_scheduler],
        extra={"ema": program.ema, "swa": program.swa, "scaler": program.scaler},
        per_rank={"counter": program.counter, "generator": program.generator},
        seed=3,
        directory=settings["directory"],
        best=("loss", "min"),
    )
    total = settings["steps"]
    loader = StatefulDataLoader(
        Rows(),
        batch_sampler=session.sampler(SAMPLES, GLOBAL_BATCH, total),
        num_workers=1,
        prefetch_factor=4,
    )
    folder = session.run_directory / "records"
    folder.mkdir(parents=True, exist_ok=True)
    with session, open(folder / f"rank{session.rank}.jsonl", "a") as record:
        for step, (ids, rows) in zip(session.steps(total), loader, strict=False):
            lr = program.optimizer.param_groups[0]["lr"]
            epoch, scale = session.epoch, program.scaler.get_scale()
            loss = program.step(step, rows)
            program.counter.seen += ids.tolist()
            session.log(loss=mean(loss))
            write(
                record, step=step, ids=ids.tolist(), loss=loss.hex(), lr=lr, epoch=epoch,
                scale=scale,
            )  # fmt: skip
        write(record, end=session.step, best=session.best, **program.digests())
    dump_whole(program, Path(settings["directory"]).parent / "whole.pt")
    dist.destroy_process_group()


def kill_here(step: int) -> None:
    if step == int(os.environ.get("EXACT_KILL_AT", 0)):
        # Wait for all ranks; otherwise another rank would wait for this one's gradients.
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for value in tensors:
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def numpy_digest() -> str:
    state: Any = np.random.get_state(legacy=False)
    numbers = state["state"]
    return text_digest([numbers["key"].tolist(), numbers["pos"], state["has_gauss"]])


def text_digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def dump_whole(program: Program, path: Path) -> None:
    """The unsharded weights and averages, for the test to compare with what it loads."""
    whole = {
        part: {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in module.state_dict().items()
        }
        for part, module in (("model", program.model), ("ema", program.ema))
    }
    if dist.get_rank() == 0:
        torch.save(whole, path)


def write(stream: Any, **line: Any) -> None:
    stream.write(json.dumps(line) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
