"""Every load function of stock DCP reads Holdfast's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dcp.planners import Halved, MetaModelMaterialize, RenameOnLoad
from tests.dcp.testbed import Testbed, assert_same, plain_state, whole, zeros
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.contracts.errors import CheckpointError


def load(testbed: Testbed) -> None:
    """`load`: every kind of entry, in place; also with the caller's process group."""
    for group in (None, testbed.group):
        state = testbed.blank()
        state_dict_loader.load(state, checkpoint_id=testbed.ours, process_group=group)
        assert_same(state, testbed.state())


def load_state_dict_deprecated(testbed: Testbed) -> None:
    state = plain_state(5)
    with pytest.warns(FutureWarning, match="deprecated"):
        load_state_dict(state, FileSystemReader(testbed.ours))
    assert_same(state, plain_state(0))


def file_system_reader(testbed: Testbed) -> None:
    reader = FileSystemReader(testbed.ours)
    assert reader.checkpoint_id == testbed.ours
    assert reader.validate_checkpoint_id(testbed.ours)
    assert "model.0.weight" in reader.read_metadata().state_dict_metadata
    state = testbed.blank()
    state_dict_loader.load(state, storage_reader=reader)
    assert_same(state, testbed.state())


class OwnReader(StorageReader):
    """A custom reader that implements only the abstract interface and records its calls."""

    def __init__(self, directory: Path) -> None:
        self.inner, self.calls = FileSystemReader(directory), list[str]()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.calls.append("reset")
        self.inner.reset(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self.calls.append("read_metadata")
        return self.inner.read_metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any) -> None:
        self.calls.append("set_up_storage_reader")
        self.inner.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.calls.append("prepare_local_plan")
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.calls.append("prepare_global_plan")
        return self.inner.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.calls.append("read_data")
        return self.inner.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)


def own_storage_reader(testbed: Testbed) -> None:
    reader, state = OwnReader(testbed.ours), testbed.blank()
    state_dict_loader.load(state, checkpoint_id=testbed.ours, storage_reader=reader)
    assert_same(state, testbed.state())
    coordinates = ["prepare_global_plan"] * (testbed.rank == 0)
    expected = ["reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan"]
    assert reader.calls == [*expected, *coordinates, "read_data"]
    with pytest.raises(TypeError, match="storage_reader"):
        testbed.load(testbed.ours, state, storage_reader=reader)


class AppState:
    """A `Stateful` around a part of the state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.is_loaded = state, False

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert_same(state_dict, plain_state(0)["odd"])
        self.is_loaded = True


def stateful(testbed: Testbed) -> None:
    """Stock DCP calls `Stateful` objects, and so do planners in Holdfast; else they are refused."""
    app = AppState(plain_state(5)["odd"])
    state_dict_loader.load({"odd": app}, checkpoint_id=testbed.ours)
    assert app.is_loaded
    app = AppState(plain_state(5)["odd"])
    testbed.load(testbed.ours, {"odd": app}, planner=DefaultLoadPlanner())
    assert app.is_loaded
    with pytest.raises(CheckpointError, match="odd: a AppState"):
        testbed.load(testbed.ours, {"odd": app})


def planner_options(testbed: Testbed) -> None:
    """Every option of `DefaultLoadPlanner`, in stock DCP and in Holdfast."""
    state = plain_state(5) | {"absent": torch.ones(3)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: absent"):
        state_dict_loader.load(state, checkpoint_id=testbed.ours, planner=DefaultLoadPlanner())
    with pytest.raises(CheckpointError, match="Missing key in checkpoint state_dict: absent"):
        testbed.load(testbed.ours, state, planner=DefaultLoadPlanner())
    for through_ours in (False, True):
        state = plain_state(5) | {"absent": torch.ones(3)}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        _load(testbed, state, planner, through_ours)
        assert_same(state, plain_state(0) | {"absent": torch.ones(3)})
        flat = whole(plain_state(5))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _load(testbed, flat, planner, through_ours)
        assert_same(flat, whole(plain_state(0)))


def load_planner_examples(testbed: Testbed) -> None:
    """Both examples of `LoadPlanner`, and the default planner's extension points."""
    plain, number = plain_state(0)["foo_plain"], plain_state(0)["foo_number"]
    for through_ours in (False, True):
        state: dict[str, Any] = {"plain": torch.zeros_like(plain), "number": 9}
        report = _load(testbed, state, RenameOnLoad(), through_ours)
        assert_same(state, {"plain": plain, "number": number})
        if through_ours:
            assert report.restored == 2
            assert report.missing == ()
            assert "model.0.weight" in report.extra
            assert not {"foo_plain", "foo_number"} & {*report.extra}
        state = {"foo_plain": torch.empty_like(plain, device="meta")}
        planner = MetaModelMaterialize(flatten_state_dict=False)
        _load(testbed, state, planner, through_ours)
        assert_same(state, {"foo_plain": plain})
        state = {"foo_plain": torch.zeros_like(plain)}
        halved = Halved()
        _load(testbed, state, halved, through_ours)
        assert_same(state, {"foo_plain": plain / 2})
        assert halved.looked_up == ["foo_plain"]


def _load(testbed: Testbed, state: dict[str, Any], planner: LoadPlanner, through_ours: bool) -> Any:
    if through_ours:
        return testbed.load(testbed.ours, state, planner=planner)
    return state_dict_loader.load(state, checkpoint_id=testbed.ours, planner=planner)


def torch_save_reader(testbed: Testbed) -> None:
    """A checkpoint converted to one file is read and broadcast by DCP's reader and planner."""
    path = testbed.place("converted.pt")
    testbed.by_rank_0(lambda: dcp_to_torch_save(testbed.ours, path))
    model = whole({"model": testbed.state()["model"]})
    state = zeros(model)
    reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    state_dict_loader.load(state, storage_reader=reader, planner=planner, checkpoint_id=path)
    assert_same(state, model)
    converted = torch.load(path)
    assert_same(whole(converted), whole(testbed.state()))
    assert dist.get_world_size() == testbed.world_size


def dynamic_meta_planner(testbed: Testbed) -> None:
    """Without metadata only chunks with the saved layout load; others fail and are never wrong."""
    state: dict[str, Any] = {"model": testbed.blank()["model"]}
    testbed.load(testbed.ours, state, planner=DynamicMetaLoadPlanner())
    assert_same(state, {"model": testbed.state()["model"]})
    for unsuited in (zeros(whole(state["model"])), {"n": 3}):
        with pytest.raises(CheckpointError, match="not loaded: rank"):
            testbed.load(testbed.ours, {"model": unsuited}, planner=DynamicMetaLoadPlanner())


CHECKS = (
    load,
    load_state_dict_deprecated,
    file_system_reader,
    own_storage_reader,
    stateful,
    planner_options,
    load_planner_examples,
    torch_save_reader,
    dynamic_meta_planner,
)
