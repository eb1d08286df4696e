"""Shared parts of the DCP compatibility checks: ranks, a Holdfast checkpoint, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.checkpoint_program import collect, make_state
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from holdfast.trainer.loading.reader import LoadReport, load_state
from holdfast.trainer.planning.layout import local_part
from holdfast.trainer.saving.engine import CheckpointEngine

State = dict[str, Any]


@dataclass(frozen=True)
class Testbed:
    """One rank's helper. `ours` is a checkpoint of `state()` that Holdfast committed."""

    rank: int
    world_size: int
    folder: Path
    group: dist.ProcessGroup
    engine: CheckpointEngine
    ours: Path
    flusher: str

    def state(self, *, seed: int = 0) -> State:
        """Sharded model and optimizer, nested lists, unusual tensors, numbers."""
        model, optimizer = make_state(self.world_size, steps=2, seed=seed)
        return collect(model, optimizer, None) | plain_state(seed)

    def blank(self) -> State:
        """The same keys with other values."""
        return self.state(seed=5)

    def place(self, name: str) -> Path:
        """A directory for one check, the same on all ranks."""
        return self.folder / name

    def load(self, directory: Path, state: State, **options: Any) -> LoadReport:
        """Load with Holdfast."""
        return load_state(directory, state, group=self.group, **options)

    def by_rank_0(self, act: Callable[[], object]) -> None:
        """Run `act` on rank 0 while the other ranks wait."""
        if self.rank == 0:
            act()
        dist.barrier()


def plain_state(seed: int) -> State:
    """The unsharded part: lists, unusual tensors, numbers, flat keys."""
    make = partial(torch.arange, seed, seed + 12)
    return {
        "lists": [make(), {"deep": make().float()}, [make(), make()]],
        "odd": {
            "transposed": make().view(3, 4).t(),
            "part": make()[2:5],
            "bf16": make().bfloat16(),
            "complex": torch.complex(make().float(), make().float()),
            "bool": make() % 2 == 0,
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(float(seed)),
        },
        "numbers": {"n": seed, "x": seed / 7, "betas": (0.9, seed / 9), "word": f"w{seed}"},
        "groups": [{"lr": 0.1 * seed, "params": [f"{seed}.weight"], "foreach": None}],
        "foo_plain": make().double(),
        "foo_number": seed,
    }


def flat_state(seed: int) -> State:
    """Replicated tensors and a number, without nesting."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(3 + i, 4, generator=generator) for i in range(5)}
    return {**tensors, "number": seed}


def zeros(state: State) -> State:
    """A state of the same structure with all tensors zero; numbers are kept."""
    zeroed: State = tree_map(lambda v: torch.zeros_like(v) if torch.is_tensor(v) else v, state)
    return zeroed


def whole(state: Mapping[str, Any]) -> State:
    """Flatten the state and gather every sharded tensor; a collective call."""
    flat = flatten_state_dict(dict(state))[0]
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items()}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Both states are bit-identical on this rank, types included."""
    one, other = (flatten_state_dict(dict(state))[0] for state in (found, expected))
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    assert one
    for key, value in other.items():
        if not isinstance(value, torch.Tensor):
            assert type(one[key]) is type(value), key
            assert one[key] == value, key
            continue
        assert type(one[key]) is type(value), key
        if isinstance(value, ShardedTensor) and not value.local_shards():
            continue
        mine, theirs = local_part(one[key]), local_part(value)
        assert mine.dtype == theirs.dtype, key
        assert torch.equal(mine, theirs), key
