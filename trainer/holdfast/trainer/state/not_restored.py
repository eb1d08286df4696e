"""What a resume does not restore as the program might expect, and the messages about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.ranks.collective import ControlGroup

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


# Averages of a model whose buffers differ between ranks.
#
# A checkpoint contains an object of `extra` once, as rank 0 has it. `AveragedModel` with
# `use_buffers=True` averages the running statistics of BatchNorm too, and each rank computes those
# from its own samples.


def check_objects(names: Iterable[str], extra: Mapping[str, Any], ranks: ControlGroup) -> None:
    """Raise `CheckpointError` for an object that rank 0 lacks, and warn of averages.

    Rank 0 writes down which objects a checkpoint has, so a resume would not find this one. All
    ranks call this together.
    """
    all_names = ranks.gather(lambda: sorted(names))
    for rank, given in enumerate(all_names):
        if more := sorted(set(given) - set(all_names[0])):
            raise CheckpointError(
                f"rank {rank} has {more[0]}, but rank 0 does not, so a resume could not restore "
                "it; give the Session the same names on all ranks"
            )
    warn_of_local_buffers(extra, ranks.rank, ranks.world_size)


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


# The values with which a program makes its optimizers and schedulers.
#
# A resume restores the saved values over them: the learning rate, or the length of a schedule. If
# the program makes them with other values than before, a person has changed them, and learns that
# the saved ones count.

GROUPS_MAX: Final = 16
VALUES_MAX: Final = 32
# What a scheduler is made with. Its other values say how far it is.
SCHEDULE: Final = frozenset(
    {
        *("T_max", "T_0", "T_mult", "eta_min", "total_steps", "total_iters", "milestones"),
        *("step_size", "gamma", "factor", "start_factor", "end_factor", "power", "base_lrs"),
        *("patience", "threshold", "cooldown", "_milestones", "swa_lr"),
    }
)
NOT_VALUES: Final = frozenset({"params", "param_names"})

Made = dict[str, Any]


def describe_made(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> Made:
    """Return plain values of fresh optimizers and schedulers, by readable names."""
    made: Made = {}
    for number, optimizer in enumerate(optimizers):
        groups = getattr(optimizer, "param_groups", None)
        groups = groups if isinstance(groups, list) else []
        for place, group in enumerate(groups[:GROUPS_MAX]):
            of = f"optimizer{_of(number)}{_of(place, ' group ')}"
            _add(made, of, {key: group[key] for key in group if key not in NOT_VALUES})
    for number, scheduler in enumerate(schedulers):
        _add_schedule(made, f"scheduler{_of(number)}", scheduler)
    return made


def describe_changes(former: Mapping[str, Any], made: Mapping[str, Any]) -> str | None:
    """Return what the program has changed since a checkpoint that recorded `former`, or None."""
    changed = [
        f"{name} {former[name]} → {value}"
        for name, value in made.items()
        # Only values of both are compared: a new version of torch may add options.
        if name in former and former[name] != value
    ]
    if not changed:
        return None
    return (
        f"the program changed {', '.join(changed)}. The values of the checkpoint count. To "
        "use the new ones, set them after you create the Session. The page `Change a run` of "
        "the documentation shows how"
    )


def _add_schedule(made: Made, of: str, scheduler: Any) -> None:
    """Add the values of a scheduler of torch, and of those that it consists of."""
    own = getattr(scheduler, "__dict__", {})
    _add(made, of, {key: own[key] for key in own if key in SCHEDULE})
    for place, part in enumerate(own.get("_schedulers", ())):
        _add_schedule(made, f"{of} part {place}", part)


def _add(made: Made, of: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        plain = _plain(value)
        if plain is not None:
            made[f"{of} {key}"] = plain


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, None for one that is not plain."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        value = sorted(value)
    if isinstance(value, list | tuple) and len(value) <= VALUES_MAX:
        plain = [_plain(one) for one in value]
        return None if None in plain else plain
    return None


def _of(number: int, before: str = " ") -> str:
    return f"{before}{number}" if number else ""
