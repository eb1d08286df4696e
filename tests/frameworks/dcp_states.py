"""States and a planner for tests of the DCP drop-in, and a comparison of them to the bit."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

# Stock DCP, which does not declare its names as exports.
stock: Any = torch.distributed.checkpoint
State = dict[str, Any]


class Counter:
    """A `Stateful` object, such as the progress of a program."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> State:
        return {"count": self.count, "half": torch.tensor(self.count / 2)}

    def load_state_dict(self, state: State) -> None:
        self.count = state["count"]
        assert float(state["half"]) == self.count / 2


class Doubles(DefaultLoadPlanner):
    """Loads twice the saved values."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def make_state(seed: int) -> State:
    """A model with its optimizer, and values of every kind that a program saves beside them."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.randn(5, 6, generator=generator)).square().sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "name": f"run {seed}",
        "losses": [seed / 3, seed / 7],
        "nested": {"pair": (seed, (seed, "x")), "nothing": None, "empty": {}, "flag": seed > 3},
        "list": [torch.full((2, 3), float(seed)), {"deep": torch.arange(seed + 1, seed + 4)}],
        "memory": io.BytesIO(b"bytes of %d" % seed),
        "set": {seed, seed + 1},
        "complex": complex(seed, 1),
        "scalar": torch.tensor(seed, dtype=torch.bfloat16),
        "no_elements": torch.zeros(0, 4),
    }


def saved_date(seed: int) -> State:
    """A state with a value that only a pickle can hold."""
    return {"weight": torch.full((3,), float(seed)), "date": datetime.date(2020, 1, 1 + seed)}


def is_same(one: Any, other: Any) -> bool:
    """True if both are equal to the bit, with equal types."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(is_same(*pair) for pair in pairs)
    if isinstance(one, io.BytesIO):
        return isinstance(other, io.BytesIO) and one.getvalue() == other.getvalue()
    return bool(one == other) and type(one) is type(other)
