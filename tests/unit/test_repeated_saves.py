"""What a save reuses of the one before, and each change of the program that it must see."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.contracts.errors import CheckpointError, SaveError
from holdfast.trainer.planning.layout import NumberEntry, plan_layout
from holdfast.trainer.planning.signature import Joined, Signature, flatten
from holdfast.trainer.slots.slots import Slot
from holdfast.trainer.staging.copying import Copier, LateCopy
from holdfast.trainer.staging.stage import StagedSlot
from holdfast.trainer.state import rng
from holdfast.trainer.state.optimizers import OptimizerState

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
