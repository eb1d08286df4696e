"""A checkpoint exported to one file continues training in a program without Holdfast."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer import Session
from holdfast.trainer.export.__main__ import main


class PlainExtra:
    """An extra of plain values, without a tensor."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {"scale": 1.0, "tracker": (1, 2), "word": "x"}
        self.value["mean"] = np.float32(0.1)
        self.value["seen"] = np.arange(3)
        self.value["counts"] = Counter(a=2)

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state


def as_plain(value: dict[str, Any]) -> dict[str, Any]:
    """The value without its array, with Python's own numbers and mappings."""
    mean, counts = float(np.float32(value["mean"])), dict(value["counts"])
    kept = {k: v for k, v in value.items() if k != "seen"}
    return {**kept, "mean": mean, "counts": counts}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1},
        {"params": model[1].parameters(), "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def test_exported_state_continues_in_a_program_without_holdfast(tmp_path: Path) -> None:
    model, optimizer = make()
    kept, mean = PlainExtra(), nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with Session(
        model,
        optimizer,
        scheduler,
        directory=tmp_path / "run",
        interval=100,
        snapshots="off",
        extra={"kept": kept, "mean": mean},
    ) as session:
        for _ in session.steps(3):
            step(model, optimizer)
            scheduler.step()
    (saved,) = RunPaths(tmp_path / "run").list_checkpoints()
    assert main([str(saved), "--to", "torch", "--output", str(tmp_path / "all.pt")]) == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    other, its = make()
    other.load_state_dict(found["model"])
    its.load_state_dict(found["optimizer"])
    torch.optim.lr_scheduler.StepLR(its, 2).load_state_dict(found["scheduler"])
    assert as_plain(found["extra"]["kept"]) == as_plain(kept.value)
    assert torch.equal(found["extra"]["kept"]["seen"], torch.arange(3))
    nn.Linear(2, 2).load_state_dict(found["extra"]["mean"])
    for _ in range(2):
        step(model, optimizer)
        step(other, its)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    # Stock DCP reads the plain values too, from copied files and from those written again.
    for more in ([], ["--dtype", "float64"]):
        place = tmp_path / f"dcp{len(more)}"
        assert main([str(saved), "--to", "dcp", "--output", str(place), *more]) == 0
        asked: dict[str, Any] = {"scheduler": dict.fromkeys(scheduler.state_dict())}
        asked["extra"] = {"kept": dict.fromkeys(kept.value), "mean": {}}
        asked["extra"]["kept"] |= {"seen": torch.zeros(3, dtype=torch.int64), "counts": {"a": 0}}
        load_with_dcp(asked, checkpoint_id=place, no_dist=True)
        assert asked["scheduler"] == scheduler.state_dict()
        assert as_plain(asked["extra"]["kept"]) == as_plain(kept.value)
    # The optimizer's state of a parameter is not below the parameter.
    only = ["--to", "safetensors", "--include", "model.0", "--output", str(tmp_path / "w")]
    assert main([str(saved), *only]) == 0
    assert load_file(tmp_path / "w").keys() == {"0.weight", "0.bias"}
    arguments = ["--to", "torch", "--include", "extra", "--output", str(tmp_path / "extra.pt")]
    assert main([str(saved), *arguments]) == 0
    assert torch.load(tmp_path / "extra.pt", weights_only=True).keys() == {"extra"}
