"""What a checkpoint contains of a program: plain state, random states, optimizer state."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.unit.test_exact_state import metadata_of
from torch import nn

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.state import plain, rng
from holdfast.trainer.state.run_state import TrainingProgress
from holdfast.trainer.state.train_state import TrainState


class Holder:
    """An extra with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def round_trip(value: Any) -> Any:
    document, tensors = plain.encode(value, "x")
    return plain.decode(json.loads(json.dumps(document, allow_nan=False)), tensors)


def test_plain_state_round_trips() -> None:
    state = {
        "list": [1, 2.5, True, None, "text"],
        "tuple": (1, (2, "b")),
        "milestones": Counter({10: 1, 20: 2}),
        "bytes": b"\x00\xff",
        "scalar": np.float64(1.5),
        "$holdfast": "a key of ours as the user's own",
    }
    back = round_trip(state)
    assert back == {**state, "milestones": {10: 1, 20: 2}}
    assert isinstance(back["tuple"], tuple)


class Place(NamedTuple):
    row: int
    column: int


def test_numpy_values_keep_their_types() -> None:
    """A float32 that comes back as a Python float makes an average differ after two resumes."""
    state = {
        "one": np.float32(0.1),
        "half": np.float16("nan"),
        "flag": np.bool_(True),
        "long": np.uint64(2**64 - 1),
        "text": np.str_("a"),
        "bytes": np.bytes_(b"\xff"),
        "foreign": np.arange(3, dtype=">f4"),
        "foreigner": {"a.b": np.ones(1, dtype=">i8"), "a": {"b": np.zeros(1, dtype="<i8")}},
    }
    back = round_trip(state)
    for name, value in state.items():
        assert type(back[name]) is type(value), name
        assert repr(back[name]) == repr(value), name


@pytest.mark.parametrize(
    "value",
    [
        np.ma.masked_array([1.0, 2.0], mask=[False, True]),
        np.zeros(2, dtype=[("a", "f4")]),
        np.longdouble(1),
        np.array([1, "a"], dtype=object),
        np.complex64(1),
        Place(1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_values_with_more_than_numbers_are_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^extra\.x\.v: {type(value).__name__}.* a pickle"):
        plain.encode({"v": value}, "extra.x")


def test_infinities_and_nan_round_trip() -> None:
    back = round_trip([float("inf"), float("-inf"), float("nan")])
    assert back[0] == float("inf")
    assert back[1] == float("-inf")
    assert back[2] != back[2]


def test_tensors_and_arrays_are_kept_outside_the_document() -> None:
    value = {"a": [torch.ones(3), np.arange(4)], 7: torch.zeros(2, dtype=torch.bfloat16)}
    document, tensors = plain.encode(value, "extra.x")
    assert set(tensors) == {"extra.x.a.0", "extra.x.a.1", "extra.x.7"}
    back = plain.decode(document, tensors)
    assert torch.equal(back["a"][0], value["a"][0])  # type: ignore[index]
    assert np.array_equal(back["a"][1], np.arange(4))
    blank = plain.templates(document)
    assert {name: (t.shape, t.dtype) for name, t in blank.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}, {"deep": [{"x": complex(1)}]}])
def test_objects_that_need_a_pickle_are_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^extra\.x.* cannot be saved without a pickle"):
        plain.encode(value, "extra.x")


def test_state_that_contains_itself_is_refused() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(CheckpointError, match="does it contain itself"):
        plain.encode(knot, "x")


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        int(np.random.randint(1 << 30)),
        torch.randn(3).tolist(),
    )


def test_random_states_are_restored_exactly() -> None:
    rng.reseed(3, 1, 100)
    # Draw once first, so that the second number of each Gaussian pair is pending.
    draw()
    saved = rng.capture()
    expected = draw()
    rng.reseed(9, 9, 9)
    assert draw() != expected
    blank = rng.empty_like_saved(saved, lambda kind: saved[kind].shape)
    for kind, tensor in blank.items():
        assert (tensor.shape, tensor.dtype) == (saved[kind].shape, saved[kind].dtype)
        tensor.copy_(saved[kind])
    rng.restore(blank)
    assert draw() == expected


def test_ranks_and_steps_have_different_seeds() -> None:
    drawn = []
    for rank, step in [(0, 10), (1, 10), (0, 11), (0, 10)]:
        rng.reseed(0, rank, step)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len({str(each) for each in drawn}) == 3


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def make_state(rank: int, world_size: int, extra: Any) -> tuple[TrainState, nn.Module, Any]:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    state = TrainState(model, [optimizer], [scheduler], extra, rank=rank, world_size=world_size)
    return state, model, scheduler


def train(model: nn.Module, scheduler: Any) -> None:
    model(torch.randn(3, 4)).sum().backward()
    scheduler.optimizer.step()
    scheduler.optimizer.zero_grad()
    scheduler.step()


def copy_into(target: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in target.items():
        if isinstance(value, dict):
            copy_into(value, source[key])
        elif isinstance(value, torch.Tensor):
            value.copy_(source[key])
        else:
            target[key] = source[key]


def test_the_whole_train_state_is_restored() -> None:
    ema = Holder({"weights": [torch.arange(3.0)], "decay": 0.99})
    state, model, scheduler = make_state(0, 1, {"ema": ema})
    for _ in range(3):
        train(model, scheduler)
    tensors, document = state.capture(TrainingProgress(step=3, seed=0, best={"value": 1.5}))
    tensors = {k: dict(v) for k, v in tensors.items()}
    document = json.loads(json.dumps(document))
    expected = torch.randn(2)

    other = Holder({"weights": [torch.zeros(3)], "decay": 0.0})
    again, model_2, scheduler_2 = make_state(0, 1, {"ema": other})
    target = again.template(document, lambda: metadata_of(tensors))
    assert {k: set(v) for k, v in target.items()} == {k: set(v) for k, v in tensors.items()}
    copy_into(target, tensors)
    restored = again.apply(target, document)
    assert restored.parts == ("model", "optimizer", "scheduler", "extra.ema", "rng")
    assert torch.equal(torch.randn(2), expected)
    assert other.state["decay"] == 0.99
    assert torch.equal(other.state["weights"][0], torch.arange(3.0))
    assert scheduler_2.last_epoch == 3
    torch.manual_seed(5)
    train(model, scheduler)
    torch.manual_seed(5)
    train(model_2, scheduler_2)
    for one, two in zip(model.parameters(), model_2.parameters(), strict=True):
        assert torch.equal(one, two)


def test_new_ranks_are_reseeded_and_fewer_ranks_read_every_random_state() -> None:
    state, _, _ = make_state(0, 2, {})
    tensors, document = state.capture(TrainingProgress(step=0, seed=0))
    wider, _, _ = make_state(2, 4, {})
    target = wider.template(document)
    assert "rng" not in target
    assert wider.apply(target, document).reseeded
    narrower, _, _ = make_state(0, 1, {})
    assert set(narrower.template(document)["rng"]) == {"rank00000", "rank00001"}
    assert set(tensors["rng"]) == {"rank00000"}


def test_added_and_removed_extras_are_named() -> None:
    state, _, _ = make_state(0, 1, {"gone": Holder({"x": torch.ones(2)})})
    tensors, document = state.capture(TrainingProgress(step=0, seed=0))
    again, _, _ = make_state(0, 1, {"new": Holder({})})
    target = again.template(document)
    assert set(target["extra"]) == {"gone.x"}
    copy_into(target, tensors)
    restored = again.apply(target, document)
    assert restored.missing == ("extra.new",)
    assert restored.unused == ("extra.gone",)


def test_a_document_of_another_format_is_refused() -> None:
    state, _, _ = make_state(0, 1, {})
    with pytest.raises(CheckpointError, match="format 99"):
        state.template({"format": 99})
