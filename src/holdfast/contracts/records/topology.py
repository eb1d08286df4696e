"""How a checkpoint's state was split over ranks, and which rank counts fit the same split. Pure.

The facts come from the manifest's `topology`. The mesh dimensions that split a model (tensor,
expert, context, pipeline) keep their sizes. The data-parallel dimensions use the remaining ranks,
which divide the samples of a step evenly where the run keeps its global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from holdfast.contracts.plain_text import counted

# Common names of mesh dimensions: those that replicate the whole state, and those that split a
# batch. Any other dimension splits the model, and Holdfast does not change it.
REPLICATING: Final = frozenset({"dp_replicate", "replicate"})
DATA: Final = REPLICATING | {"dp", "dp_shard", "fsdp", "shard", "data", "dim0"}
PIPELINE: Final = "pp"
# In a manifest's topology: why only the same number of ranks can load the checkpoint, if so.
FIXED: Final = "fixed"
# How many equal parts each global batch has: samples, or batches that no rank may divide. The
# data-parallel ranks must share them evenly.
GLOBAL_BATCHES: Final = "global_batches"
# What limits the rank counts apart from the mesh. An absent key limits nothing.
LIMITS: Final = (FIXED, GLOBAL_BATCHES)
COUNTS_SHOWN: Final = 8


class SavedTopology(Protocol):
    """What a manifest, or a row of the index, says about the ranks that saved a checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def topology(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The sizes of a split: `model` by fixed dimensions, `data` by data-parallel ones.

    There are `pipeline` stages and `replicas` copies of the whole state.
    """

    model: int
    data: int
    pipeline: int
    replicas: int

    @property
    def ranks(self) -> int:
        return self.model * self.data * self.pipeline * self.replicas

    @property
    def shares(self) -> int:
        """How many parts of a step's samples there are."""
        return self.data * self.replicas


def degrees_of(manifest: SavedTopology) -> Degrees:
    """Return how the checkpoint's state was split when it was saved."""
    mesh = _mesh_of(manifest)
    pipeline = _size(manifest.topology.get("pipeline")) or mesh.get(PIPELINE) or 1
    fixed = {n: s for n, s in mesh.items() if n not in DATA and n != PIPELINE}
    replicas = math.prod(size for name, size in mesh.items() if name in REPLICATING)
    sharding = [s for n, s in mesh.items() if n in DATA and n not in REPLICATING]
    # Without a mesh, every rank has a whole copy: plain data parallelism, or a single process.
    data = math.prod(sharding) if sharding else 1
    model = math.prod(fixed.values())
    known = model * data * pipeline
    return Degrees(
        model=model,
        data=data,
        pipeline=pipeline,
        replicas=max(replicas, manifest.world_size // known),
    )


def rescale(now: Degrees, manifest: SavedTopology, ranks: int) -> Degrees | None:
    """Return the degrees on `ranks` ranks, or None if the fixed degrees do not divide `ranks`.

    None too if only the saved number of ranks can load the state, and if the data-parallel ranks
    cannot share a global batch evenly.

    If the mesh has a replicating dimension, the number of copies changes and the shards stay, as in
    hybrid sharding. Otherwise the number of shards changes.
    """
    # An adapter of a framework says which counts can continue with the same samples, see
    # decision 81.
    if manifest.topology.get(FIXED) and ranks != manifest.world_size:
        return None
    then = _resized(now, manifest, ranks)
    # A count that cannot share the global batch would train with other samples in each step.
    return None if then is None or _unshared(manifest, then) else then


def _resized(now: Degrees, manifest: SavedTopology, ranks: int) -> Degrees | None:
    mesh = _mesh_of(manifest)
    shards = any(name in DATA and name not in REPLICATING for name in mesh)
    copies = any(name in REPLICATING for name in mesh) or not shards
    fixed = now.model * now.pipeline * (now.data if copies else 1)
    if ranks < fixed or ranks % fixed:
        return None
    left = ranks // fixed
    return Degrees(
        model=now.model,
        data=now.data if copies else left,
        pipeline=now.pipeline,
        replicas=left if copies else 1,
    )


def problem_with_mesh(manifest: SavedTopology, ranks: int) -> str | None:
    """Return why `ranks` do not fit the checkpoint's mesh, with counts that fit, or None."""
    if ranks != manifest.world_size and (reason := manifest.topology.get(FIXED)):
        fits = counted(manifest.world_size, "rank")
        return f"{counted(ranks, 'rank')} cannot load it: {reason}. {fits} can"
    now = degrees_of(manifest)
    if ranks == manifest.world_size or rescale(now, manifest, ranks) is not None:
        return None
    counts = ", ".join(map(str, fitting_counts(manifest, now, around=ranks)))
    then = _resized(now, manifest, ranks)
    if then is not None:
        return (
            f"{counted(ranks, 'rank')} cannot share its global batch evenly, which has "
            f"{_unshared(manifest, then)[0]} parts; rank counts that can: {counts}"
        )
    parts = dict(_mesh_of(manifest))
    if now.pipeline > 1:
        parts[PIPELINE] = now.pipeline
    layout = " × ".join(f"{name} {size}" for name, size in parts.items())
    return (
        f"{counted(ranks, 'rank')} cannot hold the mesh {layout} that the checkpoint was "
        f"saved with; rank "
        f"counts that can: {counts}. A program with another mesh may still be able to load it"
    )


def fitting_counts(
    manifest: SavedTopology, now: Degrees, around: int | None = None
) -> tuple[int, ...]:
    """Return rank counts that keep the fixed dimensions, nearest to `around` (the saved count)."""
    middle = around or manifest.world_size
    # Four times the size is far enough to show counts in both directions.
    candidates = [n for n in range(1, 4 * max(middle, now.ranks) + 1) if rescale(now, manifest, n)]
    nearest = sorted(candidates, key=lambda n: (abs(n - middle), n))[:COUNTS_SHOWN]
    return tuple(sorted(nearest))


def _mesh_of(manifest: SavedTopology) -> Mapping[str, int]:
    """Return dimension names and sizes; empty if nothing was sharded or it was not recorded."""
    mesh = manifest.topology.get("mesh")
    sizes = mesh.items() if isinstance(mesh, Mapping) else ()
    # Another user may have written the manifest.
    return {str(name): size for name, given in sizes if (size := _size(given))}


def _size(value: object) -> int | None:
    """Return the size of a mesh dimension, or None if it is not a whole number above 0."""
    return value if type(value) is int and value > 0 else None


def _unshared(manifest: SavedTopology, then: Degrees) -> list[int]:
    """Return the global batches that the data-parallel ranks cannot share evenly."""
    sizes = manifest.topology.get(GLOBAL_BATCHES)
    numbers = sizes if isinstance(sizes, list | tuple) else ()
    return [each for each in numbers if isinstance(each, int) and each % then.shares]
