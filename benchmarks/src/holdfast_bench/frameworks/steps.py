"""A model that notes when each step begins, and the figures that follow from these times.

The time from the start of one step to the start of the next contains all that the framework and
Holdfast do between them. So one definition holds for all frameworks. All times are in seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.utils.data import Dataset

# Steps at the start, in which memory is allocated and the framework prepares itself.
WARM_UP: Final = 4


@dataclass(frozen=True)
class Settings:
    """One program: `kind` is "own" for the bare framework, or "holdfast".

    `width` and `layers` give the size of the model, `sleep_s` is the length of a step beside its
    computation, and `save_every` the steps between saves, or 0.
    """

    framework: str
    kind: str
    width: int
    layers: int
    steps: int
    sleep_s: float
    save_every: int
    directory: str
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

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of `inputs`, of shape (batch, width), under the key `loss`."""
        self.starts.append(time.perf_counter())
        self.cpu_s.append(time.thread_time())
        time.sleep(self._sleep_s)
        for layer in self.layers:
            inputs = layer(inputs)
        return {"loss": inputs.square().mean()}


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


def usual_step(starts: Sequence[float]) -> float:
    """Return the median length of a step after the first tenth of them, in the unit of `starts`."""
    later = starts[len(starts) // 10 :]
    return statistics.median(b - a for a, b in pairwise(later))


def write_result(settings: Settings, model: Model) -> None:
    """Write the times of rank 0."""
    if os.environ["RANK"] == "0":
        found = {"starts": model.starts, "cpu_s": model.cpu_s}
        Path(settings.out).write_text(json.dumps(found))
