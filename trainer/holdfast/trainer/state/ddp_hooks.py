"""Hooks of `DistributedDataParallel` that keep a state which no checkpoint contains.

PowerSGD keeps errors of compression for each bucket of gradients. DDP chooses the buckets again
after the first step of a launch, so a saved state would not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.contracts.node.reporting import report

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
