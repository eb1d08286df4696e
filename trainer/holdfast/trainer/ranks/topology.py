"""The device mesh that a state is sharded over, as the manifest records it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import PreflightError
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.identity import Identity

# Reads a rank's place from a device mesh: its pipeline stage, and who shares its samples.

PIPELINE: Final = "pp"
# Ranks along these dimensions of a mesh work on the same samples.
SAME_SAMPLES: Final = frozenset({PIPELINE, "tp", "cp", "sp"})


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place in the mesh.

    The data is split into `data_parts` parts. This rank has the part with number `data_part`.
    """

    identity: Identity
    data_part: int
    data_parts: int


def find_place(identity: Identity, ranks: ControlGroup, mesh: DeviceMesh | None) -> MeshPlace:
    """Return the place of this rank. Every rank calls this with the same mesh, or with None.

    Raises `PreflightError` if the mesh does not cover all ranks or has no dimension names.
    """
    if mesh is None:
        return MeshPlace(identity, identity.rank, identity.world_size)
    names, sizes, coordinate = mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate()
    if names is None or coordinate is None or mesh.size() != identity.world_size:
        raise PreflightError(
            f"mesh: dimensions {names} of sizes {sizes} for {identity.world_size} ranks. Pass the "
            "mesh of all ranks with a name for each dimension, as from init_device_mesh with "
            'mesh_dim_names=("pp", "dp")'
        )
    # The rank's number among all combinations of the other dimensions, the first varying slowest.
    part, parts = 0, 1
    for name, size, at in zip(names, sizes, coordinate, strict=True):
        if name not in SAME_SAMPLES:
            part, parts = part * size + at, parts * size
    identity = replace(identity, mesh=tuple(zip(names, sizes, strict=True)))
    if PIPELINE not in names:
        return MeshPlace(identity, part, parts)
    return _join_stage(identity, ranks, coordinate[names.index(PIPELINE)], part, parts)


def _join_stage(
    identity: Identity, ranks: ControlGroup, stage: int, part: int, parts: int
) -> MeshPlace:
    """Return the place within a stage. The ranks of each stage get their own group."""
    # Every rank needs the sizes of all stages, and its mates are known only from all answers.
    stages = ranks.gather(lambda: stage)
    members = [rank for rank, other in enumerate(stages) if other == stage]
    ranks.join_stage(stage)
    identity = replace(
        identity,
        stage=stage,
        stages=len(set(stages)),
        stage_rank=members.index(identity.rank),
        stage_size=len(members),
    )
    return MeshPlace(identity, part, parts)


def describe_mesh(flat: Mapping[str, Any]) -> dict[str, int]:
    """Return mesh dimension names and sizes, outermost first. Empty if there is no DTensor.

    A state may use several meshes, for example another one for experts. For equal names the larger
    size counts. A dimension without a name is called `dim0`, `dim1`, …
    """
    found: dict[str, int] = {}
    seen = set()
    for value in flat.values():
        if not isinstance(value, DTensor) or id(value.device_mesh) in seen:
            continue
        mesh = value.device_mesh
        seen.add(id(mesh))
        names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
        for name, size in zip(names, mesh.shape, strict=True):
            found[name] = max(found.get(name, 0), int(size))
    return found
