"""Programs that Holdfast's `Fabric` refuses, each in a forked process.

    python -m tests.frameworks.fabric_refusals FOLDER

Prints the type and text of each program's error as JSON, by the name of its function.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tests.frameworks.refusals import (
    Stream,
    error_of,
    numbers,
    print_errors,
    save_with_a_session,
)
from torch.utils.data import DataLoader

from holdfast.trainer.frameworks.lightning import Fabric

FOLDER = Path(sys.argv[-1])
Parts = tuple[Fabric, torch.nn.Module, Any, Any]


def set_up(name: str, dataset: Any = None, **settings: Any) -> Parts:
    """A fabric whose run is in the folder `name`, with a model, an optimizer and a loader."""
    options = {"directory": FOLDER / name}
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **settings}, session=options)
    fabric.launch()
    model = torch.nn.Linear(2, 1)
    loader = fabric.setup_dataloaders(DataLoader(dataset or numbers(), batch_size=2))
    parts = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return (fabric, *parts, loader)


def train(fabric: Fabric, epochs: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in epochs:
        for batch in loader:
            fabric.backward(model(batch[0] if isinstance(batch, list) else batch).sum())
            optimizer.step()
            optimizer.zero_grad()


def loop_over_a_range() -> None:
    fabric, *parts = set_up("range")
    train(fabric, range(2), *parts)


def loader_that_is_not_set_up() -> None:
    fabric, model, optimizer, _ = set_up("bare")
    train(fabric, fabric.epochs(2), model, optimizer, DataLoader(numbers(), batch_size=2))


def loader_without_length() -> None:
    fabric, *parts = set_up("stream", Stream())
    train(fabric, fabric.epochs(2), *parts)


def nothing_set_up() -> None:
    next(Fabric(accelerator="cpu", devices=1).epochs(2))


def model_set_up_late() -> None:
    fabric, *_ = set_up("late")
    fabric.resume()
    fabric.setup(torch.nn.Linear(2, 1))


def name_registered_twice() -> None:
    fabric, *_ = set_up("names")
    fabric.register(ema=torch.nn.Linear(1, 1))
    fabric.register(ema=torch.nn.Linear(1, 1))


def step_without_synchronized_gradients() -> None:
    fabric, model, optimizer, loader = set_up("local", strategy="ddp")
    with fabric.no_backward_sync(model):
        train(fabric, fabric.epochs(1), model, optimizer, loader)


def second_loop() -> None:
    fabric, *parts = set_up("loops")
    train(fabric, fabric.epochs(1), *parts)
    train(fabric, fabric.epochs(2), *parts)


def second_fabric() -> None:
    fabric, *parts = set_up("first")
    train(fabric, fabric.epochs(1), *parts)
    set_up("second")


def checkpoint_of_another_program() -> None:
    save_with_a_session(FOLDER / "other")
    set_up("other")[0].resume()


def trained() -> None:
    fabric, *parts = set_up("changed")
    train(fabric, fabric.epochs(1), *parts)


def another_dataset() -> None:
    assert error_of(trained) == "no error"
    set_up("changed", numbers(10))[0].resume()


if __name__ == "__main__":
    print_errors(
        (
            loop_over_a_range,
            loader_that_is_not_set_up,
            loader_without_length,
            nothing_set_up,
            model_set_up_late,
            name_registered_twice,
            step_without_synchronized_gradients,
            second_loop,
            second_fabric,
            checkpoint_of_another_program,
            another_dataset,
        )
    )
