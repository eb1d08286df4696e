"""One model in every kind of wrapper: saved in each form, and loaded into every other.

    python forms_program.py RANK WORLD_SIZE FOLDER FLUSHER

Each form is trained one step from the same weights and saved with the session's own state; then
every form loads each of these checkpoints. Any difference raises an error.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.format.metadata import open_checkpoint
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.state.fsdp1 import OPTIONS
from holdfast.trainer.state.run_state import TrainingProgress
from holdfast.trainer.state.train_state import TrainState

WIDTH = 6


class Tied(nn.Module):
    """An embedding and a head with one weight, a frozen layer, and both kinds of buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.full((3,), float(seed)))
        self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = self.frozen(block(hidden)).relu()
        logits: torch.Tensor = self.head(hidden)
        return logits


def checkpointed(model: Tied) -> Tied:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return model


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def flat(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(
        model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
    )


FORMS: dict[str, Any] = {
    "plain": lambda seed: Tied(seed),
    "ddp": lambda seed: DistributedDataParallel(Tied(seed), find_unused_parameters=True),
    "compiled": lambda seed: torch.compile(Tied(seed), backend="eager"),
    "ddp_compiled": lambda seed: torch.compile(
        DistributedDataParallel(Tied(seed)), backend="eager"
    ),
    "checkpointed": lambda seed: checkpointed(Tied(seed)),
    "fsdp2": lambda seed: sharded(Tied(seed)),
    "fsdp2_checkpointed_compiled": lambda seed: torch.compile(
        sharded(checkpointed(Tied(seed))), backend="eager"
    ),
    "fsdp1": lambda seed: flat(Tied(seed)),
}


def make(form: str, seed: int, rank: int) -> tuple[TrainState, nn.Module, Any]:
    model = FORMS[form](seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    world_size = dist.get_world_size()
    return TrainState(model, [optimizer], rank=rank, world_size=world_size), model, optimizer


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The unsharded model and optimizer of a captured state."""
    return {
        f"{part}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for part in ("model", "optimizer")
        for key, value in state[part].items()
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    assert one.keys() == other.keys(), (what, one.keys() ^ other.keys())
    for key, value in one.items():
        same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
        assert same, (what, key, value, other[key])


def check_as_stock(form: str, state: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Keys and tensors equal those of stock DCP's helpers."""
    stock = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
    }
    assert_equal(whole(state), whole(stock), f"{form} as stock DCP")


def make_engine(
    rank: int, world_size: int, folder: Path, flusher: str, group: dist.ProcessGroup
) -> CheckpointEngine:
    identity = Identity(
        run_uid="1" * 32,
        run="r",
        attempt=1,
        launch=1,
        rank=rank,
        local_rank=rank,
        local_ranks=world_size,
        world_size=world_size,
        node=0,
        nodes=1,
        command_digest="c" * 64,
    )
    return CheckpointEngine(
        flusher=flusher, run=RunPaths(folder / "r"), identity=identity, group=group
    )


def save_each(engine: CheckpointEngine, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save one step of each form; returns the saved states and the document."""
    saved: dict[str, Any] = {}
    for step, form in enumerate(FORMS, start=1):
        state, model, optimizer = make(form, 0, rank)
        model(torch.arange(4)).logsumexp(-1).sum().backward()
        optimizer.step()
        captured, document = state.capture(TrainingProgress(step=step, seed=0))
        check_as_stock(form, captured, model, optimizer)
        engine.prepare(captured)
        engine.save(captured, document, step=step, reason="interval", parent=None)
        assert engine.wait(60)[0].committed
        saved[form] = whole(captured)
    return saved, document


def metadata_of(checkpoint: Path) -> Metadata:
    return open_checkpoint(checkpoint).metadata


def check_names(run: RunPaths, saved: dict[str, Any]) -> None:
    """Every form was saved under the same canonical names."""
    keys = {frozenset(metadata_of(path).state_dict_metadata) for path in run.list_checkpoints()}
    assert len(keys) == 1, keys
    names = {key for key in next(iter(keys)) if not key.startswith("rng.")}
    assert names == saved["plain"].keys(), names ^ saved["plain"].keys()
    assert {"model.embed.weight", "model.head.weight", "model.kept"} < names
    assert not any(mark in key for key in names for mark in ("module", "_orig_mod", "_check"))
    assert "model.scratch" not in names
    # A frozen layer is saved but has no optimizer moments.
    assert "model.frozen.weight" in names
    assert "optimizer.param_groups.frozen.weight.lr" in names
    assert "optimizer.state.frozen.weight.exp_avg" not in names


def load_each_into_each(
    run: RunPaths, document: dict[str, Any], saved: dict[str, Any], group: dist.ProcessGroup
) -> None:
    rank = dist.get_rank()
    for path, source in zip(run.list_checkpoints(), FORMS, strict=True):
        for form in FORMS:
            state, _, _ = make(form, 1, rank)
            target = state.template(document, partial(metadata_of, path))
            load_state(path, target, group=group)
            state.apply(target, document)
            now, _ = state.capture(TrainingProgress(step=1, seed=0))
            assert_equal(whole(now), saved[source], f"{source} into {form}")


def main() -> None:
    rank, world_size, folder, flusher = *map(int, sys.argv[1:3]), Path(sys.argv[3]), sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    run = RunPaths(folder / "r")
    group = dist.new_group(backend="gloo")
    engine = make_engine(rank, world_size, folder, flusher, group)
    saved, document = save_each(engine, rank)
    check_names(run, saved)
    load_each_into_each(run, document, saved, group)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
