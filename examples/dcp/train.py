"""PyTorch's tutorial for distributed checkpoints, with a loop that resumes: FSDP2 and `AppState`.

torchrun --nproc-per-node 2 examples/dcp/train.py

Only the import of `dcp` differs from a program that uses torch.distributed.checkpoint.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast.trainer import dcp  # instead of: import torch.distributed.checkpoint as dcp

STEPS, EVERY, SAMPLES, BATCH = int(os.environ.get("STEPS", "100")), 20, 4096, 32
CHECKPOINTS = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")


class AppState:
    """The model, the optimizer and the step, for `dcp.save` and `dcp.load`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 16)
targets = inputs @ torch.randn(16, 1)

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
app = AppState(model, optimizer)

# A directory with a manifest is a complete checkpoint.
found = sorted(CHECKPOINTS.glob("step-*/manifest.json"))
if found:
    dcp.load({"app": app}, checkpoint_id=found[-1].parent)
future = None
while app.step < STEPS:
    batch = slice(app.step * BATCH % SAMPLES, app.step * BATCH % SAMPLES + BATCH)
    loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    app.step += 1
    if app.step % EVERY == 0:
        if future is not None:
            future.result()
        future = dcp.async_save({"app": app}, checkpoint_id=CHECKPOINTS / f"step-{app.step:06d}")
        if dist.get_rank() == 0:
            print(f"step {app.step} loss {loss.item():.6f}", flush=True)
if future is not None:
    future.result()
dist.destroy_process_group()
