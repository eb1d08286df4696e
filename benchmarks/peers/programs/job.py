"""The job that every peer trains: a replicated model over gloo, with a record line per step.

The programs beside it import it, each in its peer's own environment, so it uses only torch and the
standard library. `$PEERS_JOB` names a JSON file with the job's shape and the folder of its records.
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
    """The number and seconds of steps, steps between checkpoints and between copies in memory,
    the model's width, and the folder of checkpoints and records."""

    steps: int
    step_s: float
    save_steps: int
    snapshot_steps: int
    width: int
    folder: str

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, created at first use."""
        path = Path(self.folder) / "checkpoints"
        path.mkdir(parents=True, exist_ok=True)
        return path


def read_job() -> Job:
    """Read the job of the comparison."""
    return Job(**json.loads(Path(os.environ["PEERS_JOB"]).read_text()))


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer, equal on all ranks: 12 bytes for each of width² weights."""
    torch.manual_seed(0)
    model = nn.Linear(job.width, job.width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def inputs_of(job: Job, step: int) -> torch.Tensor:
    """Return the samples of a step, of shape (`SAMPLES`, width)."""
    columns = torch.arange(1, job.width + 1, dtype=torch.float32)
    return torch.sin(columns * step).expand(SAMPLES, -1)


def train_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take one optimizer step over all ranks, of at least `step_s` seconds."""
    began = time.monotonic()
    inputs = inputs_of(job, step)
    optimizer.zero_grad()
    (model(inputs) - inputs).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(max(0.0, began + job.step_s - time.monotonic()))


def open_record(job: Job, rank: int) -> IO[str]:
    """Open this rank's record, to which every launch appends."""
    folder = Path(job.folder) / "records"
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"rank{rank}.jsonl", "a")


def note(record: IO[str], step: int) -> None:
    """Record that `step` is done."""
    record.write(json.dumps({"time": time.time(), "pid": os.getpid(), "step": step}) + "\n")
    record.flush()


def save(job: Job, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save one file as tutorials do, but durably: fsync, then rename."""
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = job.checkpoints / "newest.pt"
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save({**state, "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)


def load(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint and return its step, 0 if there is none."""
    path = job.checkpoints / "newest.pt"
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train_with_interval_checkpoints(job: Job) -> None:
    """Train from the newest checkpoint to the last step. Rank 0 saves every `save_steps` steps."""
    model, optimizer = build(job)
    rank = dist.get_rank()
    first = load(job, model, optimizer) + 1
    with open_record(job, rank) as record:
        for step in range(first, job.steps + 1):
            train_step(job, model, optimizer, step)
            note(record, step)
            if rank == 0 and step % job.save_steps == 0:
                save(job, step, model, optimizer)
