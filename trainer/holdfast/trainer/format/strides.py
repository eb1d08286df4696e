"""Finds DTensors with strides that DCP's boxes cannot describe."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard


def find_odd_stride(value: DTensor) -> str | None:
    """Return why this rank's part of `value` is not a box, None if it is one.

    A `_StridedShard` is the outer half of a split that further mesh dimensions complete, as with
    FSDP over tensor parallelism. Without the inner half, a rank's rows are not contiguous, and
    DCP's box for them covers other rows. Stock DCP then loads wrong rows without an error.
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
                f"{placement.dim} on further mesh dimensions, but there are {inner}. Redistribute "
                "it to Shard or Replicate first"
            )
    return None
