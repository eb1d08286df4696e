"""Trains the same small models with copies that continue during the next step, and without.

Its settings are one JSON argument. For each case, rank 0 writes a line to `lines.jsonl` with the
number of copies that went on after a boundary. The copies are slowed, so that they take longer than
what a program does before its optimizer steps.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast.trainer import Session
from holdfast.trainer.staging import copying

WIDTH = 768
STEPS = 12
EVERY = 2
LATER = 6


def slow_down(seconds: float) -> None:
    """Let each piece of a late copy take at least `seconds`."""
    move_all = copying._move_all

    def slow(moves: Any, most: int = copying.MOVE_BYTES, move: Any = None) -> None:
        if most == copying.LATE_MOVE_BYTES:
            time.sleep(seconds)
        move_all(moves, most, move)

    copying._move_all = slow


class Case:
    """One model with what steps it. Each method is called once in each step, in this order."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        self.extra: dict[str, Any] = {}
        self.model = self.build()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizers = self.make_optimizers()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)]

    def train(self, session: Session, step: int) -> None:
        self.loss(step).backward()  # type: ignore[no-untyped-call]
        self.update(session)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self, session: Session) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def loss(self, step: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(8, WIDTH, generator=made)
        return F.mse_loss(self.wrapped(inputs), inputs)


class Fused(Case):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)]


class Momentum(Case):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=True)]


class Accumulated(Case):
    """Several backwards before each optimizer step."""

    def train(self, session: Session, step: int) -> None:
        for part in range(3):
            self.loss(10 * step + part).backward()  # type: ignore[no-untyped-call]
        self.update(session)
        self.optimizers[0].zero_grad()


class AccumulatedOver(Case):
    """An optimizer step in every third step of the loop only."""

    def train(self, session: Session, step: int) -> None:
        self.loss(step).backward()  # type: ignore[no-untyped-call]
        if step % 3 == 0:
            self.update(session)
            self.optimizers[0].zero_grad()


class Norm(Case):
    """Buffers that each forward changes, large enough for a late copy."""

    def build(self) -> nn.Module:
        wide = 20_000
        narrow = [nn.Linear(WIDTH, 32), nn.Linear(32, wide)]
        return nn.Sequential(
            *narrow, nn.BatchNorm1d(wide), nn.Linear(wide, 32), nn.Linear(32, WIDTH)
        )


class Averaged(Case):
    """An average of the weights, updated after each optimizer step."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        self.average = AveragedModel(self.model)
        self.extra["average"] = self.average
        return super().make_optimizers()

    def update(self, session: Session) -> None:
        super().update(session)
        self.average.update_parameters(self.model)


class Two(Case):
    """Two optimizers, the second of which steps long after the first."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        first, last = self.model.get_submodule("0"), self.model.get_submodule("2")
        return [
            torch.optim.Adam(first.parameters(), lr=0.01),
            torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9),
        ]


class Announced(Case):
    """Updates by hand that the program announces, through `.data`."""

    def update(self, session: Session) -> None:
        session.before_update()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


class ByHand(Case):
    """Updates by hand that nothing announces."""

    def update(self, session: Session) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


class ByData(ByHand):
    """The same through `.data`, which changes no version counter."""

    def update(self, session: Session) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


class Bounded(Case):
    """An embedding whose forward changes its weights."""

    def build(self) -> nn.Module:
        self.table = nn.Embedding(1000, WIDTH, max_norm=1.0)
        return nn.Sequential(self.table, nn.Linear(WIDTH, WIDTH))

    def loss(self, step: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(step)
        found: torch.Tensor = self.wrapped(torch.randint(0, 1000, (64,), generator=made))
        return found.square().mean()


class Evaluated(Case):
    """A few rows that change through `.data`, and an evaluation right after the first copy."""

    def train(self, session: Session, step: int) -> None:
        if step == EVERY + 1:
            with session.phase("eval"), torch.no_grad():
                self.loss(0)
        super().train(session, step)

    def update(self, session: Session) -> None:
        # None of them has a word that is compared after a late copy.
        self.model.get_parameter("0.weight").data[5:9] *= 0.5
        super().update(session)


class Compiled(Case):
    """A compiled optimizer step, which runs no hooks."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        (made,) = super().make_optimizers()
        self.compiled: Callable[[], object] = torch.compile(made.step, backend="aot_eager")
        return [made]

    def update(self, session: Session) -> None:
        self.compiled()


# The same, but only from some step on: the session has tried out the first copy by then.


class LaterByHand(ByHand):
    def update(self, session: Session) -> None:
        (ByHand if session.step >= LATER else Case).update(self, session)


class LaterByData(ByData):
    def update(self, session: Session) -> None:
        (ByData if session.step >= LATER else Case).update(self, session)


class LaterBounded(Bounded):
    def train(self, session: Session, step: int) -> None:
        self.table.max_norm = 1.0 if session.step >= LATER else None
        super().train(session, step)


class LaterCompiled(Compiled):
    def update(self, session: Session) -> None:
        (Compiled if session.step >= LATER else Case).update(self, session)


CASES: dict[str, type[Case]] = {
    name: case for name, case in globals().items() if isinstance(case, type) and case is not Session
}


def run(case: Case, directory: Path, settings: dict[str, Any], *, overlap: bool) -> int:
    """Return the number of copies that went on after a boundary."""
    late = 0
    session = Session(
        case.model,
        case.optimizers,
        extra=case.extra,
        directory=directory,
        interval=settings.get("interval", EVERY),
        snapshots=settings.get("snapshots", "off"),
        overlap=overlap,
    )
    with session:
        for step in session.steps(STEPS):
            is_late = session._saver.engine.is_copying
            late += is_late
            if is_late and step == settings.get("killed_in"):
                os.kill(os.getpid(), signal.SIGKILL)
            if is_late and step == settings.get("fails_in"):
                raise RuntimeError(f"a bad batch in step {step}")
            case.train(session, step)
            time.sleep(settings["pause_s"])
    return late


def cases(settings: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for name in settings["cases"]:
        for overlap in settings.get("overlap", (False, True)):
            yield name, overlap


def main() -> None:
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    slow_down(settings["piece_s"])
    base = Path(settings["directory"])
    for name, overlap in cases(settings):
        case = CASES[name]()
        late = run(case, base / name / str(overlap), settings, overlap=overlap)
        if dist.get_rank() == 0:
            with open(base / "lines.jsonl", "a") as stream:
                print(json.dumps({"case": name, "overlap": overlap, "late": late}), file=stream)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
