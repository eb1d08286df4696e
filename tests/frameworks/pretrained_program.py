"""Ranks that load pretrained weights into sharded models, and check every value.

    python -m tests.frameworks.pretrained_program FOLDER

FOLDER has the sources by form. Each load writes its report as a line of JSON, on rank 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist
from tests.support.forked_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from holdfast.contracts.errors import CheckpointError, KeyMismatchError
from holdfast.trainer import load_pretrained

RANKS: Final = 2
SOURCES: Final = ("safetensors", "torch.pt", "dcp")
# A small part is read with the blocks of 4 KiB around it.
READ_ONCE: Final = 1.02


class Tied(nn.Module):
    """Two layers, an embedding and a head that shares its weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 64)
        self.up = nn.Linear(64, 5001)
        self.down = nn.Linear(5001, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 301, bias=False)
        self.head.weight = self.embed.weight


def make_model(seed: int) -> Tied:
    torch.manual_seed(seed)
    model = Tied()
    model.norm.running_mean = torch.randn(64)
    return model


def plain(model: nn.Module) -> nn.Module:
    return model


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def in_parts(model: nn.Module) -> nn.Module:
    parts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), parts)


def in_bfloat16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


LAYOUTS: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "plain": plain,
    "ddp": DistributedDataParallel,
    "fsdp": sharded,
    "tensor parallel": in_parts,
    "bfloat16": in_bfloat16,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_all(folder: Path) -> None:
    torch.set_num_threads(1)
    expected = make_model(1).state_dict()
    for source in SOURCES:
        for name, lay_out in LAYOUTS.items():
            model = lay_out(make_model(2))
            report = load_pretrained(model, folder / source)
            for key, value in model.state_dict().items():
                wanted = expected[key.removeprefix("module.")]
                assert torch.equal(whole(value), wanted.to(value.dtype)), (source, name, key)
            assert bool(report.converted) == (name == "bfloat16")
            ratio = report.bytes_read / report.bytes_unique
            if dist.get_rank() == 0:
                print(json.dumps({"source": source, "layout": name, "ratio": ratio}), flush=True)
    refuse_all(folder / SOURCES[0])


def refuse_all(source: Path) -> None:
    """Every rank raises the same error, and no weight changes."""
    other = nn.ModuleDict({"embed": nn.Embedding(301, 65)})
    with pytest.raises(KeyMismatchError, match=r"model\.embed\.weight: wanted \(301, 65\)"):
        load_pretrained(other, source, strict=False)
    counts = make_model(2)
    counts.norm.running_mean = torch.zeros(64, dtype=torch.int64)
    before = counts.up.weight.clone()
    with pytest.raises(KeyMismatchError, match=r"model\.norm\.running_mean: torch\.float32 to"):
        load_pretrained(counts, source)
    assert torch.equal(before, counts.up.weight)
    report = load_pretrained(counts, source, exclude=["norm"])
    assert not torch.equal(before, counts.up.weight)
    assert "model.norm.running_mean" in report.excluded
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(CheckpointError, match="to_empty"):
        load_pretrained(empty, source)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_pretrained(counts, source / "nothing")


if __name__ == "__main__":
    run_ranks(RANKS, Path(sys.argv[1]) / "store", partial(load_all, Path(sys.argv[1])))
