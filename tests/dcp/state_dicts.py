"""State dicts from PyTorch's helpers with each option, and FSDP1's: one side saves, one loads."""

from __future__ import annotations

from typing import Any

import torch
from tests.dcp.testbed import Testbed, assert_same, whole
from tests.support.checkpoint_program import make_state, train
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from holdfast.trainer import load_checkpoint

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def helpers(testbed: Testbed) -> None:
    """All six helpers: their state is loaded from our checkpoint and set to the saved values."""
    expected = testbed.state()
    model, optimizer = make_state(testbed.world_size, steps=1, seed=5)
    own, moments = get_state_dict(model, optimizer, options=FLAT)
    state: dict[str, Any] = {"model": own, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=testbed.ours)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=FLAT,
    )
    now = {
        "model": get_model_state_dict(model, options=FLAT),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    assert_same(now, {part: expected[part] for part in now})
    other, moved = make_state(testbed.world_size, steps=1, seed=6)
    set_model_state_dict(other, state["model"], options=FLAT)
    set_optimizer_state_dict(other, moved, state["optimizer"], options=FLAT)
    assert_same(get_model_state_dict(other), expected["model"])
    assert_same(get_optimizer_state_dict(other, moved, options=FLAT), expected["optimizer"])


def whole_states(testbed: Testbed) -> None:
    """`full_state_dict` and `cpu_offload`: on every rank, and on the first rank only."""
    expected = whole({"model": testbed.state()["model"]})
    model, _ = make_state(testbed.world_size, steps=1, seed=5)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        state = {"model": get_model_state_dict(model, options=options)}
        assert bool(state["model"]) == (testbed.rank == 0 or not offload)
        testbed.load(testbed.ours, state, include=["model"])
        if state["model"]:
            assert_same(state, {"model": _nested(expected)})
        directory = testbed.place(f"whole-{offload}")
        state_dict_saver.save(state, checkpoint_id=directory)
        other, _ = make_state(testbed.world_size, steps=1, seed=6)
        load_checkpoint(directory, other)
        assert_same(get_model_state_dict(other), testbed.state()["model"])


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("model."): value for key, value in flat.items()}


def broadcast_from_rank_0(testbed: Testbed) -> None:
    """`broadcast_from_rank0` and `strict`: only rank 0 reads our checkpoint."""
    model, _ = make_state(testbed.world_size, steps=1, seed=5)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": get_model_state_dict(model, options=options)}
    testbed.load(testbed.ours, state, include=["model"])
    state["model"].pop("0.bias", None)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    before = model.state_dict()["0.bias"].to_local().clone()
    set_model_state_dict(model, state["model"], options=options)
    expected = testbed.state()["model"]
    expected["0.bias"].to_local().copy_(before)
    assert_same(get_model_state_dict(model), expected)


def frozen_and_submodules(testbed: Testbed) -> None:
    """`ignore_frozen_params`, and a submodule's keys without its prefix."""
    model, _ = make_state(testbed.world_size, steps=2, seed=0)
    model[2].requires_grad_(False)
    part = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert part.keys() == {"0.weight", "0.bias"}
    state_dict_saver.save({"model": part}, checkpoint_id=testbed.place("trainable"))
    other, _ = make_state(testbed.world_size, steps=1, seed=5)
    kept = other[2].weight.to_local().clone()
    report = load_checkpoint(testbed.place("trainable"), other, strict=False)
    assert report.missing == ("model.2.weight",)
    assert torch.equal(other[2].weight.to_local(), kept)
    assert torch.equal(other[0].weight.to_local(), model[0].weight.to_local())
    options = StateDictOptions(keep_submodule_prefixes=False)
    part = get_model_state_dict(model, submodules={model[0]}, options=options)
    assert part.keys() == {"weight", "bias"}
    state_dict_saver.save(part, checkpoint_id=testbed.place("submodule"))
    other, _ = make_state(testbed.world_size, steps=1, seed=6)
    names = {key: f"model.0.{key}" for key in part}
    load_checkpoint(testbed.place("submodule"), other, include=["model.0"], rename=names)
    assert torch.equal(other[0].weight.to_local(), model[0].weight.to_local())


def unflattened_optimizer(testbed: Testbed) -> None:
    """Without `flatten_optimizer_state_dict`: state by parameter name, groups as a list."""
    model, optimizer = make_state(testbed.world_size, steps=2, seed=0)
    saved: dict[str, Any] = {"model": get_model_state_dict(model)}
    saved["optimizer"] = get_optimizer_state_dict(model, optimizer)
    state_dict_saver.save(saved, checkpoint_id=testbed.place("unflattened-optimizer"))
    other, moved = make_state(testbed.world_size, steps=1, seed=5)
    state: dict[str, Any] = {"model": get_model_state_dict(other)}
    state["optimizer"] = get_optimizer_state_dict(other, moved)
    testbed.load(testbed.place("unflattened-optimizer"), state)
    assert_same(state, saved)
    again, into = make_state(testbed.world_size, steps=1, seed=6)
    groups = ["optimizer.param_groups"]
    load_checkpoint(testbed.place("unflattened-optimizer"), again, into, exclude=groups)
    found: dict[str, Any] = {"optimizer": get_optimizer_state_dict(again, into)}
    assert_same(found["optimizer"]["state"], saved["optimizer"]["state"])


def fsdp1(testbed: Testbed) -> None:
    """FSDP1's sharded state, saved by stock DCP: loaded into FSDP1 and into `fully_shard`."""
    model, optimizer = make_fsdp1(steps=2, seed=0)
    saved = fsdp1_state(model, optimizer)
    assert any(isinstance(value, ShardedTensor) for value in saved["model"].values())
    directory = testbed.place("fsdp1")
    state_dict_saver.save(saved, checkpoint_id=directory)
    other, moved = make_fsdp1(steps=1, seed=5)
    state = fsdp1_state(other, moved)
    report = testbed.load(directory, state)
    assert_same(state, saved)
    assert report.missing == report.extra == ()
    sharded, into = make_state(testbed.world_size, steps=1, seed=6)
    load_checkpoint(directory, sharded, into)
    with FullyShardedDataParallel.summon_full_params(model):
        expected = {k: v.detach().clone() for k, v in model.module.named_parameters()}
    assert_same(whole(get_model_state_dict(sharded)), expected)


def make_fsdp1(*, steps: int, seed: int) -> tuple[FullyShardedDataParallel, torch.optim.AdamW]:
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 5, bias=False))
    model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (seed + 1))
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own, moments = get_state_dict(model, optimizer, options=FLAT)
    return {"model": own, "optimizer": moments}


CHECKS = (
    helpers,
    whole_states,
    broadcast_from_rank_0,
    frozen_and_submodules,
    unflattened_optimizer,
    fsdp1,
)
