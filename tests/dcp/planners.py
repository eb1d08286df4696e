"""The example planners of DCP's reference documentation, with their mistakes corrected."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType


class RenameOnSave(DefaultSavePlanner):
    """Prefixes all keys with `foo_`."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        renamed = {"foo_" + key: value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Fp16(DefaultSavePlanner):
    """Saves every tensor in half precision."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        item = super().resolve_data(write_item)
        return item if isinstance(item, io.BytesIO) else item.to(torch.float16)


class DdpLoadBalancing(DefaultSavePlanner):
    """Distributes rank 0's items over all ranks; every rank must have them."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None]
            for items in zip(*zip_longest(*iters), strict=True)
        ]
        all_plans = [
            replace(plan, items=items)
            for plan, items in zip(all_plans, items_per_rank, strict=True)
        ]
        return super().create_global_plan(all_plans)


class SaveExtraData(DefaultSavePlanner):
    """Stores data of each rank in the metadata, in place of the paths of nested keys."""

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data="per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global_plan, metadata = super().create_global_plan(all_plans)
        merged_data = [plan.planner_data for plan in global_plan]
        return global_plan, replace(metadata, planner_data=merged_data)


class Doubled(DefaultSavePlanner):
    """Overrides both extension points of the default planner."""

    looked_up: list[str]

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.__dict__.setdefault("looked_up", []).append(index.fqn)
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found if write_item.type == WriteItemType.BYTE_IO else found * 2


class RenameOnLoad(DefaultLoadPlanner):
    """Loads keys with the prefix `foo_` into the keys without it."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.original_state_dict = state_dict
        state_dict = {"foo_" + key: value for key, value in state_dict.items()}
        if self.flatten_sharded_tensors:
            state_dict = _flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn[4:]
        self.original_state_dict[key] = torch.load(value, weights_only=True)


class MetaModelMaterialize(DefaultLoadPlanner):
    """Allocates memory for meta-device tensors when their data are read."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = super().resolve_tensor(read_item)
        return torch.empty_like(tensor, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor
        self.original_state_dict[read_item.dest_index.fqn] = tensor


class Halved(DefaultLoadPlanner):
    """Overrides both extension points of the default planner: loads doubled values, halves them."""

    looked_up: list[str]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        self.__dict__.setdefault("looked_up", []).append(index.fqn)
        return super().lookup_tensor(index)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        narrowed: torch.Tensor = super().transform_tensor(read_item, tensor)
        return narrowed

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        tensor.detach().div_(2)
