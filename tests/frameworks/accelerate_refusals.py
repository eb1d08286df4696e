"""Programs that the adapter for Accelerate refuses, each in a forked process.

    python -m tests.frameworks.accelerate_refusals FOLDER

Prints the type and text of each program's error as JSON, by the name of its function.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration
from tests.frameworks.refusals import (
    Stream,
    error_of,
    numbers,
    print_errors,
    save_with_a_session,
)
from torch.utils.data import DataLoader

from holdfast.trainer.frameworks.accelerate import Accelerator

FOLDER = Path(sys.argv[-1])
Parts = tuple[Accelerator, torch.nn.Module, Any, Any]


def prepared(name: str, dataset: Any = None, **data: Any) -> Parts:
    """An accelerator whose run is in the folder `name`, with a model, an optimizer and a loader."""
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(**data),
        session={"directory": FOLDER / name},
    )
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(dataset or numbers(), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def train(epochs: Any, model: torch.nn.Module, optimizer: Any, loader: Any) -> None:
    for _ in epochs:
        for batch in loader:
            inputs = batch[0] if isinstance(batch, list) else batch
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def loop_over_a_range() -> None:
    parts = prepared("range")
    train(range(2), *parts[1:])


def unprepared_loader() -> None:
    accelerator, model, optimizer, _ = prepared("unprepared")
    train(accelerator.epochs(2), model, optimizer, DataLoader(numbers(), batch_size=2))


def loader_without_length() -> None:
    accelerator, *parts = prepared("stream", Stream())
    train(accelerator.epochs(2), *parts)


def loader_of_rank_0() -> None:
    accelerator, *parts = prepared("dispatched", dispatch_batches=True)
    train(accelerator.epochs(2), *parts)


def nothing_prepared() -> None:
    next(Accelerator(cpu=True).epochs(2))


def optimizer_prepared_late() -> None:
    accelerator, model, _, _ = prepared("late")
    accelerator.resume()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))


def two_accelerators() -> None:
    first, *_ = prepared("two")
    first.resume()
    prepared("two")[0].resume()


def second_loop() -> None:
    accelerator, *parts = prepared("loops")
    train(accelerator.epochs(1), *parts)
    train(accelerator.epochs(2), *parts)


def training_after_free_memory() -> None:
    accelerator, *parts = prepared("freed")
    train(accelerator.epochs(1), *parts)
    accelerator.free_memory()
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def second_accelerator_after_the_first() -> None:
    accelerator, *parts = prepared("first")
    train(accelerator.epochs(1), *parts)
    accelerator.end_training()
    accelerator, *parts = prepared("second")
    train(accelerator.epochs(1), *parts)


def step_without_synchronized_gradients() -> None:
    accelerator, model, optimizer, loader = prepared("local")
    # As DDP sets it inside of `no_sync`.
    vars(model)["require_backward_grad_sync"] = False
    train(accelerator.epochs(1), model, optimizer, loader)


def hook_registered_twice() -> None:
    accelerator = Accelerator(cpu=True)

    def hook(*_: Any) -> None:
        """Do nothing."""

    accelerator.register_load_state_pre_hook(hook)
    accelerator.register_save_state_pre_hook(hook)
    accelerator.register_save_state_pre_hook(hook)


def checkpoint_of_another_program() -> None:
    save_with_a_session(FOLDER / "other")
    prepared("other")[0].resume()


def trained() -> None:
    accelerator, *parts = prepared("changed")
    train(accelerator.epochs(1), *parts)
    accelerator.end_training()


def another_dataset() -> None:
    assert error_of(trained) == "no error"
    prepared("changed", numbers(10))[0].resume()


def folder_of_another_framework() -> None:
    (FOLDER / "strange").mkdir()
    (FOLDER / "strange" / "trainer_state.json").touch()
    prepared("strange_run")[0].load_state(FOLDER / "strange")


def missing_folder() -> None:
    prepared("missing_run")[0].load_state(FOLDER / "missing")


def link(name: str, **content: Any) -> Path:
    folder = FOLDER / name
    folder.mkdir()
    (folder / "holdfast.json").write_text(json.dumps(content))
    return folder


def link_of_a_newer_version() -> None:
    prepared("newer_run")[0].load_state(link("newer", format=2, checkpoint="a", directory="b"))


def link_to_nothing() -> None:
    folder = link("gone", format=1, checkpoint="x:step-00000001.a0001.l01", directory="/nowhere")
    prepared("gone_run")[0].load_state(folder)


def link_to_an_uncommitted_save() -> None:
    name = "step-00000001.a0001.l01"
    directory = FOLDER / "torn_run" / "checkpoints" / name
    directory.mkdir(parents=True)
    folder = link("torn", format=1, checkpoint=f"torn_run:{name}", directory=str(directory))
    prepared("torn_reader")[0].load_state(folder)


def load_state_in_the_loop() -> None:
    accelerator, *_ = prepared("inside")
    for _ in accelerator.epochs(1):
        accelerator.load_state(FOLDER)


def numbered_folder_of_something_else() -> None:
    accelerator, *_ = prepared("numbered")
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.project_dir = FOLDER / "project"
    taken = FOLDER / "project" / "checkpoints" / "checkpoint_0"
    taken.mkdir(parents=True)
    (taken / "model.safetensors").touch()
    for _ in accelerator.epochs(1):
        accelerator.save_state()


if __name__ == "__main__":
    print_errors(
        (
            loop_over_a_range,
            unprepared_loader,
            loader_without_length,
            loader_of_rank_0,
            nothing_prepared,
            optimizer_prepared_late,
            two_accelerators,
            second_loop,
            training_after_free_memory,
            second_accelerator_after_the_first,
            step_without_synchronized_gradients,
            hook_registered_twice,
            checkpoint_of_another_program,
            another_dataset,
            folder_of_another_framework,
            missing_folder,
            link_of_a_newer_version,
            link_to_nothing,
            link_to_an_uncommitted_save,
            load_state_in_the_loop,
            numbered_folder_of_something_else,
        )
    )
