"""The state dict of a call: what the engine stages as it is, and what it needs in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.format.plain_load import repack
from holdfast.trainer.planning import layout, rank_rows
from holdfast.trainer.planning.signature import Encoded, is_plain

State = dict[str, Any]
# Before torch 2.14, its planner saves such a shard as a whole tensor. So the engine refuses it.
_HAS_MARKED_SHARDS: Final = hasattr(torch.distributed.checkpoint, "CheckpointableTensor")


class SaveForm(IntEnum):
    """How a state can be saved. The largest value over all ranks counts.

    ENGINE: from a plan that is kept. PLANNER: planned by stock DCP's planner at every save. STOCK:
    only stock DCP can write it.
    """

    ENGINE = 0
    PLANNER = 1
    STOCK = 2


def call_stateful(state_dict: Mapping[str, Any]) -> State:
    """Return `state_dict` with the state of each `Stateful` object in its place, as stock DCP."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }


def form_of(value: Any) -> SaveForm:
    """Return how a state, or a part of it, can be saved."""
    if isinstance(value, Mapping):
        return max(map(form_of, value.values()), default=SaveForm.ENGINE)
    if isinstance(value, list):
        return (
            max(map(form_of, value), default=SaveForm.ENGINE)
            if is_nested(value)
            else SaveForm.ENGINE
        )
    if isinstance(value, ShardedTensor):
        return SaveForm.PLANNER if len(value.local_shards()) > 1 else SaveForm.ENGINE
    if _HAS_MARKED_SHARDS and rank_rows.is_marked_shard(value):
        return SaveForm.PLANNER
    if isinstance(value, torch.Tensor):
        part = value._local_tensor if isinstance(value, DTensor) else value
        return SaveForm.STOCK if rank_rows.problem_with_form(part) else SaveForm.ENGINE
    return SaveForm.ENGINE


def is_nested(entries: list[Any]) -> bool:
    """Return True for a list whose entries are saved one by one, as stock DCP decides."""
    return any(
        isinstance(entry, torch.Tensor | Mapping) or (isinstance(entry, list) and is_nested(entry))
        for entry in entries
    )


def stageable(state: Mapping[str, Any]) -> State:
    """Return `state` in the form that the engine stages: tensors, plain values and `Encoded`.

    The values of other types are written by `torch.save` now. Raises what that raises for a value
    that cannot be pickled.
    """

    def encoded(value: Any) -> Any:
        # Pickled now, while training waits: the object may change before the flusher writes it.
        return value if is_plain(value) else Encoded(layout.encode(value))

    return {key: _with_others(value, encoded) for key, value in state.items()}


def find_unreadable(value: Any, key: str = "") -> dict[str, str]:
    """Return the values of a stageable state that `load` will not open, with the reason, by key."""
    if isinstance(value, Encoded):
        try:
            # The check of a load, so that a save warns of exactly what a load refuses.
            repack(value.content)
        except DamagedCheckpointError as error:
            return {key: error.damaged[0].removeprefix("an entry: ")}
    items = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list) and is_nested(value):
        items = enumerate(value)  # type: ignore[assignment]
    found: dict[str, str] = {}
    for name, item in items:
        found |= find_unreadable(item, f"{key}.{name}" if key else str(name))
    return found


def loadable(state: Mapping[str, Any]) -> State:
    """Return a copy of the containers of `state`, with None for each value that is not a tensor.

    A load fills the tensors in place and puts the values where they belong.
    """
    return {key: _with_others(value, lambda _: None) for key, value in state.items()}


def _with_others(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to all but tensors and containers of entries."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {key: _with_others(item, change) for key, item in value.items()}
    if isinstance(value, list) and is_nested(value):
        return [_with_others(item, change) for item in value]
    return change(value)
