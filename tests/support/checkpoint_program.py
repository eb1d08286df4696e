"""A small sharded program for tests of the checkpoint engine, with several scenarios.

    python -m tests.support.checkpoint_program SCENARIO WORLD_SIZE FOLDER FLUSHER CHECKPOINT

Rank 0 gathers the final state of a scenario and writes it to `FOLDER/<scenario>.pt`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.forked_ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import KeyMismatchError, SaveError
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.layout import read_train_state
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.saving.engine import CheckpointEngine

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
STAGED = "staged"


def make_identity(rank: int, world_size: int) -> Identity:
    return Identity(
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


def make_state(world_size: int, *, steps: int, seed: int) -> tuple[Any, Any]:
    """A sharded model with uneven shards and its AdamW, trained for some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 37), torch.nn.GELU(), torch.nn.Linear(37, 5, bias=False)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (seed + 1))
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model: Any, optimizer: Any, step: int) -> None:
    torch.manual_seed(1000 + step)
    loss = model(torch.randn(4, 13)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def collect(model: Any, optimizer: Any, rank: int | None) -> dict[str, Any]:
    """The state as the session collects it, with one tensor that only one rank has."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
    }
    if rank is not None:
        state["rng"] = {f"rank{rank:05d}": torch.full((9,), rank, dtype=torch.uint8)}
    return state


def dump(state: dict[str, Any], path: Path, rank: int) -> None:
    """Write the whole, unsharded state to `path` for the test to compare."""
    whole = {
        part: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state[part].items()}
        for part in ("model", "optimizer")
    }
    if rank == 0:
        torch.save(whole, path)
    dist.barrier()


def main() -> None:
    """Run one scenario on its ranks."""
    scenario, world_size, folder, flusher, checkpoint = sys.argv[1:]
    store = Path(folder) / f"store-{scenario}-{world_size}"
    act = partial(run_scenario, scenario, Path(folder), flusher, Path(checkpoint))
    run_ranks(int(world_size), store, act)


def run_scenario(scenario: str, folder: Path, flusher: str, checkpoint: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    engine = CheckpointEngine(
        flusher=flusher,
        run=RunPaths(folder / "r"),
        identity=make_identity(rank, world_size),
        group=group,
    )
    saves = scenario in {"save", "hold", "stock_save"}
    model, optimizer = make_state(world_size, steps=2 if saves else 1, seed=0 if saves else 5)
    state = collect(model, optimizer, rank)
    facts: dict[str, Any] = {"reason": "interval", "parent": None}
    if scenario == "save":
        assert engine.save(state, {"epoch": 1}, step=2, metrics={"loss": 0.5}, **facts)
        train(model, optimizer, 2)
        state = collect(model, optimizer, rank)
        assert engine.save(state, {"epoch": 2}, step=3, **facts)
        train(model, optimizer, 3)
        results = engine.wait(60)
        assert [(r.step, r.committed) for r in results] == [(2, True), (3, True)], results
        again, other = make_state(world_size, steps=3, seed=0)
        state = collect(again, other, rank)
    elif scenario == "hold":
        engine.save(state, {}, step=2, **facts)
        assert engine.wait(60)[0].committed
        (folder / f"ready-{rank}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        engine.save(state, {}, step=4, **facts)
        (folder / f"{STAGED}-{rank}").touch()
        time.sleep(600)
    elif scenario == "load":
        report = load_state(checkpoint, state, group=group)
        assert len(report.missing) == max(0, world_size - 2), report
        assert len(report.extra) == max(0, 2 - world_size), report
        assert state["rng"][f"rank{rank:05d}"].tolist() == [rank] * 9
        assert read_train_state(checkpoint, read_manifest(checkpoint)) == {"epoch": 2}
        check_disagreement(engine, group, checkpoint, model, optimizer, rank)
    elif scenario == "stock_load":
        state = collect(model, optimizer, None)
        load_with_dcp(state, checkpoint_id=checkpoint)
    elif scenario == "stock_save":
        state = collect(model, optimizer, None)
        save_with_dcp(state, checkpoint_id=checkpoint)
    elif scenario == "foreign_load":
        state = collect(model, optimizer, None)
        load_state(checkpoint, state, group=group)
    dump(state, folder / f"{scenario}-{world_size}.pt", rank)
    engine.close()


def check_disagreement(
    engine: CheckpointEngine,
    group: dist.ProcessGroup,
    checkpoint: Path,
    model: Any,
    optimizer: Any,
    rank: int,
) -> None:
    """An error on one rank is raised on every rank, so that none is left waiting."""
    state = collect(model, optimizer, rank)
    if rank == 0:
        state["model"]["added"] = torch.zeros(3)
    with pytest.raises(KeyMismatchError) as mismatch:
        load_state(checkpoint, state, group=group)
    assert mismatch.value.missing == ("model.added",)
    if rank == 0:
        state["model"]["added"] = object()
    with pytest.raises(SaveError, match=r"rank 0: model\.added: a object"):
        engine.save(state, {}, step=9, reason="interval", parent=None)


if __name__ == "__main__":
    main()
