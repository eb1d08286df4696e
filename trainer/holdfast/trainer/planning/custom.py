"""Saves with a user's own planner, which stock DCP's protocol runs again at every save.

The planner decides what is written, by which rank and under which names. Holdfast decides where the
bytes lie. Each save costs the planner's collectives, and nothing is cached.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.contracts.errors import SaveError
from holdfast.trainer.format.metadata import parse_metadata
from holdfast.trainer.format.opcodes import dump_metadata
from holdfast.trainer.planning import global_plan, rank_rows, ranks
from holdfast.trainer.planning.layout import (
    Layout,
    NumberEntry,
    TensorEntry,
    add_metadata,
    add_train_state,
    encode_number,
    has_form,
    is_padded_by_comment,
    make_template,
    plan_layout,
)
from holdfast.trainer.planning.signature import Encoded, Signature, is_plain, room_of
from holdfast.trainer.ranks.collective import HierarchicalGroup, attempt, problem_of
from holdfast.trainer.ranks.identity import Identity


@dataclass(frozen=True)
class CustomPlan:
    """The layout of one save, and the values to copy into it, by the layout's keys."""

    layout: Layout
    values: Mapping[str, Any]


def plan_custom(
    planner: SavePlanner,
    state: Mapping[str, Any],
    *,
    identity: Identity,
    tree: HierarchicalGroup,
    stage_tree: HierarchicalGroup,
    any_bytes: bool = False,
) -> CustomPlan:
    """Plan one save with `planner`. All ranks call this together.

    With `any_bytes`, the planner may resolve an item to bytes of any kind. Otherwise, an entry that
    only a pickle could store is refused. Raises `SaveError` on all ranks if the planner fails on
    one, or if it asks for such an entry or for metadata that could not be read back.
    """

    def plan_own() -> SavePlan:
        planner.set_up_planner(dict(state), storage_meta=None, is_coordinator=stage_tree.is_root)
        # At every save: the planner may decide differently each time, so nothing is cached, see
        # decision 8.
        return planner.create_local_plan()

    own = ranks.all_or_none(tree, identity.rank, plan_own)
    metadata: list[Metadata] = []

    def plan_all(everyones: list[SavePlan]) -> list[SavePlan]:
        made, found = planner.create_global_plan(everyones)
        metadata.append(found)
        if len(made) != len(everyones):
            raise SaveError(
                f"the planner returned {len(made)} plans for {len(everyones)} ranks; expected one "
                "plan per rank"
            )
        return made

    plan, problem = _through_root(own, plan_all, stage_tree, identity.rank)
    # On all ranks, so that none of them waits in the next collective for a rank that has failed.
    ranks.raise_problems(tree.agree(problem if stage_tree.is_root else None))
    layout, values, storage = ranks.all_or_none(
        tree, identity.rank, lambda: _place(planner, planner.finish_plan(plan), identity, any_bytes)
    )
    everywhere = stage_tree.gather_all(storage)

    def add_files() -> Layout:
        whole = layout
        if stage_tree.is_root:
            whole = add_metadata(whole, _pickle(metadata[0], everywhere), identity.folder)
        return add_train_state(whole) if identity.rank == 0 else whole

    return CustomPlan(ranks.all_or_none(tree, identity.rank, add_files), values)


def _through_root(
    plan: SavePlan,
    plan_all: Callable[[list[SavePlan]], list[SavePlan]],
    tree: HierarchicalGroup,
    rank: int,
) -> tuple[SavePlan, str | None]:
    """Return this rank's part of the plans that the root makes from all ranks' plans."""
    everyones = tree.gather_all(plan)
    # The root never raises here: its peers wait for the scatter, which carries the error.
    made, error = attempt(lambda: plan_all(everyones)) if tree.is_root else ([], None)
    own: SavePlan = tree.scatter_all([plan] * len(everyones) if made is None else made)
    return own, problem_of(error, rank)


def _place(
    planner: SavePlanner, plan: SavePlan, identity: Identity, any_bytes: bool
) -> tuple[Layout, dict[str, Any], dict[MetadataIndex, _StorageInfo]]:
    """Return where each item of this rank's plan lies, and its data as the planner resolves it."""
    entries: list[TensorEntry | NumberEntry] = []
    values: dict[str, Any] = {}
    for item in plan.items:
        key = f"{item.index.fqn} at {item.index.offset}"
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            values[key] = Encoded(_bytes_of(data)) if any_bytes else _number(item, data)
            entries.append(NumberEntry(key, _length_of(values[key])))
        else:
            values[key] = _tensor(item, data)
            shape, dtype = values[key].shape, values[key].dtype
            entries.append(TensorEntry(key, shape, dtype, make_template(shape, dtype)))
    layout = plan_layout(identity.file_name, entries, Signature({}))
    lengths = [entry.length for entry in entries]
    offsets = global_plan.offsets_of(np.array(lengths, dtype=np.int64)).tolist()
    name = identity.file_name.removeprefix(identity.folder)
    storage = {
        item.index: _StorageInfo(name, offset, length)
        for item, offset, length in zip(plan.items, offsets, lengths, strict=True)
    }
    return layout, values, storage


def _bytes_of(data: Any) -> bytes:
    return data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)


def _length_of(value: Any) -> int:
    """Return the bytes of a byte entry, with space for later values where that is possible."""
    if not isinstance(value, Encoded):
        return len(encode_number(value)) + rank_rows.NUMBER_ROOM_BYTES
    # Only the zip that `torch.save` writes can be padded. A planner may resolve to other bytes.
    room = room_of(value) if is_padded_by_comment(value.content) else 0
    return len(value.content) + room


def _number(item: WriteItem, data: Any) -> Any:
    """Return the value of a byte entry. Raises `SaveError` if reading it would need code."""
    try:
        content = _bytes_of(data)
        value = torch.load(io.BytesIO(content), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, TypeError, EOFError) as error:
        raise SaveError(
            f"{item.index.fqn}: the planner resolves it to bytes that cannot be read without "
            f"running code ({type(error).__name__}). Make it a tensor, or put it into the train "
            "state as JSON"
        ) from error
    if not is_plain(value):
        raise SaveError(
            f"{item.index.fqn}: the planner resolves it to a {type(value).__name__}, but a tensor, "
            "or a bool, int, float, str or None of a parameter group, was expected"
        )
    return value


def _tensor(item: WriteItem, data: Any) -> torch.Tensor:
    planned = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
    if not isinstance(data, torch.Tensor) or data.shape != planned:
        shown = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
        raise SaveError(
            f"{item.index.fqn}: the planner planned a part of shape {planned} but resolves it to "
            f"{shown}. Make both the same"
        )
    if not has_form(data.dtype):
        raise SaveError(
            f"{item.index.fqn}: it is of type {data.dtype}, which torch.save cannot write. Let the "
            "planner resolve it to another type, such as a view as torch.uint8"
        )
    return data.detach()


def _pickle(metadata: Metadata, storage: list[dict[MetadataIndex, _StorageInfo]]) -> bytes:
    metadata.storage_data = {index: info for one in storage for index, info in one.items()}
    metadata.version = CURRENT_DCP_VERSION
    content = dump_metadata(metadata)
    # Find metadata that a restricted reader would refuse now, not at the resume.
    parse_metadata(content, "the planner's metadata")
    return content
