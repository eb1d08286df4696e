"""Which DTensors lie at strides that DCP's boxes cannot say."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard


def find_odd_stride(value: DTensor) -> str | None:
    """In words, why this rank's part of `value` is no box; None when it is one.

    A `_StridedShard` is the outer half of a split that further mesh dimensions complete, as of
    FSDP over tensor parallelism. Alone, its ranks hold rows far apart, and what DCP takes for
    their box is other rows: stock DCP loads wrong ones without a word.
    """
    mesh, placements = value.device_mesh, value.placements
    for dimension, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        inner = 1
        for further in range(dimension + 1, mesh.ndim):
            other = placements[further]
            if isinstance(other, Shard | _StridedShard) and other.dim == placement.dim:
                inner *= mesh.size(further)
        if inner != placement.split_factor:
            return (
                f"a DTensor with placements {placements} on a mesh of {tuple(mesh.shape)}: "
                f"{placement} expects {placement.split_factor} parts of dimension "
                f"{placement.dim} on further mesh dimensions, there are {inner}; redistribute "
                "it to Shard or Replicate first"
            )
    return None
