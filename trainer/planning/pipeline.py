"""What a device mesh says of a rank: its pipeline stage, and with whom it shares samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torch.distributed.device_mesh import DeviceMesh

from holdfast.contracts.errors import PreflightError
from holdfast.trainer.collective import ControlGroup
from holdfast.trainer.identity import Identity

PIPELINE: Final = "pp"
# Along these dimensions of a mesh ranks work on the same samples.
SAME_SAMPLES: Final = frozenset({PIPELINE, "tp", "cp", "sp"})


@dataclass(frozen=True)
class Place:
    """A rank's place in the mesh.

    The data is cut into `data_parts`, of which this rank has number `data_part`.
    """

    identity: Identity
    data_part: int
    data_parts: int


def find_place(identity: Identity, ranks: ControlGroup, mesh: DeviceMesh | None) -> Place:
    """The place of this rank; every rank calls it, with the same mesh or with none.

    Raises `PreflightError` when the mesh is not over all ranks, or has no names.
    """
    if mesh is None:
        return Place(identity, identity.rank, identity.world_size)
    names, sizes, coordinate = mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate()
    if names is None or coordinate is None or mesh.size() != identity.world_size:
        raise PreflightError(
            f"mesh: dimensions {names} of sizes {sizes} for {identity.world_size} ranks; expected "
            "the mesh of all ranks with a name for each dimension, as init_device_mesh makes it "
            'with mesh_dim_names=("pp", "dp")'
        )
    part, parts = 0, 1
    for name, size, at in zip(names, sizes, coordinate, strict=True):
        if name not in SAME_SAMPLES:
            part, parts = part * size + at, parts * size
    identity = replace(identity, mesh=tuple(zip(names, sizes, strict=True)))
    if PIPELINE not in names:
        return Place(identity, part, parts)
    return _join_stage(identity, ranks, coordinate[names.index(PIPELINE)], part, parts)


def _join_stage(
    identity: Identity, ranks: ControlGroup, stage: int, part: int, parts: int
) -> Place:
    """The place within a stage, whose ranks get a group of their own."""
    stages = ranks.gather(lambda: stage)
    members = [rank for rank, other in enumerate(stages) if other == stage]
    ranks.join_stage(stages)
    identity = replace(
        identity,
        stage=stage,
        stages=len(set(stages)),
        stage_rank=members.index(identity.rank),
        stage_size=len(members),
    )
    return Place(identity, part, parts)
