"""A model that notes when each step begins, and the figures that follow from these times.

The time from the start of one step to the start of the next contains all that the framework and
Holdfast do between them. So one definition holds for all frameworks. All times are in seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.utils.data import Dataset

# Steps at the start, in which memory is allocated and the framework prepares itself.
WARM_UP: Final = 4
# Two programs that take turns do this many steps at a time. The first steps of a turn find the
# caches of the processor cold, and the first turns are a warm-up.
TURN_STEPS: Final = 25
COLD_STEPS: Final = 2
WARM_UP_TURNS: Final = 4
TURNS_LEFT: Final = 1000


@dataclass(frozen=True)
class Settings:
    """One program: `kind` is "own" for the bare framework, or "holdfast".

    `width` and `layers` give the size of the model, `sleep_s` is the length of a step beside its
    computation, and `save_every` the steps between saves, or 0. A program with `turns`, the
    folder of `turns_of`, takes turns with the program of the other kind.
    """

    framework: str
    kind: str
    width: int
    layers: int
    steps: int
    sleep_s: float
    save_every: int
    directory: str
    turns: str = ""
    out: str = ""

    @property
    def has_holdfast(self) -> bool:
        return self.kind == "holdfast"

    @property
    def folder(self) -> Path:
        """The folder that the program saves into."""
        return Path(self.directory)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@contextlib.contextmanager
def turns_of(kinds: Sequence[str], folder: Path) -> Iterator[str]:
    """Make a pipe for the program of each kind in `folder`. The first kind has the first turn."""
    for kind in kinds:
        os.mkfifo(folder / kind)
    # The byte stays in the pipe while someone has it open.
    pipe = os.open(folder / kinds[0], os.O_RDWR)
    try:
        os.write(pipe, bytes(1))
        yield str(folder)
    finally:
        os.close(pipe)


class Turns:
    """Lets two programs step in turns, so that both meet the same speeds of a shared machine.

    A program waits for a byte in the pipe of its kind.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        # Opened for both directions, so that no open waits, and no reader finds the end.
        pipes = {each.name: os.open(each, os.O_RDWR) for each in folder.iterdir()}
        self._mine = pipes.pop(kind)
        (self._other,) = pipes.values()

    def before_step(self, step: int) -> None:
        """Pass the turn on after each `TURN_STEPS` steps, and wait for the next one."""
        if step % TURN_STEPS == 0:
            if step:
                self.pass_on()
            os.read(self._mine, 1)

    def pass_on(self, turns: int = 1) -> None:
        """Give the other program so many turns."""
        os.write(self._other, bytes(turns))


class Model(nn.Module):
    """Linear layers. `starts` has the times at which a training step called it.

    `cpu_s` has the CPU time that the calling thread had used by then.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(settings.layers)
        )
        self.starts: list[float] = []
        self.cpu_s: list[float] = []
        self._sleep_s = settings.sleep_s
        self._turns = Turns(Path(settings.turns), settings.kind) if settings.turns else None

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of `inputs`, of shape (batch, width), under the key `loss`."""
        if self._turns is not None:
            self._turns.before_step(len(self.starts))
        self.starts.append(time.perf_counter())
        self.cpu_s.append(time.thread_time())
        time.sleep(self._sleep_s)
        for layer in self.layers:
            inputs = layer(inputs)
        return {"loss": inputs.square().mean()}

    def end(self) -> None:
        """Call it after the last step. A program that takes turns no longer waits for this one."""
        if self._turns is not None:
            self._turns.pass_on(TURNS_LEFT)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """One row for each rank and step."""

    def __init__(self, settings: Settings, ranks: int) -> None:
        self._row = torch.linspace(-1.0, 1.0, settings.width)
        self._length = settings.steps * ranks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._row}


def blocked(starts: Sequence[float], save_every: int) -> list[float]:
    """Return how much longer than others the steps with a save took, one number for each save.

    Only steps are compared that are neither a save nor directly after one.
    """
    lengths = [after - before for before, after in pairwise(starts)]
    saves = [at - 1 for at in range(save_every, len(lengths) + 1, save_every)]
    near = {index for save in saves for index in (save, save + 1)}
    plain = [one for at, one in enumerate(lengths) if at >= WARM_UP and at not in near]
    usual = statistics.median(plain)
    return [lengths[save] - usual for save in saves if save >= WARM_UP]


def extra_per_step(own: Sequence[float], ours: Sequence[float]) -> float:
    """Return how much longer a step of `ours` takes than one of `own`, which took turns.

    Both are the starts of the steps, and the result is in their unit: the median of the turns'
    differences, each of which is one between two medians.
    """
    turns = zip(_turns_of(own), _turns_of(ours), strict=False)
    return statistics.median(b - a for a, b in turns)


def usual_step(starts: Sequence[float]) -> float:
    """Return the median length of a step of a program that took turns, in the unit of `starts`."""
    return statistics.median(_turns_of(starts))


def _turns_of(starts: Sequence[float]) -> list[float]:
    """Return the median length of a step in each turn after the warm-up."""
    found = []
    for first in range(WARM_UP_TURNS * TURN_STEPS, len(starts), TURN_STEPS):
        # The last step of a turn ends only in the next turn.
        turn = starts[first + COLD_STEPS : first + TURN_STEPS]
        if len(turn) == TURN_STEPS - COLD_STEPS:
            found.append(statistics.median(b - a for a, b in pairwise(turn)))
    return found


def write_result(settings: Settings, model: Model) -> None:
    """Write the times of rank 0. Call it once after the last step."""
    model.end()
    if os.environ["RANK"] == "0":
        found = {"starts": model.starts, "cpu_s": model.cpu_s}
        Path(settings.out).write_text(json.dumps(found))
