"""A small elastic program for the session's tests: FSDP2 under torchrun, plain without it.

Its settings are one JSON argument, so that its command line is the same in every launch. Each
rank appends a line per step to `records/rank<r>.jsonl`, and its pid to `pids/`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.fsdp import fully_shard

from holdfast.trainer import Session

SAMPLES = 512


def main() -> None:
    settings = json.loads(sys.argv[1])
    is_joined = "WORLD_SIZE" in os.environ and not settings.get("forget_group")
    if is_joined:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 4)
    model = make_model(settings)
    if is_joined:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, settings.get("horizon", settings["steps"])
    )
    late = Late(settings.get("late"))
    session = Session(
        model,
        optimizer,
        scheduler,
        seed=3,
        extra={"late": late},
        directory=settings["directory"],
        best=("loss", "min"),
        **settings.get("fit", {}),
        planner=RecordedRequest() if settings.get("planner") else None,
    )
    note_pid(session)
    with session, open_record(session) as record:
        for step in session.steps(settings["steps"]):
            if settings.get("fail_at") == [session.rank, step]:
                raise RuntimeError(f"a bad batch at step {step}")
            ids = session.batch(SAMPLES, 12)
            loss = F.mse_loss(model(inputs[ids]), targets[ids])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = float(loss.detach()) / session.world_size
            if is_joined:
                total = torch.tensor(mean, dtype=torch.float64)
                dist.all_reduce(total)
                mean = total.item()
            session.log(loss=mean)
            late.steps = step
            write(record, step=step, ids=ids.tolist(), loss=mean, world=session.world_size)
            time.sleep(pause_s(settings, step))
        write(record, end=session.step, weights=weights_digest(model), stop=session.should_stop)
    if is_joined:
        dist.destroy_process_group()


def pause_s(settings: dict[str, Any], step: int) -> float:
    """Seconds to sleep: more from the step in `slow` on, none once the file `hurry` exists."""
    since, slow_s = settings.get("slow", (math.inf, 0.0))
    hurry = Path(settings["directory"]).parent / "hurry"
    is_slow = step >= since and not hurry.exists()
    return float(slow_s if is_slow else settings.get("sleep_s", 0.0))


def make_model(settings: dict[str, Any]) -> nn.Module:
    """Two layers, the last one named by `head`; with `scale` one more parameter."""
    dropout = nn.Dropout(settings.get("dropout", 0.0))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), dropout)
    model.add_module(settings.get("head", "3"), nn.Linear(16, 4))
    if settings.get("scale"):
        model.add_module("scale", Scale())
    return model


class Scale(nn.Module):
    """One factor, which is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


class RecordedRequest(DefaultSavePlanner):
    """A custom planner that writes its keys beside the records."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        folder = Path(json.loads(sys.argv[1])["directory"]) / "planned"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{os.getpid()}", "a") as stream:
            stream.write(f"{len(plan.items)}\n")
        return plan


class Late:
    """An object whose state gets a tensor on one rank, after some steps: `at` is (rank, steps)."""

    def __init__(self, at: list[int] | None) -> None:
        self._at, self.steps = at, 0

    def state_dict(self) -> dict[str, Any]:
        is_born = self._at is not None and self.steps >= self._at[1]
        if not is_born or self._at is None or self._at[0] != dist.get_rank():
            return {}
        return {"average": torch.full((1000,), float(self.steps))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["average"][0]) if state else 0


def note_pid(session: Session) -> None:
    folder = session.run_directory / "pids"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{session.rank}-{os.getpid()}").touch()


def open_record(session: Session) -> Any:
    folder = Path(session.run_directory) / "records"
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"rank{session.rank}.jsonl", "a")


def write(stream: Any, **line: Any) -> None:
    stream.write(json.dumps(line) + "\n")
    stream.flush()


def weights_digest(model: nn.Module) -> str:
    """A digest of this rank's shards."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
