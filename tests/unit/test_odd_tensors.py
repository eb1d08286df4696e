"""Loading into unusual tensors: each is loaded like stock DCP, or refused by name."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.contracts.errors import CheckpointError, KeyMismatchError, SaveError
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.compare_keys import is_of_one_rank
from holdfast.trainer.planning.rank_rows import describe_rank
from holdfast.trainer.staging.stage import FlusherConnection


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": torch.arange(6.0), "one": torch.tensor([7.0])}
    save_with_dcp(state, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


@pytest.fixture
def group() -> Iterator[None]:
    """A process group with this process only, which is rank 0 of 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_one_element_with_a_stride_is_loaded(saved: Path) -> None:
    state = {"w": torch.zeros(6), "one": torch.zeros(4)[::2][:1]}
    assert state["one"].stride() == (2,)
    load_state(saved, state, group=None)
    assert state["one"].tolist() == [7.0]
    load_with_dcp(state, checkpoint_id=saved, no_dist=True)


def test_a_name_that_is_not_utf_8_is_loaded(tmp_path: Path) -> None:
    """Programs keep tensors by the names of files."""
    name = os.fsdecode(b"caf\xe9.bin")
    save_with_dcp({name: torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {name: torch.zeros(2)}
    load_state(tmp_path / "c", state, group=None)
    assert state[name].tolist() == [1.0, 1.0]


def test_a_sparse_target_is_refused_by_name(saved: Path) -> None:
    state = {"w": torch.zeros(6).to_sparse(), "one": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"w: its layout is torch\.sparse_coo"):
        load_state(saved, state, group=None)


def test_a_tensor_on_a_mesh_without_this_rank_is_not_changed(saved: Path, group: None) -> None:
    mesh = DeviceMesh("cpu", [1], _init_backend=False)
    assert mesh.get_coordinate() is None
    away = DTensor.from_local(torch.zeros(0), mesh, [Shard(0)], shape=torch.Size([6]), stride=(1,))
    state: dict[str, Any] = {"w": away, "one": torch.zeros(1)}
    load_state(saved, state, group=None)
    assert state["one"].tolist() == [7.0]


def test_a_lone_strided_shard_is_refused_by_name(saved: Path, group: None) -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    placements = [_StridedShard(0, split_factor=3)]
    lone = DTensor.from_local(
        torch.zeros(3), mesh, placements, shape=torch.Size([6]), stride=(1,), run_check=False
    )
    with pytest.raises(CheckpointError, match="w: a DTensor with placements"):
        load_state(saved, {"w": lone, "one": torch.zeros(1)}, group=None)
    with pytest.raises(SaveError, match="w: a DTensor with placements"):
        describe_rank({"w": lone})


def test_a_shard_of_an_empty_tensor_has_the_full_shape(group: None) -> None:
    """Otherwise its offsets would overlap those of the next key."""
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    empty = distribute_tensor(torch.zeros(5, 0, 3), mesh, [Shard(2)], src_data_rank=None)
    assert tuple(empty.to_local().shape) == (5, 0, 2)
    (entry,) = (entry for block in describe_rank({"w": empty}).entries for entry in block)
    assert tuple(entry.shape) == (5, 0, 3)  # type: ignore[union-attr]


def test_a_module_may_be_named_like_a_rank(tmp_path: Path) -> None:
    model = nn.ModuleDict({"rank00001": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    without = {"model": {k: v for k, v in model.state_dict().items() if "rank" not in k}}
    save_with_dcp(without, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(KeyMismatchError) as caught:
        load_state(tmp_path / "c", {"model": model.state_dict()}, group=None)
    assert caught.value.missing == ("model.rank00001.bias", "model.rank00001.weight")


def test_only_per_rank_keys_belong_to_one_rank() -> None:
    assert is_of_one_rank("rng.rank00003.cpu")
    assert is_of_one_rank("extra.loader.rank00012")
    for key in ("model.rank00001.weight", "optimizer.state.rank00001.exp_avg", "model.rank00001"):
        assert not is_of_one_rank(key)
    assert not is_of_one_rank("extra.ema.rank00001.weight")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_hangup_is_detected_on_descriptors_above_1024(many_descriptors: None) -> None:
    own, other = socket.socketpair()
    with own, other:
        high = os.dup2(own.fileno(), 1500)
        link = FlusherConnection("nowhere", None)  # type: ignore[arg-type]
        link._connection = socket.socket(fileno=high)
        assert not link._has_hung_up()
        other.close()
        assert link._has_hung_up()
        link.close()
