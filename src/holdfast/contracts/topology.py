"""How a checkpoint's state was split over ranks, and the GPU counts that can hold it so. Pure.

The manifest's `topology` tells it. The dimensions of the recorded mesh that split a model (tensor,
expert, context, pipeline) stay as they are; the data-parallel ones take what is left of the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.manifest import Manifest

# Mesh dimensions by the names that the field gives them: those that copy the whole state, and
# those that split a batch. Any other dimension splits the model and is not ours to change.
REPLICATING: Final = frozenset({"dp_replicate", "replicate"})
DATA: Final = REPLICATING | {"dp", "dp_shard", "fsdp", "shard", "data", "dim0"}
PIPELINE: Final = "pp"
COUNTS_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ways the state is split: `model` by fixed dimensions, `data` by data-parallel ones.

    `pipeline` stages, each with `replicas` whole copies.
    """

    model: int
    data: int
    pipeline: int
    replicas: int

    @property
    def ranks(self) -> int:
        return self.model * self.data * self.pipeline * self.replicas


def degrees_of(manifest: Manifest) -> Degrees:
    """How the checkpoint was split when it was saved."""
    mesh = _mesh_of(manifest)
    pipeline = int(manifest.topology.get("pipeline") or mesh.get(PIPELINE) or 1)
    fixed = {n: s for n, s in mesh.items() if n not in DATA and n != PIPELINE}
    replicas = math.prod(size for name, size in mesh.items() if name in REPLICATING)
    sharding = [s for n, s in mesh.items() if n in DATA and n not in REPLICATING]
    # Without a mesh every rank has a whole copy: plain data parallelism, or a single process.
    data = math.prod(sharding) if sharding else 1
    model = math.prod(fixed.values())
    known = model * data * pipeline
    return Degrees(
        model=model,
        data=data,
        pipeline=pipeline,
        replicas=max(replicas, manifest.world_size // known),
    )


def rescale(now: Degrees, manifest: Manifest, gpus: int) -> Degrees | None:
    """The degrees on `gpus` ranks, or None when the fixed ones do not divide them.

    Where the mesh had a replicating dimension its copies follow the count and shards stay, as
    hybrid sharding is launched; else the shards follow it.
    """
    mesh = _mesh_of(manifest)
    shards = any(name in DATA and name not in REPLICATING for name in mesh)
    copies = any(name in REPLICATING for name in mesh) or not shards
    fixed = now.model * now.pipeline * (now.data if copies else 1)
    if gpus < fixed or gpus % fixed:
        return None
    left = gpus // fixed
    return Degrees(
        model=now.model,
        data=now.data if copies else left,
        pipeline=now.pipeline,
        replicas=left if copies else 1,
    )


def problem_with_mesh(manifest: Manifest, gpus: int) -> str | None:
    """None when `gpus` can hold the mesh that the checkpoint was saved with, else why they cannot
    and the counts around them that can."""
    now = degrees_of(manifest)
    if gpus == manifest.world_size or rescale(now, manifest, gpus) is not None:
        return None
    parts = dict(_mesh_of(manifest))
    if now.pipeline > 1:
        parts[PIPELINE] = now.pipeline
    layout = " × ".join(f"{name} {size}" for name, size in parts.items())
    counts = ", ".join(map(str, fitting_counts(manifest, now, around=gpus)))
    return (
        f"{gpus} GPUs cannot hold the mesh {layout} whose fixed dimensions it was saved with; "
        f"counts that can: {counts}. Another mesh in the program may load it all the same"
    )


def fitting_counts(manifest: Manifest, now: Degrees, around: int | None = None) -> tuple[int, ...]:
    """GPU counts that keep the fixed dimensions, those nearest to `around` (the saved count)."""
    middle = around or manifest.world_size
    candidates = [n for n in range(1, 4 * max(middle, now.ranks) + 1) if rescale(now, manifest, n)]
    nearest = sorted(candidates, key=lambda n: (abs(n - middle), n))[:COUNTS_SHOWN]
    return tuple(sorted(nearest))


def has_mesh(manifest: Manifest) -> bool:
    """False when the manifest says nothing of a mesh, as that of an imported checkpoint may."""
    return "mesh" in manifest.topology


def _mesh_of(manifest: Manifest) -> Mapping[str, int]:
    """Dimension names and their sizes; empty when nothing was sharded, or nobody said."""
    mesh: Mapping[str, int] = manifest.topology.get("mesh") or {}
    return mesh
