"""The small program that a drill trains. The results of its steps can be compared bit for bit.

`python -m holdfast_bench.drills.program` runs under torchrun with the settings in the spec's
`[config]`. It trains one small replicated model over gloo. In each launch, every rank appends one
line per step to its own file: digests of the sample ids and of the new weights, and the loss.
Two runs at the same world size write the same lines, even if one of them was interrupted.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import IO, Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.environment import ATTEMPT, LAUNCH
from holdfast.trainer import Session
from holdfast.trainer.config import config
from holdfast.trainer.data.order import DataOrder, Ids, parse_skips

SEED: Final = 7
SAMPLES: Final = 4096
GLOBAL_BATCH: Final = 16
WIDTH: Final = 32
BYTES_PER_FLOAT: Final = 4
# Allocated and freed in each step without being touched, so that an allocation can fail.
SCRATCH_BYTES: Final = 64 << 20


def main() -> None:
    """Train for `steps` steps of at least `step_s` seconds, recorded in the folder `records`.

    `padding_bytes` enlarges every checkpoint. If the file `poison` contains `weights` or `loss`,
    one step is spoiled. With `windows`, pairs of first step and number of steps, the program skips
    data from the start without the session. Raises `SpecError` without settings.
    """
    settings = config()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))
    padding = int(settings.get("padding_bytes", 0)) // BYTES_PER_FLOAT
    model.register_buffer("padding", torch.zeros(padding))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    directory, poison = settings.get("directory"), Path(settings["poison"])
    windows = parse_skips(settings.get("windows") or ())
    order = DataOrder(samples=SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED, skips=windows)
    with (
        Session(model, optimizer, seed=SEED, directory=directory) as session,
        open_record(Path(settings["records"]), session.rank) as record,
    ):
        for step in session.steps(int(settings["steps"])):
            began = time.monotonic()
            spoiled = take_text(poison) if session.rank == 0 else ""
            ids = (
                order.rank_ids(step, session.rank, session.world_size)
                if windows
                else session.batch(SAMPLES, GLOBAL_BATCH)
            )
            line = train_step(model, optimizer, ids, spoiled == "weights")
            session.log(loss=math.nan if spoiled == "loss" else line["loss"])
            record.write(json.dumps({"time": time.time(), "step": step, **line}) + "\n")
            record.flush()
            time.sleep(max(0.0, began + float(settings["step_s"]) - time.monotonic()))
    dist.destroy_process_group()


def take_text(path: Path) -> str:
    """Read and delete the file at `path`. Return "" if there is none."""
    if not path.exists():
        return ""
    text = path.read_text()
    path.unlink()
    return text


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Ids, is_spoiled: bool
) -> dict[str, Any]:
    """Run one optimizer step. Return its loss and digests of this rank's ids and of the weights.

    If `is_spoiled`, the inputs are NaN, as after a device error.
    """
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
    inputs = features(torch.as_tensor(ids))
    if is_spoiled:
        inputs = inputs * math.nan
    loss = F.mse_loss(model(inputs), inputs[:, :4].flip(1))
    del scratch
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    flat = torch.cat([flat, loss.detach().reshape(1)]) / dist.get_world_size()
    dist.all_reduce(flat)
    means = torch.split(flat[:-1], [p.numel() for p in parameters])
    for parameter, mean in zip(parameters, means, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(mean.view_as(parameter.grad))
    optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in parameters])
    return {
        "loss": float(flat[-1]),
        "ids": digest_of(ids.tobytes()),
        "weights": digest_of(weights.numpy().tobytes()),
    }


def features(ids: torch.Tensor) -> torch.Tensor:
    """Return inputs of shape (samples, `WIDTH`) that depend on the sample ids only."""
    columns = torch.arange(1, WIDTH + 1, dtype=torch.float32)
    return torch.sin(ids.to(torch.float32).unsqueeze(1) * columns / SAMPLES)


def open_record(folder: Path, rank: int) -> IO[str]:
    """Open this rank's file for this launch. Without an agent, attempt and launch are 0."""
    attempt = int(os.environ.get(ATTEMPT, "0"))
    launch = int(os.environ.get(LAUNCH, "0"))
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"a{attempt:04d}.l{launch:02d}.rank{rank}.jsonl", "a")


if __name__ == "__main__":
    main()
