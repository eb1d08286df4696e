"""A DeepSpeed program as its user writes it, started by torchrun: settings are one JSON argument.

Each rank appends a line per step to `rank<r>.jsonl` in the folder of the settings. Steps sleep
`sleep_s` seconds until the file `hurry` exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

from holdfast.trainer.frameworks.deepspeed import DeepSpeedSession

SAMPLES: Final = 64
GLOBAL_BATCH: Final = 8
MICRO_BATCH: Final = 2

# On the CPU, DeepSpeed compiles operations when it starts, if it finds a compiler.
deepspeed.ops.__compatible_ops__ = {}


def main() -> None:
    deepspeed.init_distributed("gloo")
    train(json.loads(sys.argv[1]))


def train(settings: dict[str, Any]) -> None:
    """Train `steps` steps. `kill` and `term` are [rank, step]: where a signal arrives, once."""
    folder = Path(settings["folder"])
    inputs, targets = make_data()
    engine = make_engine(settings)
    session = DeepSpeedSession(engine, {"seen": 0}, seed=3, **settings.get("session", {}))
    size = engine.train_micro_batch_size_per_gpu()
    with open(folder / f"rank{session.rank}.jsonl", "a", buffering=1) as record:
        for step in session.steps(settings["steps"]):
            ids = session.batch(SAMPLES, engine.train_batch_size())
            losses = []
            for part in ids.micro(size):
                loss = F.mse_loss(engine(inputs[part]), targets[part])
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            session.client_state["seen"] += len(ids) * session.world_size
            session.log(loss=sum(losses) / len(losses))
            line = {
                "step": step,
                "world": session.world_size,
                "ids": ids.tolist(),
                "loss": sum(losses) / len(losses),
                "lr": engine.get_lr(),
                "draw": torch.rand(()).item(),
                "seen": session.client_state["seen"],
                "engine_step": engine.global_steps,
            }
            if session.rank == 0 or settings["stage"] == 3:
                # Below ZeRO 3, a checkpoint has the buffers of rank 0 only.
                line["mean"] = engine.module[1].running_mean.tolist()
            record.write(json.dumps(line) + "\n")
            interrupt(settings, session, step)
            if not os.path.exists(settings.get("hurry", "")):
                time.sleep(settings.get("sleep_s", 0.0))
    session.close()


def interrupt(settings: dict[str, Any], session: DeepSpeedSession, step: int) -> None:
    """Send a signal to this rank if the settings say so, and if no earlier launch did."""
    for name, number in (("kill", signal.SIGKILL), ("term", signal.SIGTERM)):
        taken = Path(settings["folder"]) / f"taken-{name}"
        if settings.get(name) == [session.rank, step] and not taken.exists():
            taken.touch()
            os.kill(os.getpid(), number)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, 8, generator=source)
    return inputs, inputs.square().sum(1, keepdim=True)


def make_model(dropout: float = 0.0) -> nn.Sequential:
    """A model with a buffer, and with a parameter that two ranks cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 15), nn.BatchNorm1d(15), nn.Dropout(dropout), nn.Linear(15, 1)
    )


def make_engine(settings: dict[str, Any]) -> Any:
    """The engine with AdamW in two groups, or with the optimizer of the settings."""
    model = make_model(settings.get("dropout", 0.0))
    groups = [
        {"params": [*model[0].parameters()], "weight_decay": 0.1},
        {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, settings.get("optimizer", "AdamW"))(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        config={
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {"stage": settings["stage"]},
            "zero_allow_untested_optimizer": True,
            **settings.get("config", {}),
        },
    )
    return engine


if __name__ == "__main__":
    main()
