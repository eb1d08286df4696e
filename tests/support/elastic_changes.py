"""Loading a checkpoint into a changed model: other types, new or renamed parameters, other size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.elastic_layouts import LAYOUTS, Net
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from holdfast.contracts.errors import KeyMismatchError
from holdfast.trainer import load_checkpoint

Save = Callable[[nn.Module, AdamW, DeviceMesh], Path]


def check_changes(source: Path, truth: dict[str, Any], save: Save) -> None:
    """Check all changes on two ranks; `save` commits a state and returns its directory."""
    check_precision(source, truth, save)
    check_new_parameter(source, truth)
    check_rename(source, truth)
    check_other_shape(source)
    check_link(source)


def whole(model: nn.Module) -> dict[str, Any]:
    tensors = get_model_state_dict(model)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def check_precision(source: Path, truth: dict[str, Any], save: Save) -> None:
    """float32 is loaded as bfloat16 and back, moments included, and each conversion is reported."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    narrow = Net(seed=7).to(torch.bfloat16)
    fully_shard(narrow, mesh=mesh)
    optimizer = AdamW(narrow.parameters())
    report = load_checkpoint(source, narrow, optimizer)
    assert "model.head.weight: float32 to bfloat16" in report.converted
    assert "optimizer.state.head.weight.exp_avg: float32 to bfloat16" in report.converted
    rounded = {key: truth[f"model.{key}"].bfloat16() for key in whole(narrow)}
    assert all(torch.equal(value, rounded[key]) for key, value in whole(narrow).items())
    wide, _ = LAYOUTS["tp"].make(2, seed=8)
    other = AdamW(wide.parameters())
    report = load_checkpoint(save(narrow, optimizer, mesh), wide, other)
    assert "model.head.weight: bfloat16 to float32" in report.converted
    assert "optimizer.state.head.weight.exp_avg: bfloat16 to float32" in report.converted
    assert all(torch.equal(value, rounded[key].float()) for key, value in whole(wide).items())


def check_new_parameter(source: Path, truth: dict[str, Any]) -> None:
    """Refused by name if strict; otherwise it keeps its initial value and all others are loaded."""
    net = Net(seed=7)
    net.adapter = nn.Linear(3, 5)
    first = net.adapter.weight.detach().clone()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW(net.parameters())
    with pytest.raises(KeyMismatchError, match=r"wanted but not saved: model\.adapter\.bias"):
        load_checkpoint(source, net, optimizer)
    report = load_checkpoint(source, net, optimizer, strict=False)
    assert {"model.adapter.bias", "model.adapter.weight"} <= set(report.missing)
    found = whole(net)
    assert torch.equal(found.pop("adapter.weight"), first)
    found.pop("adapter.bias")
    assert all(torch.equal(value, truth[f"model.{key}"]) for key, value in found.items())


def check_rename(source: Path, truth: dict[str, Any]) -> None:
    """A renamed module is an error without a rename map, and loads with one."""
    model: Any = LAYOUTS["tp"].make(2, seed=7)[0]
    model.exit = model.head
    del model.head
    optimizer = AdamW(model.parameters())
    with pytest.raises(KeyMismatchError) as refused:
        load_checkpoint(source, model, optimizer)
    assert "model.exit.weight" in refused.value.missing
    assert "model.head.weight" in refused.value.extra
    report = load_checkpoint(source, model, optimizer, rename={"model.head.*": "model.exit.*"})
    assert "model.head.weight to model.exit.weight" in report.renamed
    assert torch.equal(whole(model)["exit.weight"], truth["model.head.weight"])
    moment = optimizer.state[model.exit.weight]["exp_avg"].full_tensor()
    assert torch.equal(moment, truth["optimizer.state.head.weight.exp_avg"])


def check_other_shape(source: Path) -> None:
    """A different model size is an error that names both shapes, even if not strict."""
    net = Net(seed=7)
    net.head = nn.Linear(12, 14)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(KeyMismatchError, match=r"wanted \(14, 12\), saved \(13, 12\)"):
        load_checkpoint(source, net, strict=False)


def check_link(source: Path) -> None:
    """The link to the newest checkpoint can be loaded like a checkpoint."""
    net = Net(seed=7)
    report = load_checkpoint(source.parent / "latest", net)
    assert report.missing == ()
    newest = Net(seed=8)
    load_checkpoint((source.parent / "latest").resolve(), newest)
    pairs = zip(net.state_dict().values(), newest.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
