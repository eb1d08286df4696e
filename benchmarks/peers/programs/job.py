"""The job that every peer trains: a replicated model over gloo, and a line per step of each rank.

Imported by the programs beside it, each in its peer's own environment: torch and the standard
library alone. `$PEERS_JOB` names a JSON file: the shape of the job, and the folder of its records.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

SAMPLES = 4


class Job(NamedTuple):
    """Steps and seconds a step, steps between checkpoints and between copies in memory, the
    width of the model, and where checkpoints and records go."""

    steps: int
    step_s: float
    save_steps: int
    snapshot_steps: int
    width: int
    folder: str

    @property
    def checkpoints(self) -> Path:
        """Made when it is first asked for."""
        path = Path(self.folder) / "checkpoints"
        path.mkdir(parents=True, exist_ok=True)
        return path


def read_job() -> Job:
    """What the comparison asks for."""
    return Job(**json.loads(Path(os.environ["PEERS_JOB"]).read_text()))


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, equal on all ranks: 12 bytes for each of width² weights."""
    torch.manual_seed(0)
    model = nn.Linear(job.width, job.width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def inputs_of(job: Job, step: int) -> torch.Tensor:
    """The samples of a step, of shape (`SAMPLES`, width)."""
    columns = torch.arange(1, job.width + 1, dtype=torch.float32)
    return torch.sin(columns * step).expand(SAMPLES, -1)


def train_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One optimizer step over all ranks, of at least `step_s` seconds."""
    began = time.monotonic()
    inputs = inputs_of(job, step)
    optimizer.zero_grad()
    (model(inputs) - inputs).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(max(0.0, began + job.step_s - time.monotonic()))


def open_record(job: Job, rank: int) -> IO[str]:
    """This rank's file, which every launch goes on with."""
    folder = Path(job.folder) / "records"
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"rank{rank}.jsonl", "a")


def note(record: IO[str], step: int) -> None:
    """Say that `step` is done."""
    record.write(json.dumps({"time": time.time(), "pid": os.getpid(), "step": step}) + "\n")
    record.flush()


def save(job: Job, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An interval checkpoint as tutorials have it, made durable: one file under its final name."""
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = job.checkpoints / "newest.pt"
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save({**state, "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)


def load(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest checkpoint, which is loaded; 0 without one."""
    path = job.checkpoints / "newest.pt"
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train_with_interval_checkpoints(job: Job) -> None:
    """From the newest checkpoint to the last step, saved by rank 0 every `save_steps` steps."""
    model, optimizer = build(job)
    rank = dist.get_rank()
    first = load(job, model, optimizer) + 1
    with open_record(job, rank) as record:
        for step in range(first, job.steps + 1):
            train_step(job, model, optimizer, step)
            note(record, step)
            if rank == 0 and step % job.save_steps == 0:
                save(job, step, model, optimizer)
