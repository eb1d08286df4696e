"""Optimizer state of FSDP1, whose flat parameters torch's helpers convert to named ones.

These helpers step an optimizer that has no state yet. They skip that for an optimizer that seems
to have been stepped, so this module makes it seem so while they run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from holdfast.trainer.process import devices
from holdfast.trainer.state.forms import STATE, SavedOptimizer, blank

OPTIONS: Final = dcp.StateDictOptions(flatten_optimizer_state_dict=True)


def gather(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return sharded state and options by key. No missing state is created."""
    with _as_if_stepped(optimizers):
        found: dict[str, Any] = dcp.get_optimizer_state_dict(
            model, tuple(optimizers), options=OPTIONS
        )
    return found


def wanted(found: dict[str, Any], saved: SavedOptimizer, model: nn.Module) -> None:
    """Add blank tensors, sharded like their parameters, for state that only `saved` has."""
    for name, parameter in dcp.get_model_state_dict(model).items():
        for path, entry in saved.state[name].entries.items() if name in saved.state else ():
            if f"{STATE}.{name}.{path}" not in found:
                key = f"{STATE}.{name}.{path}"
                if isinstance(parameter, ShardedTensor) and isinstance(
                    entry, TensorStorageMetadata
                ):
                    found[key] = _blank_shards(entry, parameter)
                else:
                    assert isinstance(parameter, torch.Tensor)
                    found[key] = blank(entry, parameter, {}, {})


def put_back(model: nn.Module, optimizers: Sequence[Optimizer], loaded: Mapping[str, Any]) -> None:
    """Put loaded values back. With any state, each parameter has the keys that were loaded."""
    names = sorted({key.rpartition(".")[2] for key in loaded if key.startswith(f"{STATE}.")})
    for optimizer in optimizers if names else ():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # torch's helper would otherwise step the optimizer to create the state, see
                # decision 21.
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    optimizer.state[parameter] = dict.fromkeys(names)
    with _as_if_stepped(optimizers):
        dcp.set_optimizer_state_dict(model, tuple(optimizers), dict(loaded), options=OPTIONS)


def _blank_shards(entry: TensorStorageMetadata, parameter: ShardedTensor) -> torch.Tensor:
    """Return a tensor to load `entry` into, sharded like `parameter`, without a device mesh."""
    dtype = entry.properties.dtype
    if entry.size != parameter.size():
        return torch.empty(entry.size, dtype=dtype, device=devices.CPU)
    # Copied, because the type is changed below and the live parameter keeps its own.
    metadata = copy.deepcopy(parameter.metadata())
    metadata.tensor_properties.dtype = dtype
    shards = [
        Shard(torch.empty_like(one.tensor, dtype=dtype), one.metadata)
        for one in parameter.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=parameter._process_group
    )


@contextlib.contextmanager
def _as_if_stepped(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Give a zero gradient to each optimizer that has neither state nor a gradient."""
    touched: list[torch.Tensor] = []
    for optimizer in optimizers:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if every and not optimizer.state and all(p.grad is None for p in every):
            # The helpers look for any state or gradient. The smallest parameter costs the least
            # memory.
            smallest = min(every, key=lambda p: p.numel())
            smallest.grad = torch.zeros_like(smallest)
            touched.append(smallest)
    try:
        yield
    finally:
        # A gradient of zeros would otherwise count as one in the program's first step.
        for parameter in touched:
            parameter.grad = None
