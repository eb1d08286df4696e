"""Tensors that attributes mark as shards of a larger tensor: torch's `CheckpointableTensor`."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import SaveError

_ATTRIBUTES: Final = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_marked_shard(value: Any) -> bool:
    """Return True for a tensor that its attributes mark as shards of a larger one.

    This is the test of torch 2.14. DCP does not apply it to a DTensor or a ShardedTensor.
    """
    return (
        # By attributes, as torch 2.14 does it: older versions have no such class.
        all(hasattr(value, name) for name in _ATTRIBUTES)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor | ShardedTensor)
    )


def refuse_marked_shard(key: str, value: torch.Tensor) -> None:
    """Raise `SaveError` for such a tensor. Otherwise each rank's shard would count as the whole."""
    if is_marked_shard(value):
        shape = tuple(getattr(value, _ATTRIBUTES[0]))
        raise SaveError(
            f"{key}: its attributes {', '.join(_ATTRIBUTES)} mark it as shards of a tensor of "
            f"shape {shape}, which cannot be saved as such; expected a DTensor. Make it one with "
            "DTensor.from_local, or save it with holdfast.trainer.dcp on torch 2.14 or newer"
        )
