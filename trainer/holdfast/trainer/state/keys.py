"""Keys of a train state besides those of the model and the optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.trainer.state.objects import EXTRA, SCHEDULER
from holdfast.trainer.state.run_state import State


def rank_key(rank: int) -> str:
    """Return the name of a rank in keys of what only it has."""
    return f"rank{rank:05d}"


def shapes_of(metadata: Metadata) -> dict[str, Sequence[int]]:
    """Return the shapes of all saved tensors, by key."""
    entries = metadata.state_dict_metadata.items()
    return {key: e.size for key, e in entries if isinstance(e, TensorStorageMetadata)}


def put(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Place tensors named `part.rest` so that DCP's flattening gives them that name again."""
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if rest:
            state.setdefault(part, {})[rest] = tensor
        else:
            # A scheduler whose state is one tensor.
            state[part] = tensor


def flat_objects(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors of schedulers and extras, by key."""
    found: dict[str, torch.Tensor] = {}
    for part in (SCHEDULER, EXTRA):
        its = state.get(part, {})
        if isinstance(its, torch.Tensor):
            found[part] = its
        else:
            found |= {f"{part}.{key}": tensor for key, tensor in its.items()}
    return found
