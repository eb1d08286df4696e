"""Two ranks that train a small model with DeepSpeed, and save it.

    torchrun --nproc-per-node=2 -m tests.frameworks.zero_program FOLDER STAGE

Rank 0 also writes `expected.pt`: the weights that DeepSpeed's own tool reads from the checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

# On the CPU, DeepSpeed compiles operations when it starts, if it finds a compiler.
deepspeed.ops.__compatible_ops__ = {}


class Partly(nn.Module):
    """Layers of sizes that two ranks do not share evenly, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.norm(self.second(self.first(inputs))))
        return out.square().mean()


def main() -> None:
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Partly()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[
            {"params": trained[:3], "weight_decay": 0.0},
            {"params": trained[3:], "weight_decay": 0.1},
        ],
        config={
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        },
    )
    for _ in range(2):
        loss = engine(torch.randn(4, 7))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder / "saved"))
    dist.barrier()
    if dist.get_rank() == 0:
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder / "saved"))
        if stage == 1:
            # Its tool leaves out what was not trained.
            found["frozen.weight"] = model.frozen.weight.detach()
        torch.save({name: value.clone() for name, value in found.items()}, folder / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
