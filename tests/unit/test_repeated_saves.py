"""What a save reuses of the one before, and each change of the program that it must see."""

from __future__ import annotations

import gc
import io
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.contracts.errors import CheckpointError, SaveError
from holdfast.trainer.planning.layout import NumberEntry, plan_layout
from holdfast.trainer.planning.signature import Flat, Joined, Signature, flatten
from holdfast.trainer.slots.slots import Slot
from holdfast.trainer.staging.copying import Copier, LateCopy
from holdfast.trainer.staging.stage import StagedSlot
from holdfast.trainer.state import rng
from holdfast.trainer.state.optimizers import OptimizerState
from holdfast.trainer.state.run_state import TrainingProgress
from holdfast.trainer.state.train_state import TrainState

SIDE = 600  # 1.4 MB: a thread copies it
ENTRY_BYTES = 2048


def numbers(count: int = 2) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(SIDE, SIDE, generator=made) for _ in range(count)]


def give(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data = other


def double(one: torch.Tensor) -> None:
    one.mul_(2.0)


# All but `memory` keep the address.
CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "values": double,
    "memory": lambda one: give(one, one.data.clone()),
    "strides": lambda one: give(one, one.data.t()),
    "type": lambda one: give(one, one.data.view(torch.int32)),
    "sign": lambda one: give(one, torch._neg_view(one.data)),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_copy_sees_how_a_tensor_has_changed(
    change: Callable[[torch.Tensor], None], is_late: bool
) -> None:
    sources = numbers()
    views = [torch.zeros(SIDE, SIDE) for _ in sources]
    copier = Copier(views, threads=1)
    for act in (None, None, change):
        if act is not None:
            act(sources[1])
        steady = {source.data_ptr() for source in sources} if is_late else ()
        copy = copier.copy(sources, steady)
        assert isinstance(copy, LateCopy) is is_late
        assert copy is None or copy.finish()
        for view, source in zip(views, sources, strict=True):
            assert torch.equal(view, source.to(view.dtype))
    copier.close()


def test_a_copy_sees_another_size() -> None:
    (source,) = numbers(1)
    copier = Copier([torch.zeros(SIDE, SIDE)], threads=1)
    copier.copy([source])
    source.data = source.data[: SIDE // 2]
    with pytest.raises(RuntimeError, match="size of tensor"):
        copier.copy([source])
    copier.close()


def test_a_copy_sees_a_conjugate() -> None:
    (real, imaginary) = numbers()
    source, view = torch.complex(real, imaginary), torch.zeros(SIDE, SIDE, dtype=torch.complex64)
    copier = Copier([view], threads=1)
    copier.copy([source])
    source.data = source.data.conj()
    copier.copy([source])
    assert torch.equal(view, torch.complex(real, -imaginary))
    copier.close()


def test_a_late_copy_keeps_memory_that_a_tensor_gives_up() -> None:
    (source,) = numbers(1)
    then, view = source.clone(), torch.zeros(SIDE, SIDE)
    copier = Copier([view], threads=1)
    copy = copier.copy([source], {source.data_ptr()})
    source.data = torch.ones(SIDE, SIDE)
    assert isinstance(copy, LateCopy)
    assert copy.finish()
    assert torch.equal(view, then)
    copier.close()


def test_numbers_that_changed_are_written_again() -> None:
    values: dict[str, Any] = {"list": [1, 2], "number": 0.5, "flag": None}
    entries = [NumberEntry(key, ENTRY_BYTES) for key in values]
    layout = plan_layout("file", entries, Signature(values))
    staged = StagedSlot(Slot.create(layout.image_bytes), layout)

    def saved() -> dict[str, Any]:
        staged.fill(values, None)
        found = {}
        for place in layout.numbers:
            content = bytes(staged.slot.data[place.at : place.at + place.bytes])
            found[place.key] = torch.load(io.BytesIO(content), weights_only=True)
        return found

    assert saved() == values
    values["number"] = 0.25
    values["list"][0] = 7
    assert saved() == {"list": [7, 2], "number": 0.25, "flag": None}
    staged.close()


# --- the plan -------------------------------------------------------------------------------------


def planned() -> dict[str, Any]:
    return {"a": torch.ones(2), "b": 1, "text": "short", "list": [1, 2], "other": nn.Parameter()}


def grow(flat: dict[str, Any]) -> None:
    flat["list"] += [0] * 100


MISFITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another type": lambda flat: flat.update(a=torch.ones(2, dtype=torch.float64)),
    "another shape": lambda flat: flat.update(a=torch.ones(3)),
    "another layout": lambda flat: flat.update(a=torch.ones(2).to_sparse()),
    "no memory": lambda flat: flat.update(a=torch.ones(2, device="meta")),
    "a new shape of the same object": lambda flat: give(flat["a"], torch.ones(5)),
    "a number for a tensor": lambda flat: flat.update(a=1),
    "a tensor for a number": lambda flat: flat.update(b=torch.ones(1)),
    "a long text": lambda flat: flat.update(text="x" * 1000),
    "a list that grew": grow,
    "a missing key": lambda flat: flat.pop("b"),
    "a new key": lambda flat: flat.update(c=1),
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS.keys())
def test_a_state_that_has_fitted_may_no_longer_fit(
    change: Callable[[dict[str, Any]], object],
) -> None:
    flat = planned()
    signature = Signature(flat)
    assert signature.fits(flat)
    assert signature.fits(flat)
    change(flat)
    assert not signature.fits(flat)
    assert signature.fits(planned())


def test_numbers_and_the_order_of_keys_do_not_matter() -> None:
    signature = Signature(planned())
    assert signature.fits(planned())
    assert signature.fits(planned() | {"b": 0.5, "text": "other"})
    assert signature.fits(dict(reversed(planned().items())))
    assert signature.fits(planned())


# --- names ----------------------------------------------------------------------------------------


def test_keys_are_joined_again_when_names_change() -> None:
    joined = Joined()
    listed: list[Any] = [1, 2]
    for state in (
        {"model": {"a": 1, "b": 2}, "rng": {"rank": {"x": 1}}},
        {"model": {"a": 3, "b": 4}, "rng": {"rank": {"x": 5}}},
        {"model": {"a": 3, "c": 4}, "rng": {"rank": {"x": 5, "y": 6}}},
        {"model": {"a": {"b": 7}, "c": 4}, "rng": {}},
        {"model": {"a": listed, 1: (2, 3)}},
    ):
        assert flatten(state, joined) == flatten(state)
    listed.append(torch.ones(1))
    assert list(flatten(state, joined)) == ["model.a.0", "model.a.1", "model.a.2", "model.1"]


@pytest.mark.parametrize("twice", [{1: 1, "1": 2}, {"a": {"b": 1}, "a.b": 2}, {"a.b": 2}])
def test_one_name_for_two_entries_is_refused_each_time(twice: dict[Any, Any]) -> None:
    joined = Joined()
    for _ in range(2):
        with pytest.raises(SaveError, match=r"two entries have the name model\.(a\.b|1) "):
            flatten({"model": twice, "model.a.b": 3}, joined)


def test_a_value_that_cannot_be_saved_is_refused_each_time() -> None:
    joined, options = Joined(), (1, 2)
    state: dict[str, Any] = {"a": options, "b": options}
    flatten(state, joined)
    for _ in range(2):
        with pytest.raises(SaveError, match="b: a tuple cannot be saved"):
            flatten(state | {"b": (1, object())}, joined)


def test_state_of_an_optimizer_is_found_when_its_names_change() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    names = {id(one): f"p{number}" for number, one in enumerate(parameters)}
    optimizer = torch.optim.AdamW(parameters[:2])
    for one in parameters:
        one.grad = torch.ones(2)
    optimizer.step()
    flattened = OptimizerState(optimizer)

    def found() -> Mapping[str, Any]:
        again, forms = flattened.gather(names), OptimizerState(optimizer).gather(names, {})
        assert list(again) == list(forms)
        assert all(again[key] is forms[key] for key in again)
        return again

    before = found()
    optimizer.state[parameters[0]]["exp_avg"] = other = torch.zeros(2)
    assert found()["state.p0.exp_avg"] is other
    optimizer.state[parameters[1]]["more"] = 3
    assert found()["state.p1.more"] == 3
    optimizer.state[parameters[1]]["deep"] = {"one": torch.ones(1)}
    assert "state.p1.deep.one" in found()
    del optimizer.state[parameters[1]]
    optimizer.add_param_group({"params": [parameters[2]]})
    optimizer.step()
    assert found().keys() > before.keys()
    optimizer.param_groups[0]["params"].reverse()
    found()


@pytest.mark.parametrize("groups", [1, 2])
def test_two_values_of_an_optimizer_with_one_name_are_refused(groups: int) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    names = {id(parameters[0]): "p", id(parameters[1]): "p.q"}
    each = [{"params": [one]} for one in parameters]
    optimizer = torch.optim.SGD(parameters if groups == 1 else each)
    flattened = OptimizerState(optimizer)
    optimizer.state[parameters[0]] = {"q.x": 1}
    optimizer.state[parameters[1]] = {"x": 2}
    for _ in range(2):
        with pytest.raises(CheckpointError, match="two values have this name"):
            flattened.gather(names)


# --- generators -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), np.random.random, lambda: np.random.normal()],
    ids=["python", "python's normal", "numpy", "numpy's normal"],
)
def test_a_draw_shows_in_the_state_of_a_generator(draw: Callable[[], float]) -> None:
    before = rng.capture()
    again = rng.capture()
    assert all(torch.equal(before[kind], again[kind]) for kind in before)
    kept = {kind: one.clone() for kind, one in before.items()}
    drawn = draw()
    assert rng.used_since(kept)
    assert all(torch.equal(before[kind], kept[kind]) for kind in before)
    rng.restore(before)
    assert draw() == drawn


# --- the whole state ------------------------------------------------------------------------------

Parts = tuple[Any, Any]


def program() -> Parts:
    """Return a model with a shared parameter and buffers, and an optimizer with two groups."""
    torch.manual_seed(5)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Identity())
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": [model[2].bias]}])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def another_parameter(model: Any, _: Any) -> None:
    model[1].weight = nn.Parameter(torch.full((4,), 3.0))


def move_parameter(model: Any, _: Any) -> None:
    # The last module had none, so all lists of names and values stay the same.
    model[3].bias = model[2].bias
    del model[2].bias


def exchange_modules(model: Any, _: Any) -> None:
    model[1], model[3] = model[3], model[1]


def own_state(model: Any, _: Any) -> None:
    model[1].state_dict = lambda *_, **__: {"mine": torch.ones(1)}


def save_hook(model: Any, _: Any) -> None:
    more = torch.ones(1)
    model.register_state_dict_post_hook(lambda _, state, *__: state.update(more=more))


def no_more_saved(model: Any, _: Any) -> None:
    model[1]._non_persistent_buffers_set.add("running_mean")


def no_buffer(model: Any, _: Any) -> None:
    model[1].running_mean = None


def one_option_of_all(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.25


def option_in_place(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[1]["betas"] = (0.5, 0.75)


def other_states(_: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def exchange_states(model: Any, optimizer: Any) -> None:
    first, second = optimizer.state[model[0].bias], optimizer.state[model[2].bias]
    first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]


def exchange_parameters(_: Any, optimizer: Any) -> None:
    one, other = optimizer.param_groups
    one["params"][1], other["params"][0] = other["params"][0], one["params"][1]


STATE_CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "another parameter": another_parameter,
    "a parameter of another module": move_parameter,
    "a parameter that is no longer shared": lambda model, _: setattr(
        model[2], "weight", nn.Parameter(torch.ones(4, 4))
    ),
    "other memory of a parameter": lambda model, _: give(model[0].weight, torch.ones(4, 4)),
    "another type of a tensor": lambda model, its: give(
        its.state[model[0].bias]["exp_avg"],
        its.state[model[0].bias]["exp_avg"].view(torch.int32),
    ),
    "another shape of a parameter": lambda model, _: give(model[1].bias, torch.ones(5)),
    "exchanged modules": exchange_modules,
    "a new module": lambda model, _: model.append(nn.Linear(2, 2)),
    "a module fewer": lambda model, _: model.pop(1),
    "another module": lambda model, _: setattr(model, "1", nn.BatchNorm1d(4)),
    "a state of its own": own_state,
    "a hook": save_hook,
    "a buffer that is no longer saved": no_more_saved,
    "a buffer that is gone": no_buffer,
    "another buffer": lambda model, _: setattr(model[1], "running_mean", torch.ones(4)),
    "an option": one_option_of_all,
    "an option of a list": option_in_place,
    "an option that is a tensor": lambda _, its: its.param_groups[0].update(lr=torch.ones(())),
    "an option that is a text": lambda _, its: its.param_groups[0].update(lr="x" * 999),
    "a new option": lambda _, its: its.param_groups[1].update(more=[1, 2]),
    "an option fewer": lambda _, its: its.param_groups[1].pop("maximize"),
    "a nested option": lambda _, its: its.param_groups[1].update(more={"one": torch.ones(1)}),
    "another tensor": lambda model, its: its.state[model[0].bias].update(exp_avg=torch.ones(4)),
    "a tensor of another shape": lambda model, its: give(
        its.state[model[0].bias]["exp_avg"], torch.ones(3)
    ),
    "a number for a tensor": lambda model, its: its.state[model[0].bias].update(step=3),
    "a new value": lambda model, its: its.state[model[0].bias].update(more=torch.ones(2)),
    "a value of no parameter": lambda _, its: its.state.update(shared=torch.ones(2)),
    "no state": other_states,
    "no state of one": lambda model, its: its.state.pop(model[0].bias),
    "exchanged states": exchange_states,
    "exchanged parameters": exchange_parameters,
    "a group more": lambda model, its: its.add_param_group({"params": model[1].parameters()}),
}


def captured(state: TrainState) -> dict[str, Any]:
    return state.capture(TrainingProgress(step=1, seed=1))[0]


@pytest.mark.parametrize("change", STATE_CHANGES.values(), ids=STATE_CHANGES.keys())
def test_each_change_of_a_state_is_in_the_next_save(change: Callable[[Any, Any], object]) -> None:
    parts, joined = program(), Joined()
    state = TrainState(parts[0], [parts[1]], rank=0, world_size=1)
    signature = Signature(flatten(captured(state)))
    flat = [flatten(captured(state), joined) for _ in range(3)]
    assert all(map(signature.fits, flat))
    last = flat[2]
    assert isinstance(last, Flat)
    assert isinstance(flat[1], Flat)
    assert last.facts is flat[1].facts is not None
    change(*parts)
    for _ in range(3):
        found = flatten(captured(state), joined)
        fresh = flatten(captured(TrainState(parts[0], [parts[1]], rank=0, world_size=1)))
        assert list(found) == list(fresh)
        for key, value in fresh.items():
            assert type(found[key]) is type(value)
            if isinstance(value, torch.Tensor):
                assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
                assert key.startswith("rng.") or found[key].data_ptr() == value.data_ptr()
                assert torch.equal(found[key], value)
            else:
                assert found[key] == value
        assert signature.fits(found) == (Signature(fresh) == signature)
        if isinstance(found, Flat) and found.facts is last.facts:
            # Then no tensor may be elsewhere.
            assert [one.data_ptr() for one in found.values() if isinstance(one, torch.Tensor)] == [
                one.data_ptr() for one in last.values() if isinstance(one, torch.Tensor)
            ]


def test_a_hook_of_the_program_runs_at_each_save() -> None:
    model, optimizer = program()
    state, calls = TrainState(model, [optimizer], rank=0, world_size=1), list[int]()
    captured(state)
    model[1].register_state_dict_pre_hook(lambda *_: calls.append(1))
    for _ in range(3):
        before = len(calls)
        captured(state)
        assert len(calls) > before


def test_what_a_program_drops_is_freed_before_the_next_save() -> None:
    model, optimizer = program()
    state = TrainState(model, [optimizer], rank=0, world_size=1)
    for _ in range(3):
        captured(state)
    dropped = [weakref.ref(model[1].running_mean), weakref.ref(model[1])]
    dropped += [weakref.ref(one) for its in optimizer.state.values() for one in its.values()]
    model[1] = nn.BatchNorm1d(4)
    optimizer.state.clear()
    gc.collect()
    assert not any(reference() is not None for reference in dropped)


def test_parameters_that_are_no_longer_trained_are_not_steady() -> None:
    model, optimizer = program()
    state, facts = TrainState(model, [optimizer], rank=0, world_size=1), object()
    before = state.steady(facts)
    assert state.steady(facts) is before
    assert model[0].bias.data_ptr() in before
    model[0].bias.requires_grad_(False)
    assert model[0].bias.data_ptr() not in state.steady(facts)
    model[0].bias.requires_grad_(True)
    optimizer.register_state_dict_pre_hook(lambda _: None)
    assert not state.steady(facts)


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A process group without communication, for sharded tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameters_that_fsdp_has_gathered_are_saved_as_shards(fake_group: None) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = TrainState(model, [optimizer], rank=0, world_size=1)
    views = [captured(state)["model"] for _ in range(2)]
    assert all(views[0][name] is views[1][name] for name in views[0])
    # After a forward, the modules have the gathered parameters until the backward.
    model(torch.ones(2, 4))
    assert not isinstance(model[0].weight, DTensor)
    found = captured(state)["model"]
    assert all(found[name] is views[0][name] for name in found)
    assert isinstance(model[0].weight, DTensor)
    give(model[0].weight._local_tensor, torch.full((4, 4), 7.0))
    assert torch.equal(captured(state)["model"]["0.weight"].to_local(), torch.full((4, 4), 7.0))
