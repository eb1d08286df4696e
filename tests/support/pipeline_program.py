"""Two pipeline stages of sharded ranks, saved together; checks what all ranks must agree on.

    python -m tests.support.pipeline_program WORLD_SIZE FOLDER FLUSHER

The first rank of each stage writes its stage's whole state to `FOLDER/stage<i>.pt`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.checkpoint_program import OPTIONS, make_identity, train
from tests.support.forked_ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import PreflightError, SaveError
from holdfast.trainer.planning.custom import plan_custom
from holdfast.trainer.planning.layout import Layout
from holdfast.trainer.planning.ranks import plan_together
from holdfast.trainer.ranks.collective import ControlGroup, HierarchicalGroup
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.topology import MeshPlace, find_place
from holdfast.trainer.saving.engine import CheckpointEngine


class HalfPlanner(DefaultSavePlanner):
    """Saves every tensor in half precision, as the reference's example does."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


FACTS: dict[str, Any] = {"reason": "interval", "parent": None}


def main() -> None:
    world_size, folder, flusher = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    run_ranks(world_size, folder / "store", partial(work, folder, flusher))


def work(folder: Path, flusher: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    ranks, identity = ControlGroup(), make_identity(rank, world_size)
    place = check_place(identity, ranks, mesh)
    engine = CheckpointEngine(
        flusher=flusher,
        run=RunPaths(folder / "r"),
        identity=place.identity,
        group=ranks.group,
        stage_group=ranks.stage_group,
    )
    state = make_state(mesh, rank, place.identity.stage or 0)
    engine.prepare(state)
    assert engine.save(state, {"epoch": 1}, step=2, **FACTS)
    dump(state, folder, place.identity)
    assert [(r.step, r.committed) for r in engine.wait(60)] == [(2, True)]
    check_refusal(engine, state, rank)
    check_nodes(state, place, ranks)
    engine.close()


def check_place(identity: Identity, ranks: ControlGroup, mesh: DeviceMesh) -> MeshPlace:
    """This rank's place in the mesh; stages share samples, data-parallel ranks do not."""
    place = find_place(identity, ranks, mesh)
    stage_size = identity.world_size // 2
    assert place.identity.stage == identity.rank // stage_size
    assert (place.identity.stages, place.identity.stage_size) == (2, stage_size)
    assert place.identity.stage_rank == identity.rank % stage_size
    assert (place.data_part, place.data_parts) == (identity.rank % stage_size, stage_size)
    plain = find_place(identity, ranks, None)
    assert (plain.identity, plain.data_part) == (identity, identity.rank)
    with pytest.raises(PreflightError, match="Pass the mesh of all ranks"):
        find_place(identity, ranks, mesh["dp"])
    return place


def make_state(mesh: DeviceMesh, rank: int, stage: int) -> dict[str, Any]:
    """This rank's stage with its own layer, and the state that the stages share."""
    torch.manual_seed(stage)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({str(stage): torch.nn.Linear(13, 7)})
    model.forward = model.layers[str(stage)].forward
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, stage)
    return {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
        "scheduler": {"last": torch.tensor([3, 5])},
        "rng": {f"rank{rank:05d}": torch.full((9,), rank, dtype=torch.uint8)},
    }


def dump(state: dict[str, Any], folder: Path, identity: Identity) -> None:
    whole = {
        part: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in entries.items()}
        for part, entries in state.items()
    }
    if identity.stage_rank == 0:
        torch.save(whole, folder / f"stage{identity.stage}.pt")


def check_refusal(engine: CheckpointEngine, state: dict[str, Any], rank: int) -> None:
    """If one rank of one stage cannot save, no rank of any stage is left waiting."""
    worse = {**state, "model": {**state["model"], "x": object() if rank == 3 else torch.zeros(1)}}
    with pytest.raises(SaveError, match=r"because of rank 3: model\.x: a object"):
        engine.prepare(worse)
    if rank < 2:
        half = torch.nn.Parameter(torch.zeros(2 + rank))
        worse = {**state, "model": {**state["model"], "x": half}}
    else:
        worse = state
    with pytest.raises(SaveError, match=r"because of rank 0: model\.x: one rank has float32"):
        engine.prepare(worse)


def check_nodes(state: dict[str, Any], place: MeshPlace, ranks: ControlGroup) -> None:
    """The plan does not depend on how the ranks are distributed over nodes."""
    plans: list[Layout] = []
    customs: list[Layout] = []
    rank = ranks.rank
    for node in (0, rank // 2, rank % 2, rank):
        tree, stage_tree = (
            HierarchicalGroup(ranks.group, node),
            HierarchicalGroup(ranks.stage_group, node),
        )
        assert tree.agree(f"rank {rank}" if rank else None) != []
        assert tree.agree(None) == []
        plans.append(
            plan_together(
                state,
                identity=place.identity,
                tree=tree,
                stage_tree=stage_tree,
                prepare=lambda: None,
            )
        )
        custom = plan_custom(
            HalfPlanner(), state, identity=place.identity, tree=tree, stage_tree=stage_tree
        )
        dtypes = {v.dtype for v in custom.values.values() if isinstance(v, torch.Tensor)}
        assert dtypes == {torch.float16}
        customs.append(custom.layout)
    assert all(custom == customs[0] for custom in customs)
    first, *others = [(plan.files, plan.tensors, plan.numbers, plan.fixed) for plan in plans]
    assert all(other == first for other in others)


if __name__ == "__main__":
    main()
