"""Averages of a model whose buffers differ between ranks.

A checkpoint contains an object of `extra` once, as rank 0 has it. `AveragedModel` with
`use_buffers=True` averages the running statistics of BatchNorm too, and each rank computes those
from its own samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast.contracts.node.reporting import report

# Hooks of `DistributedDataParallel` that keep a state which no checkpoint contains.
#
# PowerSGD keeps errors of compression for each bucket of gradients. DDP chooses the buckets again
# after the first step of a launch, so a saved state would not fit.

LOST: Final = frozenset({"PowerSGDState"})


def warn_of_lost_states(models: Iterable[nn.Module]) -> None:
    """Report which hooks begin again after a resume, so that its weights differ."""
    wrappers = [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    kinds = {type(state).__name__ for each in wrappers for _, state in each._comm_hooks}
    for kind in sorted(kinds & LOST):
        report(
            f"holdfast: the {kind} of DDP's communication hook is in no checkpoint. After a resume "
            "the hook begins again, so the weights differ from those of an uninterrupted run"
        )


def warn_of_local_buffers(extra: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Report on rank 0 which averages a resume makes equal on all ranks."""
    # On one rank, nothing can differ.
    for name, value in extra.items() if rank == 0 and world_size > 1 else ():
        if isinstance(value, AveragedModel) and value.use_buffers and _has_local(value):
            report(
                f"holdfast: extra.{name} averages the running statistics of BatchNorm, which "
                "differ between ranks. A checkpoint contains those of rank 0, and a resume gives "
                "them to all ranks. Use SyncBatchNorm, or evaluate the average on rank 0 only"
            )


def _has_local(model: nn.Module) -> bool:
    """Return True if a BatchNorm of the model keeps statistics of this rank's samples."""
    return any(
        isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.track_running_stats
        for module in model.modules()
    )
