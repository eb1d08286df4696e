"""DTensors whose local tensor is a subclass with two inner tensors, and the errors on two ranks.

    python wrapped_program.py FOLDER

Each rank writes its errors by case to `FOLDER/errors-<rank>.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.forked_ranks import run_ranks
from tests.unit.test_refused_tensors import Quantised, quantised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer import Session, load_checkpoint

RANKS = 2


class Wrapping(torch.optim.Optimizer):
    """An optimizer with eight-bit moments that are sharded like the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                local = p.detach().to_local()
                self.state[p].setdefault("moment", spread(p, Quantised(local.char(), local)))


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    run_ranks(RANKS, folder / "store", partial(meet_each, folder))


def meet_each(folder: Path) -> None:
    cases: dict[str, Callable[[Path], None]] = {
        "buffer": partial(construct, has=range(RANKS)),
        "one rank": partial(construct, has=[1]),
        "moment": step_once,
        "target": load_into,
    }
    errors = {case: caught(partial(act, folder / case)) for case, act in cases.items()}
    (folder / f"errors-{dist.get_rank()}.json").write_text(json.dumps(errors))


def caught(act: Callable[[], None]) -> str:
    try:
        act()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def spread(like: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def make() -> nn.Linear:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def odd(*, is_wrapped: bool) -> DTensor:
    mesh = init_device_mesh("cpu", (RANKS,))
    local = quantised() if is_wrapped else torch.ones(4)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def construct(directory: Path, has: Any) -> None:
    """Open a session of a model whose buffer is wrapped on the ranks that `has` selects."""
    model = make()
    model.register_buffer("odd", odd(is_wrapped=dist.get_rank() in has))
    Session(model, torch.optim.Adam(model.parameters()), directory=directory)


def step_once(directory: Path) -> None:
    model = make()
    optimizer = Wrapping(model.parameters())
    with Session(model, optimizer, directory=directory) as session:
        for _ in session.steps(1):
            optimizer.step()


def load_into(directory: Path) -> None:
    """Load a buffer that was saved plain into one that is wrapped."""
    for is_wrapped in (False, True):
        model = make()
        model.register_buffer("odd", odd(is_wrapped=is_wrapped))
        if is_wrapped:
            (saved,) = (directory / "checkpoints").glob("step-*")
            load_checkpoint(saved, model)
            return
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Session(model, optimizer, directory=directory) as session:
            for _ in session.steps(1):
                optimizer.step()


if __name__ == "__main__":
    main()
