"""Programs that must fail, each in a forked process, so that each has a process of its own."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from holdfast.trainer import Session


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(8, 2)


def numbers(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.ones(count, 2))


def save_with_a_session(directory: Path) -> None:
    """Make a checkpoint of a plain loop."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, directory=directory) as session:
        for _ in session.steps(1):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()


def print_errors(programs: Iterable[Callable[[], None]]) -> None:
    """Print the type and text of each program's error as JSON, by the name of its function."""
    torch.set_num_threads(1)
    print(json.dumps({program.__name__: error_of(program) for program in programs}))


def error_of(program: Callable[[], None]) -> str:
    """Run a program in a fork, and return the type and text of its error."""
    reader, writer = os.pipe()
    if not os.fork():
        text = "no error"
        try:
            program()
        # Whatever ends the program is the answer, also SystemExit.
        except BaseException as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    os.wait()
    return text
