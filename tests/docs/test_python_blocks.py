"""The Python in the documentation runs: in one process, with a session and a small program."""

from __future__ import annotations

import ast
import contextlib
import datetime
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.docs.blocks import TUTORIAL, Block, unmarked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer import Session
from holdfast.trainer.export.__main__ import main as export

BLOCKS: Final = [
    block for block in unmarked() if block.language == "python" and block.page != TUTORIAL
]
SAMPLES: Final = 512
WIDTH: Final = 16
STEPS: Final = 3
EPOCHS: Final = 2
# The value of the last expression, which a block shows in a comment.
SHOWN: Final = re.compile(r"# ([\d.]+)$")


class EnoughEpochs(Exception):
    """Ends a loop over many epochs."""


class Model(nn.Module):
    """One layer. With targets, its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs if targets is None else (outputs - targets).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def make_names() -> dict[str, Any]:
    """What the blocks use without a definition, but for the session."""
    inputs, targets = torch.ones(SAMPLES, WIDTH), torch.ones(SAMPLES, 1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    evaluations: list[object] = []

    def evaluate(*given: object) -> float:
        evaluations.append(given)
        if not given and len(evaluations) == EPOCHS:
            raise EnoughEpochs
        return 1.0 / len(evaluations)

    return {
        "torch": torch,
        "np": np,
        "DataLoader": DataLoader,
        "Session": Session,
        "model": model,
        "optimizer": optimizer,
        "ema": Model(),
        "loss": torch.ones(()),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "scaler": torch.amp.GradScaler("cpu"),
        "data": inputs,
        "dataset": inputs,
        "starts": inputs,
        "batches": [inputs[:256], inputs[256:]],
        "train": TensorDataset(inputs, targets),
        "total": STEPS,
        "max_iters": STEPS,
        "step": 1,
        "steps_per_epoch": 2,
        "new_rate": 0.05,
        "eval_interval": 2,
        "global_batch": 64,
        "batch_size": 16,
        "arguments": SimpleNamespace(lr=0.1),
        "evaluate": evaluate,
        "validate": evaluate,
        "estimate_loss": lambda: 1.0,
        "get_lr": lambda step: 0.1 / step,
        "loss_of": lambda part: model(part, part[:, :1]),
        "get_batch": lambda ids: (inputs[ids], targets[ids]),
        "train_step": train_step,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a block runs in, as the only rank of torchrun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_ROOT", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()
    # A page allows this class to be loaded, for the whole process.
    with torch.serialization.safe_globals([datetime.date]):
        pass


def execute(block: Block, names: dict[str, Any]) -> Any:
    """Run a block; the value of the expression at its end, if it has one."""
    tree = ast.parse(block.text, str(block))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(block), "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), str(block), "eval"), names)


def expected_step(text: str) -> int:
    """The step that the loop in a block reaches."""
    if found := re.search(r"session\.steps\((\d+)\)", text):
        return int(found[1])
    if batch := re.search(r"distributed_sampler\(len\(\w+\), (\d+)", text):
        epochs = EPOCHS if "session.epochs(" in text else 1
        return epochs * math.ceil(SAMPLES / int(batch[1]))
    is_loop = "session.steps(" in text or "session.enumerate(" in text
    return STEPS if is_loop else 0


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_in_the_docs_runs(block: Block, folder: Path) -> None:
    names = make_names()
    makes_one = re.search(r"\b(Session|fabric_session)\(", re.sub("#.*", "", block.text))
    if not makes_one and "session" in block.text:
        names["session"] = Session(
            *(names["model"], names["optimizer"], names["scheduler"]),
            interval=1000,
            snapshots="off",
            best=("accuracy", "max"),
        )
    if '"all.pt"' in block.text:
        export_all(names, folder / "all.pt")
    if "load_pretrained(" in block.text:
        (folder / "weights").mkdir()
        save_file(names["model"].state_dict(), folder / "weights" / "model.safetensors")
    value = None
    try:
        with contextlib.suppress(EnoughEpochs):
            value = execute(block, names)
    finally:
        if "session" in names:
            names["session"].close()
    if "session" in names:
        assert names["session"].step == expected_step(block.text)
    if shown := SHOWN.search(block.text):
        assert value == pytest.approx(float(shown[1]), abs=0.0005)


def export_all(names: dict[str, Any], target: Path) -> None:
    """Export a checkpoint of the program to one file."""
    parts = (names["model"], names["optimizer"], names["scheduler"])
    directory = target.with_name("exported")
    with Session(*parts, directory=directory, extra={"scaler": names["scaler"]}) as session:
        for _ in session.steps(1):
            names["loss_of"](names["data"]).backward()
            names["optimizer"].step()
    (saved,) = RunPaths(directory).list_checkpoints()
    assert export([str(saved), "--to", "torch", "--output", str(target)]) == 0


def test_all_kinds_of_blocks_are_run() -> None:
    text = "\n".join(block.text for block in BLOCKS)
    for name in ("Session(", ".steps(", ".epochs(", ".batches(", ".sampler(", ".checkpoint()"):
        assert name in text
