"""The small program that a drill trains: what each step did can be compared, bit for bit.

`python -m holdfast.trainer.rehearsal` under torchrun, its settings in the spec's `[config]`: one
small replicated model over gloo. Every rank appends a line per step to a file of its own for each
launch: the sample ids, the loss and the weights after it, as digests. Two runs of it at one
world size write the same lines, however often one of them was interrupted.
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

from holdfast.contracts.digests import digest_of
from holdfast.contracts.environment import ATTEMPT, LAUNCH
from holdfast.trainer import Session
from holdfast.trainer.config import config
from holdfast.trainer.data.order import DataOrder, Ids, parse_skips

SEED: Final = 7
SAMPLES: Final = 4096
GLOBAL_BATCH: Final = 16
WIDTH: Final = 32
BYTES_PER_FLOAT: Final = 4
# Asked for and given back in each step, never touched: memory that can be refused.
SCRATCH_BYTES: Final = 64 << 20


def main() -> None:
    """Train for `steps` steps of at least `step_s` seconds, recorded in the folder `records`.

    `padding_bytes` more are in every checkpoint. Whoever writes `weights` or `loss` into the file
    `poison` spoils one step. With `windows`, pairs of first step and steps, data is passed over
    from the start, by no doing of the session. Raises `SpecError` without settings.
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
            spoiled = take_word(poison) if session.rank == 0 else ""
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


def take_word(place: Path) -> str:
    """What the file at `place` says, which is then gone; empty without one."""
    if not place.exists():
        return ""
    word = place.read_text()
    place.unlink()
    return word


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Ids, is_spoiled: bool
) -> dict[str, Any]:
    """One optimizer step; its loss, and digests of this rank's sample ids and of the weights.

    Spoiled, its inputs are no numbers, as after an error of a device.
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
    """Inputs of shape (samples, `WIDTH`) that follow from the sample ids alone."""
    columns = torch.arange(1, WIDTH + 1, dtype=torch.float32)
    return torch.sin(ids.to(torch.float32).unsqueeze(1) * columns / SAMPLES)


def open_record(folder: Path, rank: int) -> IO[str]:
    """This rank's file for this launch; attempt and launch 0 without an agent."""
    attempt = int(os.environ.get(ATTEMPT, "0"))
    launch = int(os.environ.get(LAUNCH, "0"))
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"a{attempt:04d}.l{launch:02d}.rank{rank}.jsonl", "a")


if __name__ == "__main__":
    main()
