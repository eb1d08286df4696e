"""Planning a layout with all ranks: the only collectives of saving, and only at the first save.

Whatever goes wrong on one rank is raised on every rank, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psutil
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast.contracts.errors import SaveError
from holdfast.contracts.slots import SLOTS_PER_RANK
from holdfast.trainer.identity import Identity
from holdfast.trainer.layout import (
    Layout,
    add_rank_zero_files,
    flatten,
    pickle_metadata,
    plan_layout,
)

T = TypeVar("T")
GIB: Final = 1024**3


@dataclass(frozen=True)
class Placed:
    """What rank 0 must know of a rank's image; `available` is its node's free memory in bytes."""

    node: int
    image_bytes: int
    available: int
    storage: Mapping[MetadataIndex, _StorageInfo]


def plan_together(
    state: Mapping[str, Any],
    *,
    identity: Identity,
    group: dist.ProcessGroup | None,
    prepare: Callable[[], None],
) -> Layout:
    """This rank's layout; every rank calls it with its own part of the state.

    Who writes what is stock DCP's plan with duplicates removed; rank 0 makes `.metadata` of all
    ranks' places. `prepare` is called before anything else. Raises `SaveError` on all ranks.
    """
    ranks = _DistWrapper(group, group is not None, 0)
    planner = DefaultSavePlanner(enable_plan_caching=False)
    global_metadata: list[Metadata] = []

    def plan_own() -> SavePlan:
        prepare()
        flatten(state)
        planner.set_up_planner(dict(state), is_coordinator=identity.rank == 0)
        return planner.create_local_plan()

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        global_metadata.append(metadata)
        return plans

    try:
        plan = ranks.reduce_scatter("plan", plan_own, plan_all)
        layout = plan_layout(plan, flatten(state), identity.rank)

        def place_own() -> Placed:
            available = psutil.virtual_memory().available
            return Placed(identity.node, layout.image_bytes, available, layout.storage)

        def place_all(placed: list[Placed]) -> list[bytes | None]:
            check_memory(placed)
            storage = {index: info for p in placed for index, info in p.storage.items()}
            return [pickle_metadata(global_metadata[0], storage)] + [None] * (len(placed) - 1)

        metadata = ranks.reduce_scatter("places", place_own, place_all)
    except CheckpointException as error:
        raise _as_save_error(error) from error
    return layout if metadata is None else add_rank_zero_files(layout, metadata)


def all_or_none(group: dist.ProcessGroup | None, step: str, act: Callable[[], T]) -> T:
    """Do `act` on every rank and return its own result; `SaveError` on all when one failed."""
    result: list[T] = []

    def act_here() -> bool:
        result.append(act())
        return True

    try:
        _DistWrapper(group, group is not None, 0).all_gather(step, act_here)
    except CheckpointException as error:
        raise _as_save_error(error) from error
    return result[0]


def check_memory(placed: Sequence[Placed]) -> None:
    """Raise `SaveError` when a node's staging slots would not fit into its free memory."""
    for node in sorted({p.node for p in placed}):
        ranks = [p for p in placed if p.node == node]
        needed = SLOTS_PER_RANK * sum(p.image_bytes for p in ranks)
        available = min(p.available for p in ranks)
        if needed > available:
            raise SaveError(
                f"node {node}: {SLOTS_PER_RANK} staging slots for each of {len(ranks)} ranks need "
                f"{needed / GIB:.2f} GiB, {available / GIB:.2f} GiB are free; use more nodes, "
                "shard the state further, or ask the scheduler for more memory"
            )


def _as_save_error(error: CheckpointException) -> SaveError:
    reasons = "; ".join(
        f"rank {rank}: {found[0]}" for rank, found in sorted(error.failures.items())
    )
    return SaveError(f"no rank saves, because of {reasons}")
