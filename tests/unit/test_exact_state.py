"""The captured state equals the program's state: nothing stale, lost or mixed up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.state import plain
from holdfast.trainer.state.fresh import ResumeFit
from holdfast.trainer.state.fsdp1 import OPTIONS
from holdfast.trainer.state.run_state import TrainingProgress
from holdfast.trainer.state.train_state import TrainState

PROGRESS = TrainingProgress(step=1, seed=0)
Saved = tuple[dict[str, Any], dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)


class Counter:
    is_of_one_size = False

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.value = state_dict["value"]


class Custom(nn.Linear):
    """A module with extra state."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([5])

    def set_extra_state(self, state: Any) -> None:
        self.was_set = int(state)


def make(model: nn.Module, **more: Any) -> tuple[TrainState, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {"rank": 0, "world_size": 1, **more}
    return TrainState(model, [optimizer], **arguments), optimizer


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def save(state: TrainState) -> Saved:
    """A capture as a checkpoint stores it: copied tensors, and JSON."""
    tensors, document = state.capture(PROGRESS)
    return copied(tensors), json.loads(json.dumps(document))


def metadata_of(tensors: dict[str, Any]) -> Metadata:
    entries: dict[str, Any] = {}
    for part, values in tensors.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                properties = TensorProperties.create_from_tensor(value)
                entries[f"{part}.{key}"] = TensorStorageMetadata(properties, value.size(), [])
            elif not isinstance(value, dict):
                entries[f"{part}.{key}"] = BytesStorageMetadata()
    return Metadata(entries)


def load(state: TrainState, saved: Saved) -> Any:
    tensors, document = saved
    target = state.template(document, lambda: metadata_of(tensors))
    fill(target, tensors)
    return state.apply(target, document)


def fill(target: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in target.items():
        if key not in source:
            continue
        if isinstance(value, dict):
            fill(value, source[key])
        elif isinstance(value, torch.Tensor):
            value.copy_(source[key])
        else:
            target[key] = source[key]


def assert_as_stock(state: TrainState, model: nn.Module, optimizer: Any) -> None:
    captured, _ = state.capture(PROGRESS)
    stock: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
    }
    for part, wanted in stock.items():
        assert captured[part].keys() == wanted.keys()
        for key, value in wanted.items():
            found = captured[part][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(found, value)
                assert found.data_ptr() == value.data_ptr(), f"{key} is not the live tensor"
            else:
                assert found == value


def step(optimizer: torch.optim.Optimizer) -> None:
    """Step every parameter with a gradient of ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_every_change_of_the_program_is_in_the_next_capture() -> None:
    model = nn.Sequential(Block(), Block())
    state, optimizer = make(model)
    step(optimizer)
    assert_as_stock(state, model, optimizer)
    model[0].get_submodule("inner").weight.data = torch.full((4, 4), 7.0)
    assert_as_stock(state, model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_as_stock(state, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.param_groups[0]["initial_lr"] = 0.1
    assert_as_stock(state, model, optimizer)
    model.append(Block())
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
    # A parameter that was never stepped has no state, as in stock DCP.
    assert_as_stock(state, model, optimizer)
    step(optimizer)
    assert_as_stock(state, model, optimizer)
    model[1].register_buffer("late", torch.ones(2))
    model[1].register_buffer("scratch", torch.ones(2), persistent=False)
    assert_as_stock(state, model, optimizer)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    # The optimizer still has the replaced parameters, which is an error of the program.
    with pytest.raises(CheckpointError, match="12 parameters that are not in the model"):
        state.capture(PROGRESS)


def test_the_extra_state_of_a_module_is_saved_and_restored() -> None:
    model: Any = nn.Sequential(Custom(3, 3), nn.Linear(3, 3))
    state, _ = make(model)
    saved = save(state)
    assert "0._extra_state" in saved[0]["model"]
    other: Any = nn.Sequential(Custom(3, 3), nn.Linear(3, 3))
    load(make(other)[0], saved)
    assert other[0].was_set == 5
    assert torch.equal(other[1].weight, model[1].weight)


def test_optimizer_state_is_restored_when_the_frozen_layers_differ() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state, optimizer = make(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    saved = save(state)
    moments = saved[0]["optimizer"]["state.0.weight.exp_avg"]
    assert moments.abs().sum() > 0
    # The program freezes its layer when it builds it, and may unfreeze it later.
    again: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    again[0].requires_grad_(False)
    state, optimizer = make(again)
    before = save(state)
    assert "state.0.weight.exp_avg" not in before[0]["optimizer"]
    load(state, saved)
    assert torch.equal(optimizer.state[again[0].weight]["exp_avg"], moments)
    assert torch.equal(again[0].weight, model[0].weight)
    assert again[0].weight.grad is None
    assert not again[0].weight.requires_grad


def test_several_models_share_one_namespace() -> None:
    whole: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    parts = [nn.ModuleDict({name: whole[name]}) for name in ("a", "b")]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    several = TrainState(parts, optimizers, rank=0, world_size=1)
    one, _ = make(whole)
    assert several.capture(PROGRESS)[0]["model"].keys() == one.capture(PROGRESS)[0]["model"].keys()
    saved = save(several)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    load(several, saved)
    assert torch.equal(whole["a"].weight, saved[0]["model"]["a.weight"])
    with pytest.raises(CheckpointError, match=r"tensors with the same name: a\.bias, a\.weight"):
        TrainState([parts[0], parts[0]], [], rank=0, world_size=1)
    with pytest.raises(CheckpointError, match=r"two optimizers have the parameters a\.bias"):
        TrainState(parts, [optimizers[0], optimizers[0]], rank=0, world_size=1)
    with pytest.raises(CheckpointError, match="model=\\[model, head\\]"):
        TrainState(parts[0], optimizers, rank=0, world_size=1)


@pytest.mark.parametrize("is_extra", [False, True])
def test_lbfgs_resumes_as_an_optimizer_or_as_an_extra(is_extra: bool) -> None:
    def build(value: float) -> tuple[nn.Linear, Any, TrainState]:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, value)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        given: Any = ([], (), {"optimizer": optimizer}) if is_extra else ([optimizer],)
        return model, optimizer, TrainState(model, *given, rank=0, world_size=1)

    def closure(model: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    model, optimizer, state = build(0.5)
    optimizer.step(partial(closure, model, optimizer))
    saved = save(state)
    other, other_optimizer, other_state = build(0.0)
    load(other_state, saved)
    for one, its in ((model, optimizer), (other, other_optimizer)):
        its.step(partial(closure, one, its))
    assert torch.equal(model.weight, other.weight)


def test_a_scaler_that_was_not_saved_keeps_its_initial_state() -> None:
    model = nn.Linear(2, 2)
    without = save(make(model)[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    restored = load(make(model, extra={"scaler": scaler})[0], without)
    assert restored.missing == ("extra.scaler",)
    off = save(make(model, extra={"scaler": torch.amp.GradScaler("cpu", enabled=False)})[0])
    restored = load(make(model, extra={"scaler": scaler})[0], off)
    assert "extra.scaler" not in restored.parts
    assert scaler.get_scale() == 8.0


def test_averaged_weights_are_named_without_wrapper_prefixes() -> None:
    def average(model: Any) -> AveragedModel:
        averaged = AveragedModel(model)
        averaged.update_parameters(nn.Linear(2, 2))
        return averaged

    ema = average(nn.Linear(2, 2))
    saved = save(make(nn.Linear(2, 2), extra={"ema": ema})[0])
    assert set(saved[0]["extra"]) == {"ema.module.weight", "ema.module.bias", "ema.n_averaged"}
    other = average(torch.compile(nn.Linear(2, 2), backend="eager"))
    load(make(nn.Linear(2, 2), extra={"ema": other})[0], saved)
    assert torch.equal(next(other.parameters()), next(ema.parameters()))
    assert other.n_averaged == 1


def test_per_rank_objects_are_restored_only_on_their_rank() -> None:
    model = nn.Linear(2, 2)
    saved: list[Saved] = []
    for rank in range(2):
        things: dict[str, Any] = {
            "counter": Counter(rank + 1),
            "torch": torch.Generator().manual_seed(rank),
            "numpy": np.random.default_rng(rank),
        }
        saved.append(save(make(model, per_rank=things, rank=rank, world_size=2)[0]))
    assert set(saved[1][0]["extra"]) == {f"{name}.rank00001" for name in things}
    # Every rank reads the document of rank 0.
    counter, torch_rng, numpy_rng = Counter(), torch.Generator(), np.random.default_rng()
    mine = {"counter": counter, "torch": torch_rng, "numpy": numpy_rng}
    state, _ = make(model, per_rank=mine, rank=1, world_size=2)
    restored = load(state, (saved[1][0], saved[0][1]))
    assert {"extra.counter", "extra.torch", "extra.numpy"} < set(restored.parts)
    assert counter.value == 2
    assert torch_rng.initial_seed() == 1
    assert numpy_rng.random() == np.random.default_rng(1).random()


def test_per_rank_objects_are_refused_at_another_world_size() -> None:
    model = nn.Linear(2, 2)
    saved = save(make(model, per_rank={"counter": Counter(1)}, world_size=2)[0])
    expected_error = (
        r"extra\.counter: this Counter was saved by each of 2 ranks .* at 4.*Session\.sampler"
    )
    with pytest.raises(CheckpointError, match=expected_error):
        load(make(model, per_rank={"counter": Counter()}, world_size=4)[0], saved)
    counter = Counter(7)
    state, _ = make(
        model, per_rank={"counter": counter}, world_size=4, fit=ResumeFit(exclude=["extra.counter"])
    )
    restored = load(state, saved)
    assert counter.value == 7
    assert "extra.counter" not in (*restored.parts, *restored.unused)


def test_per_rank_objects_fix_the_number_of_ranks_unless_they_are_left_out() -> None:
    model = nn.Linear(2, 2)
    for objects in (
        {"per_rank": {"counter": Counter()}},
        {"extra": {"counter": torch.Generator()}},
        {"extra": {"counter": np.random.default_rng()}},
    ):
        document = save(make(model, **objects)[0])[1]
        assert "extra.counter (" in document["fixed"]
        assert "exclude" in document["fixed"]
        left_out = make(model, **objects, fit=ResumeFit(exclude=["extra.counter"]))[0]
        assert "fixed" not in save(left_out)[1]
    counter = Counter()
    counter.is_of_one_size = True
    assert "fixed" not in save(make(model, per_rank={"counter": counter})[0])[1]
    assert "fixed" not in save(make(model, extra={"counter": Counter()})[0])[1]


def test_a_per_rank_row_keeps_its_length_until_it_is_too_short() -> None:
    counter = Counter(1)
    state, _ = make(nn.Linear(2, 2), per_rank={"counter": counter})
    row = save(state)[0]["extra"]["counter.rank00000"]
    counter.value = 10**1000
    assert save(state)[0]["extra"]["counter.rank00000"].shape == row.shape
    counter.value = 10**4200
    assert save(state)[0]["extra"]["counter.rank00000"].numel() > row.numel()


@pytest.mark.parametrize(
    "thing",
    [
        DistributedSampler(range(4), num_replicas=2, rank=0),  # type: ignore[arg-type]
        DataLoader(range(4)),  # type: ignore[arg-type]
    ],
)
def test_a_loader_without_state_is_refused_with_the_alternative(thing: Any) -> None:
    with pytest.raises(CheckpointError, match=r"Session\.distributed_sampler a sampler"):
        make(nn.Linear(2, 2), extra={"data": thing})


def test_the_error_names_the_extra_that_refused_its_state() -> None:
    saved = save(make(nn.Linear(2, 2), extra={"count": Counter(3)})[0])
    saved[1]["objects"]["extra.count"] = {"other": 3}
    with pytest.raises(CheckpointError, match=r"extra\.count: Counter\.load_state_dict refused"):
        load(make(nn.Linear(2, 2), extra={"count": Counter()})[0], saved)


def test_excluded_parts_keep_their_initial_state() -> None:
    saved = save(make(nn.Linear(2, 2), extra={"count": Counter(3)})[0])
    counter = Counter(9)
    fit = ResumeFit(exclude=["extra", "optimizer"])
    state, optimizer = make(nn.Linear(2, 2), extra={"count": counter}, fit=fit)
    optimizer.param_groups[0]["lr"] = 0.7
    restored = load(state, saved)
    assert restored.parts == ("model", "rng")
    assert counter.value == 9
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_a_part_excluded_from_one_load_is_saved_and_loaded_afterwards() -> None:
    saved = save(make(nn.Linear(2, 2), extra={"count": Counter(3)})[0])
    fit = ResumeFit.of(strict=True, rename={"model.old": "model.new"}, exclude="extra.count")
    counter = Counter(9)
    state, _ = make(nn.Linear(2, 2), extra={"count": counter}, fit=fit)
    assert state.fit_for(saved[1]) == fit
    load(state, saved)
    assert counter.value == 9
    saved = save(state)
    counter.value = 1
    # The identical command after a preemption.
    assert state.fit_for(saved[1]) == ResumeFit(if_needed=("extra.count",))
    load(state, saved)
    assert counter.value == 9


def test_generators_are_rewound_once_to_their_state_after_the_resume() -> None:
    state, _ = make(nn.Linear(2, 2))
    saved = save(state)
    expected = torch.randn(2)
    load(state, saved)
    torch.randn(5)
    state.rewind_generators(is_last=True)
    assert torch.equal(torch.randn(2), expected)
    state.rewind_generators(is_last=True)
    assert not torch.equal(torch.randn(2), expected)


@pytest.mark.parametrize("value", [{"a": torch.ones(()), "b": [torch.zeros(0, 3), (1, b"x")]}, 5])
def test_state_serialized_as_bytes_round_trips(value: Any) -> None:
    back = plain.from_bytes(plain.to_bytes(value, "x"))
    assert repr(back) == repr(value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torchdata_loader_resumes_only_at_the_same_world_size(workers: int) -> None:
    def loader() -> Any:
        sampler = StatefulDistributedSampler(range(40), num_replicas=2, rank=1)
        return StatefulDataLoader(range(40), batch_size=4, sampler=sampler, num_workers=workers)

    whole = [batch.tolist() for batch in loader()]
    model, first = nn.Linear(2, 2), loader()
    batches = iter(first)
    trained = [next(batches).tolist() for _ in range(2)]
    # A loader given as an extra is still saved per rank.
    saved = save(make(model, extra={"loader": first}, rank=1, world_size=2)[0])
    assert set(saved[0]["extra"]) == {"loader.rank00001"}
    again = loader()
    load(make(model, extra={"loader": again}, rank=1, world_size=2)[0], saved)
    assert trained + [batch.tolist() for batch in again] == whole
    with pytest.raises(
        CheckpointError, match=r"was saved by each of 2 .*it contains one rank's share"
    ):
        load(make(model, extra={"loader": loader()}, rank=1, world_size=3)[0], saved)


class Packed(torch.utils.data.IterableDataset[list[int]]):
    """Joins numbers to samples of three. Its state is a list that it changes, as torchtitan's."""

    def __init__(self) -> None:
        self.rest: list[int] = []
        self.next = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.next < 60:
            self.rest += [self.next, self.next + 1]
            self.next += 2
            if len(self.rest) >= 3:
                found, self.rest = self.rest[:3], self.rest[3:]
                yield found

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest, self.next = state["rest"], state["next"]


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_states_of_workers_are_those_of_the_batches_that_were_given(steps: int) -> None:
    def loader() -> Any:
        return StatefulDataLoader(Packed(), batch_size=2, num_workers=2, collate_fn=list)

    whole = list(loader())
    model, first = nn.Linear(2, 2), loader()
    state, _ = make(model, extra={"loader": first})
    given = [batch for _, batch in zip(range(steps), first, strict=False)]
    saved = save(state)
    again = loader()
    load(make(model, extra={"loader": again})[0], saved)
    assert given + list(again) == whole


class Mixed:
    """Saves its loaders, as a program that mixes several data sets does."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = {"parts": list(loaders)}

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [loader.state_dict() for loader in self.loaders["parts"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader, part in zip(self.loaders["parts"], state["parts"], strict=True):
            loader.load_state_dict(part)


def test_a_loader_inside_an_object_of_the_state_counts_as_saved() -> None:
    given, inside, other = (StatefulDataLoader(range(4)) for _ in range(3))
    state, _ = make(nn.Linear(2, 2), extra={"loader": given, "mixed": Mixed(inside)})
    assert state.saves(given)
    assert state.saves(inside)
    assert not state.saves(other)
